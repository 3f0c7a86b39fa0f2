"""kill -9 during a push or a pull: nothing looks finished, and the next call continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardmill.errors import StoreNotFoundError
from shardmill.remote import pull
from tests.remote.conftest import Spot, files_of, remote_files
from tests.services import Fault, LoopbackS3


def start(s3: LoopbackS3, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardmill", *arguments, "--workers", "2", "--json"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=s3.environment(),
        start_new_session=True,
    )


def kill_when(process: subprocess.Popen[str], s3: LoopbackS3, method: str, count: int) -> None:
    """SIGKILL as soon as so many shards went well."""
    deadline = time.monotonic() + 600
    while s3.sent(method, "shard_") < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def finish(process: subprocess.Popen[str]) -> dict[str, int]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    receipt: dict[str, int] = json.loads(out)
    return receipt


@pytest.mark.slow
def test_a_killed_push_is_unfinished_and_continues(make_store, s3, s3_spot: Spot, tmp_path) -> None:
    store = make_store()
    s3.faults.append(Fault(path="shard_", method="PUT", skip=4, times=1000, hang=True))
    kill_when(start(s3, "push", str(store), s3_spot.url), s3, "PUT", 4)
    left = remote_files(s3_spot)
    assert "meta.json" not in left
    with pytest.raises(StoreNotFoundError, match="a push to here is unfinished"):
        pull(s3_spot.url, tmp_path / "copy", storage_options=s3_spot.options)
    s3.faults.clear()
    receipt = finish(start(s3, "push", str(store), s3_spot.url))
    assert receipt["kept_files"] >= 4
    assert receipt["kept_files"] + receipt["moved_files"] == 14
    assert remote_files(s3_spot) == files_of(store)


@pytest.mark.slow
def test_a_killed_pull_leaves_nothing_and_continues(
    make_store, s3: LoopbackS3, s3_spot: Spot, tmp_path: Path
) -> None:
    store, copy = make_store(), tmp_path / "copy"
    finish(start(s3, "push", str(store), s3_spot.url))
    s3.faults.append(Fault(path="shard_", method="GET", skip=4, times=1000, hang=True))
    kill_when(start(s3, "pull", s3_spot.url, str(copy)), s3, "GET", 4)
    assert not copy.exists()
    s3.faults.clear()
    receipt = finish(start(s3, "pull", s3_spot.url, str(copy)))
    assert receipt["kept_files"] >= 2
    assert files_of(copy) == files_of(store)
    assert list(tmp_path.glob(".copy*")) == []
