"""`--engine` asks two things, and `--ray-address` belongs to one of them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from shardmill.cli.commands.build import EngineName, parse_engines
from shardmill.errors import OptionError
from tests.helpers import folder_digest

BYTE = ("--tokenizer", "byte:1", "--eot", "<|eot|>")


def parse(*names: str, ray_address: str | None = None) -> tuple[str, str]:
    return parse_engines([EngineName(name) for name in names], ray_address)


def test_each_value_answers_its_question_in_any_order():
    assert parse() == ("auto", "local")
    assert parse("ray") == ("auto", "ray")
    assert parse("fast") == ("fast", "local")
    assert parse("ray", "reference") == parse("reference", "ray") == ("reference", "ray")
    assert parse("local", "auto") == ("auto", "local")
    assert parse("ray", ray_address="auto") == ("auto", "ray")


@pytest.mark.parametrize("names", [("ray", "local"), ("fast", "fast"), ("auto", "ray", "fast")])
def test_two_answers_to_one_question_are_refused(names):
    with pytest.raises(OptionError, match="wanted one of them"):
        parse(*names)


def test_an_address_without_ray_is_refused():
    with pytest.raises(OptionError, match="--ray-address auto: only with --engine ray"):
        parse("local", ray_address="auto")


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
        *("build", pages, *out, "--engine", "ray", *BYTE),
        before="import sys; sys.modules['ray'] = None",
    )
    assert (code, stdout) == (2, "")
    assert stderr.strip() == "shardmill: ray is not installed: pip install 'shardmill[ray]'"
    assert not (tmp_path / "s").exists()


def test_an_address_where_nobody_listens_is_one_line(tmp_path, pages):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    out = ("--out", str(tmp_path / "s"))
    code, stdout, stderr = shardmill(
        *("build", pages, *out, "--engine", "ray", "--ray-address", address, *BYTE)
    )
    assert (code, stdout) == (2, "")
    assert stderr.strip().startswith(f"shardmill: --ray-address {address}: [Errno 111]")
    assert "wanted the address of a Ray that runs" in stderr


@pytest.mark.slow
def test_a_build_on_ray_prints_its_receipt_and_nothing_else(tmp_path, pages):
    def build(name: str, *options: str) -> dict[str, object]:
        out = ("--out", str(tmp_path / name), "--engine", "reference", "--json")
        code, stdout, _ = shardmill("build", pages, *out, *options, *BYTE)
        assert code == 0
        return dict(json.loads(stdout))

    receipt = build("ray", "--engine", "ray", "--workers", "2")
    assert (receipt["workers"], receipt["documents_kept"]) == (2, 50)
    build("one", "--workers", "1")
    assert folder_digest(tmp_path / "ray") == folder_digest(tmp_path / "one")
