"""`shardmill build` as a person calls it: exit codes, receipts, refusals."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from shardmill.cli import main
from shardmill.cli.options import parse_bytes
from shardmill.errors import OptionError
from shardmill.store import open_store
from shardmill.testing.stores import read_documents
from tests.cli.stops import small_units, stop_at_unit


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the command in a folder; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardmill", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def pages(*texts: str) -> str:
    Path("pages.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return "pages.jsonl"


BYTE = ("--tokenizer", "byte:1", "--eot", "<|eot|>")


def test_a_build_prints_one_receipt_and_the_store_says_how_it_was_made(call):
    code, out, _ = call("build", pages("one", "", "three"), "--out", "store", *BYTE)
    assert code == 0
    assert out.startswith("store: 2 documents, 10 tokens, 1 shards; left out: 1 documents")
    manifest = open_store(Path("store")).manifest
    assert (manifest.dataset_name, manifest.append_eot) == ("pages.jsonl", True)
    assert [bytes(i - 1 for i in ids if i) for ids in read_documents(Path("store"), "train")] == [
        b"one",
        b"three",
    ]


def test_val_tokens_come_first_and_max_tokens_ends_the_build(call):
    limits = ("--val-tokens", "4", "--max-tokens", "5", "--no-append-eot")
    assert call("build", pages("aaaa", "bbbb", "cccc"), "--out", "s", *limits, *BYTE)[0] == 0
    manifest = open_store(Path("s")).manifest
    assert {name: split.tokens for name, split in manifest.splits.items()} == {"val": 4, "train": 5}
    assert manifest.ledger.tokens.over_budget == 3


def test_a_report_is_never_written_over_what_is_read(call):
    before = Path(pages("x")).read_bytes()
    Path("link.json").symlink_to("pages.jsonl")
    Path("folder").mkdir()
    for report, word in (
        ("pages.jsonl", "this file is an input"),
        ("link.json", "this file is an input"),
        ("folder", "this is a folder"),
    ):
        code, _, err = call("build", "pages.jsonl", "--out", "s", "--report", report, *BYTE)
        assert (code, Path("s").exists()) == (2, False)
        assert word in " ".join(err.split())
    assert Path("pages.jsonl").read_bytes() == before


def test_a_circle_of_links_is_no_place_for_a_store(call):
    Path("loop").symlink_to("loop")
    code, _, err = call("build", pages("x"), "--out", "loop", *BYTE)
    assert code == 2
    assert "cannot be the folder of a store" in " ".join(err.split())
    assert "Traceback" not in err


def test_json_and_report_hold_what_the_store_must_not(call):
    code, out, _ = call("build", pages("x"), "--out", "s", "--json", "--report", "r.json", *BYTE)
    assert code == 0
    assert json.loads(out) == json.loads(Path("r.json").read_text())
    assert json.loads(out)["seconds"] >= 0
    assert "seconds" not in Path("s/meta.json").read_text()


def test_a_mistake_is_one_line_and_exit_code_2(call):
    code, out, err = call("build", "nothing-here", "--out", "s", *BYTE)
    assert (code, out) == (2, "")
    assert "nothing-here: no such file or folder" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_unfinished_build_must_be_resumed_or_discarded_by_name(call, monkeypatch):
    small_units(monkeypatch)
    Path("pages.jsonl").write_text('{"text": "good"}\n' * 900 + "broken\n")
    assert call("build", "pages.jsonl", "--out", "s", *BYTE)[0] == 2
    code, _, err = call("build", "pages.jsonl", "--out", "s", *BYTE)
    assert code == 2
    assert "--resume" in err
    assert "--overwrite" in err
    assert (
        call("build", "pages.jsonl", "--out", "s", "--on-bad", "skip", "--overwrite", *BYTE)[0] == 0
    )
    assert open_store(Path("s")).manifest.ledger.documents.dropped == {"bad_json": 1}


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("128MiB", 128 * 2**20), ("1 GB", 10**9), ("2kib", 2048)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text, "memory") == size


@pytest.mark.parametrize("text", ["", "MiB", "12XB", "-1", "1.5GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(OptionError, match=r"memory=.*wanted a number of bytes, or a size like"):
        parse_bytes(text, "memory")


def test_a_dry_run_prints_the_plan_and_builds_nothing(call):
    code, out, _ = call("build", pages("one", "two"), "--out", "s", "--dry-run", *BYTE)
    assert code == 0
    assert re.sub(r"[0-9][0-9,.]*", "N", out).splitlines() == [
        "pages.jsonl: N MB of input in N units; about N tokens in N shards",
        "time: about N s in one process on N cores; CPU: about N s to read, encode and write "
        "(ByteTokenizer), N s to coordinate",
        "memory: about N MB; largest document: N MB; disk: about N MB, N MB are free",
    ]
    assert [path.name for path in Path().iterdir()] == ["pages.jsonl"]


def test_a_dry_run_says_what_the_build_then_takes(call, monkeypatch):
    small_units(monkeypatch)
    source = pages(*(f"some words {n:04d}" for n in range(2_000)))
    words = ("build", source, "--out", "s", "--val-fraction", "0.25", "--json", *BYTE)
    code, out, _ = call(*words, "--workers", "3", "--dry-run")
    assert code == 0
    plan = json.loads(out)
    assert (plan["workers"], plan["engine"], plan["requests"]) == (3, "ByteTokenizer", None)
    assert call(*words, "--workers", "1")[0] == 0
    (feed,), manifest = plan["feeds"], open_store(Path("s")).manifest
    built = manifest.splits.values()
    assert feed["num_shards"] == sum(len(split.shards) for split in built)
    assert feed["num_units"] == max(len(split.shards) for split in built)
    assert 0.99 < feed["num_tokens"] / sum(split.tokens for split in built) < 1.01
    assert plan["worker_hours"] > plan["coordinator_hours"] > 0
    assert plan["hours"] > plan["worker_hours"] / 3


def test_the_receipt_has_time_workers_and_memory(call):
    code, out, _ = call("build", pages("one"), "--out", "s", "--json", "--workers", "1", *BYTE)
    assert code == 0
    receipt = json.loads(out)
    assert receipt["workers"] == 1
    assert receipt["cpu_seconds"] > 0
    assert receipt["peak_bytes"] > 2**20
    assert " cores, at most " in call("build", pages("one"), "--out", "t", *BYTE)[1]


def test_sizes_and_workers_that_make_no_sense_are_refused(call):
    for wrong in (("--workers", "0"), ("--unit-bytes", "some"), ("--memory", "1KB")):
        code, _, err = call("build", pages("x"), "--out", "s", *wrong, *BYTE)
        assert code == 2
        assert "wanted" in err or "takes about" in err


def test_ctrl_c_says_how_to_continue(call, monkeypatch):
    small_units(monkeypatch)
    Path("pages.jsonl").write_text('{"text": "good"}\n' * 900)
    with monkeypatch.context() as patch:
        stop_at_unit(patch, 2)
        code, _, err = call("build", "pages.jsonl", "--out", "s", *BYTE)
    assert code == 130
    assert "s: stopped; what is done is kept: continue with --resume" in err
    assert call("build", "pages.jsonl", "--out", "s", "--resume", *BYTE)[0] == 0


def test_shares_of_documents_go_to_val_and_test(call):
    texts = [f"text {number}" for number in range(60)]
    shares = ("--val-fraction", "0.3", "--test-fraction", "0.2", "--seed", "4")
    assert call("build", pages(*texts), "--out", "s", *shares, *BYTE)[0] == 0
    found = {
        split: {bytes(one - 1 for one in ids if one) for ids in read_documents(Path("s"), split)}
        for split in ("train", "val", "test")
    }
    assert all(found.values())
    assert set().union(*found.values()) == {text.encode() for text in texts}
    assert sum(map(len, found.values())) == 60
    assert "by the hash of seed and document" in open_store(Path("s")).manifest.split_rule
    code, _, err = call("build", "pages.jsonl", "--out", "t", *shares, "--val-tokens", "5", *BYTE)
    assert code == 2
    assert "leave it out, or leave out --val-fraction and --test-fraction" in err


def test_append_adds_new_files_and_says_when_there_are_none(call):
    Path("data").mkdir()
    for name in ("b", "a"):
        Path(f"data/{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
        done = call("build", "data/*.jsonl", "--out", "s", "--append", *BYTE)
        assert done[0] == 0
    assert done[1].startswith("s: 2 documents, 4 tokens, 1 shards")
    texts = [bytes(i - 1 for i in ids if i) for ids in read_documents(Path("s"), "train")]
    assert texts == [b"b", b"a"]
    code, out, err = call("build", "data/*.jsonl", "--out", "s", "--append", *BYTE)
    assert (code, out[:14]) == (0, "s: 2 documents")
    code, out, err = call(
        "build", "data/*.jsonl", "--out", "s", "--append", "--dtype", "uint32", *BYTE
    )
    assert (code, out) == (2, "")
    assert "dtype: 'uint16' -> 'uint32'" in err


def test_several_inputs_may_become_more(call):
    for name in "ab":
        Path(f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert call("build", "a.jsonl", "--out", "s", *BYTE)[0] == 0
    assert call("build", "a.jsonl", "b.jsonl", "--out", "s", "--append", *BYTE)[0] == 0
    assert call("build", "a.jsonl", "b.jsonl", "--out", "whole", *BYTE)[0] == 0
    assert call("diff", "s", "whole")[:2] == (
        0,
        "s, whole: identical, 2 documents (by their manifests; `shardmill verify` reads the "
        "contents)\n",
    )


def test_a_folder_of_code_is_built_and_its_tokens_are_found_again(call):
    Path("repo/src").mkdir(parents=True)
    for name in ("a.c", "b.h", "c.py"):
        Path("repo/src", name).write_text(name)
    Path("repo/logo.png").write_bytes(b"\x89PNG\0")
    Path("repo/README.md").write_text("# one\n# two\n")
    code, out, err = call("build", "repo", "--out", "s1", *BYTE)
    assert (code, out[:16]) == (0, "s1: 4 documents,")
    assert "left out 1 files of other endings (1 .png)" in err
    assert call("build", "repo", "--out", "s2", "--ext", ".c,h", *BYTE)[1].startswith("s2: 2 docum")
    _, out, _ = call("build", "repo", "--out", "s3", "--kind", "text", "--max-loss", "1", *BYTE)
    assert out.startswith("s3: 4 documents, ")
    assert "left out: 1 documents (1 not_text)" in out
    assert json.loads(Path("s3/dropped.jsonl").read_text())["id"] == "logo.png"
    parts = ("--split-on", "(# )")
    _, out, _ = call("build", "repo/README.md", "--out", "s4", *parts, "--dry-run", *BYTE)
    assert "README.md: 0.0 MB of input in 1 units" in out
    assert call("build", "repo/README.md", "--out", "s4", *parts, *BYTE)[1].startswith("s4: 2 docu")
    tokenizer = ("--tokenizer", "byte:1", "--special", "eot=<|eot|>")
    found = ("--document", "1", "--offset", "2", *tokenizer)
    _, out, _ = call("blame", "s4", *found, "--input", "repo/README.md")
    assert out.splitlines()[1:] == [
        "  from README.md, README.md:2; found by origins",
        "  characters 2..3: # [[t]]wo",
    ]
    Path("repo/data.json").write_text("[]")
    code, _, err = call("build", "repo", "--out", "s5", *BYTE)
    assert code == 2
    assert "choose endings with --ext .c,.h,.md,.py, or a glob such as" in err
    assert "whatever it is, with --kind text" in err
