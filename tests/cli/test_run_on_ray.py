"""`--run-on` says where a build works, and `--ray-address` belongs to it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from tests.helpers import folder_digest

BYTE = ("--tokenizer", "byte:1", "--eot", "<|eot|>")


@pytest.mark.slow
def test_an_address_without_ray_is_refused(tmp_path, pages):
    code, _, err = shardmill(
        *("build", pages, "--out", str(tmp_path / "s"), "--ray-address", "auto", *BYTE)
    )
    assert code == 2
    assert "--ray-address auto: only with --run-on ray" in err


def shardmill(*arguments: str, before: str = "") -> tuple[int, str, str]:
    code = f"{before}\nfrom shardmill.cli import main\nmain()"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def pages(tmp_path) -> str:
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps({"text": f"page {n}"}) + "\n" for n in range(50)))
    return str(path)


def test_a_missing_ray_is_one_line_with_the_way_to_get_it(tmp_path, pages):
    out = ("--out", str(tmp_path / "s"))
    code, stdout, stderr = shardmill(
        *("build", pages, *out, "--run-on", "ray", *BYTE),
        before="import sys; sys.modules['ray'] = None",
    )
    assert (code, stdout) == (2, "")
    assert stderr.strip() == "shardmill: ray is not installed: pip install 'shardmill[ray]'"
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_an_address_that_does_not_answer_is_one_line(tmp_path, pages):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    out = ("--out", str(tmp_path / "s"))
    code, stdout, stderr = shardmill(
        *("build", pages, *out, "--run-on", "ray", "--ray-address", address, *BYTE)
    )
    assert (code, stdout) == (2, "")
    assert stderr.strip().startswith(f"shardmill: --ray-address {address}: [Errno 111]")
    assert "wanted the address of a running Ray" in stderr


@pytest.mark.slow
def test_a_build_on_ray_prints_its_receipt_and_nothing_else(tmp_path, pages):
    def build(name: str, *options: str) -> dict[str, object]:
        out = ("--out", str(tmp_path / name), "--engine", "reference", "--json")
        code, stdout, _ = shardmill("build", pages, *out, *options, *BYTE)
        assert code == 0
        return dict(json.loads(stdout))

    receipt = build("ray", "--run-on", "ray", "--workers", "2")
    assert (receipt["workers"], receipt["documents_kept"]) == (2, 50)
    build("one", "--workers", "1")
    assert folder_digest(tmp_path / "ray") == folder_digest(tmp_path / "one")
