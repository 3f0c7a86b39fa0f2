"""`shardmill build --out URL` as a person calls it: receipts, refusals, scratch."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from shardmill.remote import pull
from tests.cli.stops import small_units, stop_at_unit
from tests.cli.test_build_chats import TOKENIZER, write_chats
from tests.cli.test_build_command import BYTE, call, pages  # noqa: F401
from tests.helpers import folder_digest


@pytest.fixture(autouse=True)
def memory():
    """Empty, to build to."""
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


def same_as(url: str, folder: str) -> bool:
    pull(url, "copy")
    return folder_digest(Path("copy")) == folder_digest(Path(folder))


def test_the_receipt_shows_the_url(call):  # noqa: F811
    url = "memory://bucket/wiki"
    code, out, err = call("build", pages("one", "two"), "--out", f"{url}/", *BYTE)
    assert code == 0, err
    assert out.startswith(f"{url}: 2 documents, 8 tokens, 1 shards")
    assert call("build", "pages.jsonl", "--out", "local", *BYTE)[0] == 0
    assert same_as(url, "local")


@pytest.mark.parametrize(
    ("unit", "kept"),
    [(3, "what is done is kept: continue with --resume"), (0, "nothing was kept")],
)
def test_ctrl_c_says_whether_to_continue(call, monkeypatch, unit, kept):  # noqa: F811
    small_units(monkeypatch)
    Path("pages.jsonl").write_text('{"text": "good"}\n' * 1500)
    words = ("build", "pages.jsonl", "--out", "memory://bucket/s", *BYTE)
    with monkeypatch.context() as patch:
        stop_at_unit(patch, unit)
        code, out, err = call(*words)
    assert (code, out) == (130, "")
    assert f"memory://bucket/s: stopped; {kept}" in err
    assert json.loads(call(*words, "--resume", "--json")[1])["resumed"] is (unit > 0)
    assert call("build", "pages.jsonl", "--out", "local", *BYTE)[0] == 0
    assert same_as("memory://bucket/s", "local")


def test_json_and_report_say_what_was_sent(call):  # noqa: F811
    words = ("--out", "memory://bucket/s", "--json", "--report", "r.json", *BYTE)
    code, out, err = call("build", pages("one"), *words)
    assert code == 0, err
    receipt = json.loads(out)
    assert receipt == json.loads(Path("r.json").read_text())
    assert (receipt["store"], receipt["sent_files"]) == ("memory://bucket/s", 4)
    again = json.loads(call("build", "pages.jsonl", "--resume", *words)[1])
    assert (again["store"], again["sent_files"], again["resumed"]) == ("memory://bucket/s", 0, True)


def test_a_store_at_the_url_is_refused_or_replaced_on_request(call):  # noqa: F811
    url = "memory://bucket/s"
    assert call("build", pages("one"), "--out", url, *BYTE)[0] == 0
    pages("one", "two")
    for flags, word in (((), "--overwrite"), (("--resume",), "other input or options")):
        code, out, err = call("build", "pages.jsonl", "--out", url, *flags, *BYTE)
        assert (code, out) == (2, "")
        assert word in err
        assert "Traceback" not in err
    assert call("build", "pages.jsonl", "--out", url, "--overwrite", *BYTE)[0] == 0
    assert call("build", "pages.jsonl", "--out", "local", *BYTE)[0] == 0
    assert same_as(url, "local")


def test_conversations_are_sent_too(call, tmp_path):  # noqa: F811
    write_chats(tmp_path / "chats.jsonl")
    words = (*TOKENIZER, "--template", "four-marker")
    source = ("build", "chats", "chats.jsonl")
    code, out, err = call(*source, "--out", "memory://b/chats", "--scratch", "near", *words)
    assert code == 0, err
    assert out.startswith("memory://b/chats: ")
    assert call(*source, "--out", "local", *words)[0] == 0
    assert same_as("memory://b/chats", "local")
    assert list(Path("near").iterdir()) == []


def test_a_dry_run_looks_at_the_scratch_disk_and_sends_nothing(call):  # noqa: F811
    code, out, _ = call("build", pages("one"), "--out", "memory://b/s", "--dry-run", *BYTE)
    assert code == 0
    assert "disk: for shards at work, " in out
    assert "requests: about 36\n" in out  # one shard and a look at it, one receipt, 30 others
    assert fsspec.filesystem("memory").store == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--out", "s", "--scratch", "near"),
            "--scratch near: only for a store at a URL",
        ),
        (("--out", "what://x/y"), "Protocol not known"),
        (("--out", "memory://b/s", "--scratch", "pages.jsonl"), "cannot be the scratch folder"),
    ],
)
def test_what_makes_no_sense_is_one_line(call, words, message):  # noqa: F811
    code, out, err = call("build", pages("one"), *words, *BYTE)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_an_unfinished_build_is_continued_or_discarded_by_name(call, monkeypatch):  # noqa: F811
    small_units(monkeypatch)
    Path("pages.jsonl").write_text('{"text": "good"}\n' * 900 + "broken\n")
    words = ("pages.jsonl", "--out", "memory://b/s", *BYTE)
    assert call("build", *words)[0] == 2
    code, _, err = call("build", *words)
    assert code == 2
    assert "continue it with --resume, or start again with --overwrite" in err
    assert call("build", *words, "--resume")[0] == 2  # the row is still broken
    assert call("build", *words, "--on-bad", "skip", "--overwrite")[0] == 0
    assert call("build", *words, "--on-bad", "skip", "--resume")[0] == 0


def test_files_are_not_added_to_a_store_at_a_url(call):  # noqa: F811
    url = "memory://bucket/s"
    assert call("build", pages("one"), "--out", url, *BYTE)[0] == 0
    code, out, err = call("build", "pages.jsonl", "--out", url, "--append", *BYTE)
    assert (code, out) == (2, "")
    assert "pull it, append to it, and push it" in " ".join(err.split())
