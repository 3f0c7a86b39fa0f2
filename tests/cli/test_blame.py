"""`shardmill blame`: a few lines for a person, or records."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_build_chats import call  # noqa: F401

TOKENIZER = ["--tokenizer", "byte:1", "--special", "eot=<e>"]


@pytest.fixture
def place(tmp_path, monkeypatch, call):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages").mkdir()
    rows = [{"text": "one\x1b[2J", "id": "x"}, {"text": "caf\u00e9\n[[two]]"}]
    (tmp_path / "pages/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call("build", "pages", "--out", "store", "--tokenizer", "byte:1", "--eot", "<e>")
    return tmp_path


def run_cli(call, *words: str) -> list[dict[str, object]]:  # noqa: F811
    out = call("blame", "store", *TOKENIZER, "--input", "pages", *words, "--json")[1]
    return json.loads(out)["tokens"]


def test_a_token_is_shown_in_its_text(call, place):  # noqa: F811
    out = call("blame", "store", "--token", "12", *TOKENIZER, "--input", "pages")[1]
    assert out == (
        "split 'train', token 12 = id 170: document 1, token 4 of it\n"
        "  from pages, a.jsonl:2; found by origins\n"
        "  characters 3..4: caf[[\u00e9]]\\n[\\[two]\\]\n"
    )


def test_nothing_of_the_data_touches_the_terminal(call, place):  # noqa: F811
    out = call("blame", "store", "--document", "0", *TOKENIZER, "--input", "pages")[1]
    assert out.splitlines()[1:] == [
        "  from pages, a.jsonl:1 (id x); found by origins",
        "  characters 0..1: [[o]]ne\\x1b[2J",
    ]
    out = call("blame", "store", "--token", "7", *TOKENIZER, "--input", "pages")[1]
    assert out.splitlines()[2] == "  appended by the build, no text"


def test_documents_and_steps_lead_to_the_same_tokens(call, place):  # noqa: F811
    both = run_cli(call, "--token", "9", "--stop", "12")
    assert [one["token"] for one in both] == [9, 10, 11]
    assert run_cli(call, "--document", "1", "--offset", "1") == [both[0]]
    step = ["--batch-size", "1", "--seq-len", "3", "--shuffle", "none"]
    first = run_cli(call, "--step", "0", *step, "--column", "2")
    assert [(one["token"], one["split"]) for one in first] == [(2, "train")]
    second = run_cli(call, "--step", "1", "--row", "0", *step, "--column", "3")
    shown = json.loads(call("show", "store", "--step", "1", *step, "--json")[1])
    assert second[0]["token"] == shown["rows"][0]["start"] + 3


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "found no token; wanted one of --token, --document and --step"),
        (["--token", "1", "--document", "0"], "found --token and --document"),
        (["--token", "1", "--rank", "0"], "found --token and --rank"),
        (["--document", "0", "--offset", "99"], "--offset 99: the document has 8 tokens"),
        (
            ["--step", "0", "--batch-size", "1", "--seq-len", "2", "--row", "1"],
            "--row 1: the batch",
        ),
        (["--step", "0", "--batch-size", "1", "--seq-len", "2", "--column", "3"], "a row has 3"),
        (["--token", "99"], "split 'train' has 22 tokens"),
    ],
)
def test_a_mistake_is_one_line(call, place, words, error):  # noqa: F811
    code, out, found = call("blame", "store", *TOKENIZER, "--input", "pages", *words)
    assert (code, out, found.count("\n")) == (2, "", 1)
    assert error in found
