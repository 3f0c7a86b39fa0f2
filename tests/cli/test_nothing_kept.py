"""Nothing is built empty, nothing is trained by accident: what commands say, and their codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmill.store import open_store
from tests.cli.test_build_chats import SPECIALS, TOKENIZER, build, call, corpus  # noqa: F401
from tests.helpers import folder_digest

ALONE = {"messages": [{"role": "user", "content": "anyone?"}]}
STREAM = """
[data]
backend = "files"
files = "d.jsonl"

[data.tokenizer]
kind = "byte"
add_bos = false
add_eos = false

[train]
seq_len = 8
batch_size = 1
"""


def write(path: str, *rows: object) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_build_of_documents_that_keeps_nothing_has_exit_code_1(call):  # noqa: F811
    write("d.jsonl", *[{"text": None}] * 500)
    words = ("build", "d.jsonl", "--out", "s", "--tokenizer", "byte", "--no-append-eot")
    code, out, err = call(*words)
    assert (code, out) == (1, "")
    assert "nothing is kept of 500 rows; nothing was published" in err
    assert '500 no_text (the field is null or not there), as d.jsonl:1: {"text": null}' in err
    assert "build an empty store with --allow-empty" in err
    assert [path.name for path in Path().iterdir()] == ["d.jsonl"]
    code, out, _ = call(*words, "--allow-empty")
    assert (code, "0 documents" in out) == (0, True)


def test_a_build_of_chats_that_loses_too_much_is_accepted_by_what_the_message_says(
    call,  # noqa: F811
    corpus,  # noqa: F811
):
    with (corpus / "c.jsonl").open("a") as file:
        file.write((json.dumps(ALONE) + "\n") * 10)
    code, out, err = build(call)
    assert (code, out) == (1, "")
    assert "10 of 40 rows are lost: 25.0%, above the limit of 5.0%; nothing was published" in err
    assert "10 no_assistant (no message is the assistant's" in err
    assert 'as c.jsonl:31: {"messages": [{"role": "user"' in err
    assert "accept the loss with --resume and --max-loss 0.25" in err
    assert not (corpus / "s").exists()
    code, _, err = build(call)
    assert (code, "an earlier build did not finish" in err) == (2, True)
    code, out, err = build(call, "--resume", "--max-loss", "0.25")
    assert code == 0, err
    assert "30 conversations" in out
    assert (
        call(
            "build",
            "chats",
            "c.jsonl",
            "--out",
            "t",
            "--template",
            "four-marker",
            *TOKENIZER,
            "--max-loss",
            "1",
        )[0]
        == 0
    )
    assert folder_digest(corpus / "s") == folder_digest(corpus / "t")


def test_an_empty_split_that_was_asked_for_is_a_warning(call, corpus):  # noqa: F811
    (corpus / "c.jsonl").write_text((corpus / "c.jsonl").read_text().splitlines()[0] + "\n")
    code, _, err = build(call, "--val-fraction", "0.0001")
    assert code == 0
    assert "split 'val' got no conversation" in err


def test_a_plan_without_rows_has_exit_code_1(call, corpus):  # noqa: F811
    assert build(call)[0] == 0
    words = ("pack", "s", "--seq-len", "4", "--long", "drop")
    code, out, err = call(*words)
    assert (code, out) == (1, "")
    assert "no row is packed; nothing was written" in err
    assert "30 too_long, as example 0: 8 tokens" in err
    assert "--allow-empty" in err
    assert not (corpus / "s/packs").exists()
    assert call(*words, "--allow-empty")[0] == 0


def test_a_stream_without_a_document_has_exit_code_1(call):  # noqa: F811
    write("d.jsonl", *[{"text": None}] * 3)
    Path("stream.toml").write_text(STREAM)
    code, out, err = call("stream", "stream.toml", "--steps", "2")
    assert (code, out) == (1, "")
    assert '3 no_text, as d.jsonl:1: {"text": null}' in err
    code, out, _ = call("stream", "stream.toml", "--steps", "2", "--allow-empty")
    assert (code, "0 steps" in out) == (0, True)


@pytest.mark.parametrize(
    ("row", "ways"),
    [
        (
            {"messages": ALONE["messages"], "label": False},
            ("--shape kto", "--ignore-column label"),
        ),
        (
            {"messages": ALONE["messages"], "chosen": "a"},
            ("--shape preference", "--ignore-column chosen"),
        ),
    ],
)
def test_a_column_that_would_be_ignored_stops_a_build_before_anything_is_written(
    call,  # noqa: F811
    corpus,  # noqa: F811
    row,
    ways,
):
    write("c.jsonl", row)
    code, out, err = build(call)
    assert (code, out) == (2, "")
    for way in ways:
        assert way in err
    assert [path.name for path in corpus.iterdir()] == ["c.jsonl"]


def test_an_ignored_column_is_recorded_and_another_one_is_another_build(
    call,  # noqa: F811
    corpus,  # noqa: F811
):
    rows = [json.loads(line) | {"label": True} for line in Path("c.jsonl").read_text().splitlines()]
    write("c.jsonl", *rows)
    assert build(call, "--ignore-column", "label")[0] == 0
    (source,) = open_store(corpus / "s").manifest.sources
    assert source["ignore_columns"] == ["label"]
    code, _, err = build(call, "--ignore-column", "lable", "--overwrite")
    assert (code, "did you mean 'label'" in err) == (2, True)
    assert "columns that change what is trained would be ignored" in err
    words = ("--example", "0", *TOKENIZER)
    assert call("show", "s", *words)[0] == 0
    words = ("--document", "0", "--offset", "6", *TOKENIZER, "--input", "c.jsonl")
    code, _, err = call("blame", "s", *words)
    assert code == 0, err
