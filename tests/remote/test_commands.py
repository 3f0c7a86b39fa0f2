"""`shardmill push` and `shardmill pull` as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmill.errors import OptionError
from shardmill.remote import push
from tests.remote.conftest import Spot, files_of
from tests.services import LoopbackS3


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    message = done.stderr.strip().splitlines()[-1]
    assert all(word in message for word in words), done.stderr


def test_a_receipt_on_stdout_as_text_and_as_json(
    shardmill, make_store, s3: LoopbackS3, s3_spot: Spot, tmp_path
):
    store, env = make_store(), s3.environment()
    sent = shardmill("push", str(store), s3_spot.url, env=env)
    assert sent.returncode == 0, sent.stderr
    assert sent.stdout.startswith(f"{s3_spot.url}: store of 14 files, ")
    assert "14 sent" in sent.stdout
    fetched = shardmill("pull", s3_spot.url, str(tmp_path / "copy"), "--json", env=env)
    receipt = json.loads(fetched.stdout)
    assert (receipt["files"], receipt["moved_files"]) == (14, 14)
    assert receipt["folder"] == str(tmp_path / "copy")
    assert files_of(tmp_path / "copy") == files_of(store)


@pytest.mark.slow
def test_mistakes_are_one_line_and_exit_two(
    shardmill, make_store, s3: LoopbackS3, s3_spot: Spot, tmp_path
):
    store, env = make_store(), s3.environment()
    refused(shardmill("push", str(tmp_path / "no"), s3_spot.url, env=env), "not a finished folder")
    refused(shardmill("push", str(store), "s3://no-such-bucket/x", env=env), "bucket")
    refused(shardmill("pull", s3_spot.url, str(tmp_path / "c"), env=env), "check the URL")
    refused(shardmill("push", str(store), "what://x/y", env=env), "Protocol not known")
    shardmill("push", str(make_store("other", seed=5)), s3_spot.url, env=env)
    refused(shardmill("push", str(store), s3_spot.url, env=env), "--replace")


@pytest.mark.slow
def test_no_credentials_is_one_line(make_store, s3: LoopbackS3, s3_spot: Spot, tmp_path: Path):
    env = {k: v for k, v in s3.environment().items() if not k.startswith("AWS_")}
    env |= {"AWS_ENDPOINT_URL": s3.url, "AWS_EC2_METADATA_DISABLED": "true"}
    env |= {"HOME": str(tmp_path), "AWS_CONFIG_FILE": os.devnull}
    env["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull
    # in a process of its own: a client with credentials is kept for later calls
    command = [sys.executable, "-m", "shardmill", "push", str(make_store()), s3_spot.url]
    refused(
        subprocess.run(command, capture_output=True, text=True, check=False, env=env), "credentials"
    )


def test_an_empty_url_is_refused(make_store: Callable[..., Path], tmp_path: Path) -> None:
    for url in ("", " "):
        with pytest.raises(OptionError, match="the URL is empty"):
            push(make_store(f"store{len(url)}"), url)
