"""`shardmill build` over parts of rows: filters, joined fields and a function of the user's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardmill as sm
from shardmill.cli import main
from shardmill.cli.options import parse_join
from shardmill.store import open_store
from shardmill.testing.stores import assert_store_laws, read_documents
from tests.cli.stops import small_units, stop_at_unit

BYTE = ("--tokenizer", "byte:1", "--eot", "<|eot|>", "--no-append-eot")
REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the command in a folder; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardmill", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def rows(num_rows: int = 400) -> str:
    """Rows of which a fifth has another language and a tenth no text."""
    found = [
        {
            "title": f"title {n}",
            "text": f"text {n} " + "x" * 50 if n % 10 else None,
            "lang": "de" if n % 5 == 1 else "en",
        }
        for n in range(num_rows)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return "rows.jsonl"


def module(name: str, body: str) -> None:
    Path(f"{name}.py").write_text(f"def text(row):\n    {body}\n")


def stored(folder: str) -> list[str]:
    documents = read_documents(Path(folder), "train")
    return [bytes(id - 1 for id in ids).decode() for ids in documents]


def test_workers_import_a_function_from_the_current_folder(call, monkeypatch):
    small_units(monkeypatch)
    module("shouting", "return row['text'] and (row['title'] + ': ' + row['text']).upper()")
    words = ("build", rows(), *BYTE, "--map", "shouting:text", "--filter", "lang == 'en'")
    code, out, err = call(*words, "--out", "two", "--workers", "2")
    assert code == 0, err
    assert "left out: 120 documents (80 filtered, 40 map_none)" in out
    assert call(*words, "--out", "one", "--workers", "1")[0] == 0

    assert Path("two/meta.json").read_bytes() == Path("one/meta.json").read_bytes()
    wanted = [f"TITLE {n}: TEXT {n} " + "X" * 50 for n in range(400) if n % 5 != 1 and n % 10]
    assert stored("two") == wanted
    ledger = open_store(Path("two")).manifest.ledger.documents
    assert (ledger.read, ledger.kept, ledger.filtered) == (400, 280, 80)
    lines = Path("two/dropped.jsonl").read_text().splitlines()
    listed = [json.loads(line)["id"] for line in lines]
    assert listed == [f"rows.jsonl:{n + 1}" for n in range(0, 400, 10)]
    assert_store_laws(Path("two"))
    assert "+ 80 filtered + 40 map_none" in call("info", "two")[1]


def test_a_resume_with_a_changed_function_is_refused(call, monkeypatch):
    small_units(monkeypatch)
    module("changing", "return row['text']")
    words = ("build", rows(), "--out", "store", *BYTE, "--map", "changing:text", "--workers", "1")
    with monkeypatch.context() as patch:
        stop_at_unit(patch, 1)
        assert call(*words)[0] == 130

    module("changing", "return row['title']")
    command = [sys.executable, "-m", "shardmill", *words, "--resume"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "map_sha256" in done.stderr
    # and in the process that has the old one, which could only run that
    assert "its source changed since this process imported it" in call(*words, "--resume")[2]


def test_fields_are_joined_and_front_matter_is_left_out(call):
    found = [{"a": "---\nx: 1\n---\none", "b": "two"}, {"a": "", "b": "three"}, {"b": None}]
    lines = [json.dumps(row) + "\n" for row in (*found, {"a": ""})]
    Path("notes.jsonl").write_text("".join(lines))
    options = ("--fields", "a,b", "--join", r"\t+\n", "--strip-front-matter")
    code, out, err = call("build", "notes.jsonl", "--out", "s", *BYTE, *options, "--max-loss", "1")
    assert code == 0, err
    assert "left out: 2 documents (1 empty, 1 no_text)" in out
    assert "repaired: 1 front_matter" in out
    assert stored("s") == ["one\t+\ntwo", "three"]
    source = open_store(Path("s")).manifest.sources[0]
    assert (source["fields"], source["join"]) == (["a", "b"], "\t+\n")
    assert parse_join(r"\\n\n\x") == "\\n\n\\x"
    assert call("build", "notes.jsonl", "--out", "t", *BYTE, "--dry-run", *options)[0] == 0


def test_blame_reads_rows_as_the_build_did(call):
    module("quietly", "return row['title']")
    build = ("build", rows(20), *BYTE, "--filter", "lang == 'de'")
    blame = ("blame", "s", "--input", "rows.jsonl", "--tokenizer", "byte:1", "--document", "2")
    assert call(*build, "--out", "s")[0] == 0
    code, out, err = call(*blame)
    assert code == 0, err
    assert "rows.jsonl:12" in out
    assert call(*build, "--out", "s", "--overwrite", "--map", "quietly:text")[0] == 0
    code, _, err = call(*blame)
    assert (code, "name it with --map where you trust it" in err) == (2, True)
    assert "rows.jsonl:12" in call(*blame, "--map", "quietly:text")[1]


def test_new_files_are_filtered_as_the_old_ones_were(call):
    rows(20)
    build = ("build", "*.jsonl", *BYTE, "--out", "s")
    assert call(*build, "--filter", "lang == 'de'")[0] == 0
    Path("rows2.jsonl").write_text(Path("rows.jsonl").read_text())
    code, _, err = call(*build, "--append")
    assert (code, "repeat the options of the first build" in err) == (2, True)
    assert call(*build, "--append", "--filter", "lang == 'de'")[0] == 0
    assert len(stored("s")) == 8
    assert open_store(Path("s")).manifest.ledger.documents.filtered == 32


def test_conversations_are_filtered(call):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    found = [{"messages": chat, "quality": n} for n in range(10)]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    names = ("sys=<s>", "usr=<u>", "asst=<a>", "eot=<e>")
    special = [word for name in names for word in ("--special", name)]
    words = ("build", "chats", "chats.jsonl", "--out", "c", "--tokenizer", "byte:4", *special)
    code, out, err = call(*words, "--template", "four-marker", "--filter", "quality >= 7")
    assert code == 0, err
    assert "3 conversations" in out
    assert "left out: 7 filtered" in out
    assert_store_laws(Path("c"))


def test_a_stream_takes_the_options_of_a_build(call):
    del call
    stream = sm.stream(
        rows(50),
        tokenizer="byte:1",
        eot="<|eot|>",
        seq_len=16,
        batch_size=1,
        shuffle=False,
        repeat=False,
        fields=["title"],
        filter="lang == 'de'",
    )
    pairs = [(batch.input_ids.ravel(), batch.labels.ravel()) for batch in stream]
    ids = [id for inputs, labels in pairs for id in (*inputs.tolist(), int(labels[-1]))]
    text = bytes(id - 1 for id in ids if id > 0).decode()  # without some first characters
    assert re.findall("le ([0-9]+)", text)[:5] == ["1", "6", "11", "16", "21"]
