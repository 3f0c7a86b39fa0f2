"""What of a row becomes a document: the same for any batches, pieces and formats, with every row
in one bucket."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, SourceError
from shardmill.records import Drop
from shardmill.sources import BatchLimits, open_chats, open_source
from shardmill.sources.source import read_document
from shardmill.testing.sources import (
    Account,
    RowCase,
    account,
    assert_cut_is_the_source,
    assert_divides_exactly,
    assert_ledger_balances,
    assert_resumes_exactly,
    cleaned,
    json_lines,
    nasty_texts,
    parquet_bytes,
    raw_bytes,
)
from tests.sources import row_functions

LIMITS = st.builds(
    BatchLimits, num_bytes=st.integers(1, 200), num_documents=st.integers(1, 9)
) | st.just(BatchLimits())
FUNCTIONS = "tests.sources.row_functions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mapping")


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "title": st.none() | st.just("") | nasty_texts(),
            "text": st.none() | st.just("") | nasty_texts(),
            "score": st.none() | st.integers(0, 9) | st.sampled_from([0.5, 5.5]),
        }
    ),
    max_size=7,
)
FIRST = {"title": "t", "text": "x", "score": 1}


def written(folder: Path, rows: list[dict[str, Any]], blank: bytes) -> dict[str, list[str]]:
    """The rows in three forms, with the ids of their rows."""
    lines = [json.dumps(row).encode() + b"\n" + blank for row in rows]
    (folder / "a.jsonl").write_bytes(b"".join(lines))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    schema = pa.schema([("title", pa.string()), ("text", pa.large_string()), ("score", "float64")])
    plain = [{**row, "score": row["score"] and float(row["score"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(plain, schema), folder / "a.parquet", row_group_size=4)
    step = 2 if blank else 1
    ids = {name: [f"{name}:{step * n + 1}" for n in range(len(rows))] for name in ("a.jsonl",)}
    ids["a.jsonl.gz"] = [f"{name}.gz:{n}" for name, n in (one.split(":") for one in ids["a.jsonl"])]
    return {**ids, "a.parquet": [f"a.parquet:row {n}" for n in range(len(rows))]}


def wanted_account(
    rows: list[dict[str, Any]],
    ids: list[str],
    text_of: Callable[[dict[str, Any]], str | None],
    keeps: Callable[[dict[str, Any]], bool],
    reason: str,
) -> Account:
    pairs = [(id, text_of(row)) for id, row in zip(ids, rows, strict=True) if keeps(row)]
    texts = [None if text is None else cleaned(text) for _, text in pairs]
    counts = {"empty": texts.count(""), "invalid_utf8": 0}
    if len(pairs) < len(rows):
        counts["filtered"] = len(rows) - len(pairs)
    return Account(
        texts=[text for text in texts if text],
        num_read=len(rows),
        counts=counts,
        drops=[Drop(id=id, reason=reason) for id, text in pairs if text is None],
    )


def joined(row: dict[str, Any]) -> str | None:
    parts = [row["title"], row["text"]]
    return None if parts == [None, None] else "--".join(filter(None, parts))


@settings(deadline=None, max_examples=25)
@given(
    rows=ROWS,
    limits=LIMITS,
    blank=st.sampled_from([b"", b" \r\n"]),
    how=st.sampled_from(["fields", "field", "map"]),
    is_filtered=st.booleans(),
    name=st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.parquet"]),
)
def test_mapped_rows_keep_every_guarantee_of_a_source(
    folder: Path,
    rows: list[dict[str, Any]],
    limits: BatchLimits,
    blank: bytes,
    how: str,
    is_filtered: bool,
    name: str,
) -> None:
    rows = [FIRST, *rows]
    options: dict[str, Any] = {
        "fields": {"fields": ["title", "text"], "join": "--"},
        "field": {"field": "text"},
        "map": {"map": f"{FUNCTIONS}:text"},
    }[how]
    if is_filtered:
        options = {**options, "filter": "score >= 1 and score != 5.5"}
    ids = written(folder, rows, blank)[name]
    make = partial(open_source, folder / name, limits=limits, **options)
    wanted = wanted_account(
        rows,
        ids,
        joined if how == "fields" else row_functions.text,
        lambda row: not is_filtered or ((row["score"] or 0) >= 1 and row["score"] != 5.5),
        "map_none" if how == "map" else "no_text",
    )
    assert assert_ledger_balances(make()) == wanted
    assert assert_resumes_exactly(make) == wanted
    assert_cut_is_the_source(make(), 60)
    assert_divides_exactly(make, (100,))


ODD_CASE = RowCase(raw=b'{"a": [NaN], "text": "\xff"}', document="\ufffd", is_repaired=True)
NUMBER = RowCase(raw=b'{"text": 5}', document=None, reason="not_a_string")


@settings(deadline=None, max_examples=30)
@given(
    cases=st.lists(json_lines(with_bad=True), max_size=8),
    limits=LIMITS,
    end=st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
)
@example(cases=[ODD_CASE], limits=BatchLimits(), end=b"\n")
@example(cases=[ODD_CASE, NUMBER], limits=BatchLimits(), end=b"\n")
def test_odd_lines_are_read_as_they_are_without_a_mapping(
    folder: Path, cases: list[RowCase], limits: BatchLimits, end: bytes
) -> None:
    path = folder / "odd.jsonl"
    path.write_bytes(end.join([b'{"text": "first", "a": 1}', *(case.raw for case in cases)]))
    options: dict[str, Any] = {"on_bad": "skip", "limits": limits}
    plain = open_source(path, field="text", **options)
    everything = "a is None or a is not None"

    found = open_source(path, field="text", filter=everything, **options)
    assert assert_ledger_balances(found) == account(plain.batches())
    assert_cut_is_the_source(found, 40)
    found = open_source(path, fields=["text"], filter=everything, **options)
    assert account(found.batches()) == account(plain.batches())
    if all(case.reason != "not_a_string" for case in cases):
        mapped = account(open_source(path, map=f"{FUNCTIONS}:text", **options).batches())
        assert mapped.texts == account(plain.batches()).texts


@settings(deadline=None, max_examples=30)
@given(
    cases=st.lists(raw_bytes() | st.just(RowCase(raw=b"", document=None, reason="no_text"))),
    limits=LIMITS,
    kind=st.sampled_from(["binary", "dictionary", "string", "binary_view"]),
)
def test_odd_columns_are_read_as_they_are_without_a_mapping(
    folder: Path, cases: list[RowCase], limits: BatchLimits, kind: str
) -> None:
    column = pa.array([None if case.reason else case.raw for case in cases], pa.binary())
    if kind == "dictionary":
        column = column.dictionary_encode()
    elif kind == "string":
        column = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
    elif kind != "binary":
        column = column.cast(getattr(pa, kind)())
    path = folder / "odd.parquet"
    path.write_bytes(parquet_bytes(column))
    plain = account(open_source(path, field="text").batches())

    make = partial(open_source, path, limits=limits, field="text", filter="number >= 0")
    assert assert_ledger_balances(make()) == plain
    assert assert_resumes_exactly(make) == plain
    assert account(open_source(path, fields=["text"], limits=limits).batches()) == plain


def test_a_document_is_found_again_by_its_row(tmp_path: Path) -> None:
    rows = [{"id": n, "text": f"text {n}", "score": n % 5} for n in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=70)
    for name, number in (("a.jsonl", 205), ("a.parquet", 204)):
        for how in ({}, {"map": f"{FUNCTIONS}:text"}):
            options = {**how, "filter": "score == 4"}
            found = read_document(open_source(tmp_path / name, **options), None, 40)
            assert found is not None
            text, location = found
            assert (text, location.row, location.own_id) == ("text 204", number, "204"), name


def test_front_matter_is_left_out_where_it_is_one(tmp_path: Path) -> None:
    notes = {
        "a.md": ("---\ntitle: A\ntags:\n- x\n---\n\nbody\n", "body\n"),
        "b.md": ('+++\ntitle = "B"\n+++\nbody', "body"),
        "c.md": ("---\ntitle: only\n---\n", None),
        "d.md": ("---\nA line, then text.\n---\nmore", "---\nA line, then text.\n---\nmore"),
        "e.md": ("text\n---\ntitle: A\n---\n", "text\n---\ntitle: A\n---\n"),
        "f.md": ("---\ntitle: never closed\n", "---\ntitle: never closed\n"),
        "g.md": ("+++\nnot toml\n+++\nx", "+++\nnot toml\n+++\nx"),
        "h.md": ("\ufeff---\r\ntitle: A\r\n...\r\nbody\r\n", "body\n"),
        "i.md": ("----\na: b\n----\n", "----\na: b\n----\n"),
    }
    for name, (text, _) in notes.items():
        (tmp_path / name).write_bytes(text.encode())
    make = partial(open_source, tmp_path, strip_front_matter=True)

    found = assert_ledger_balances(make())
    assert found.texts == [body for _, body in notes.values() if body is not None]
    assert found.counts == {"empty": 1, "invalid_utf8": 0, "front_matter": 3}
    assert assert_resumes_exactly(make) == found
    assert make().describe()["strip_front_matter"] is True
    assert "strip_front_matter" not in open_source(tmp_path).describe()

    rows = "".join(json.dumps({"text": text}) + "\n" for text, _ in notes.values())
    (tmp_path / "rows.jsonl").write_text(rows)
    for options in ({}, {"filter": "text is not None"}, {"map": f"{FUNCTIONS}:text"}):
        source = open_source(tmp_path / "rows.jsonl", strip_front_matter=True, **options)
        assert assert_ledger_balances(source).counts == found.counts, options


def test_conversations_are_filtered_by_the_columns_beside_them(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [
        {
            "id": f"chat {n}",
            "messages": chat,
            "quality": n / 10,
            "meta": {"lang": "en" if n % 2 else None},
        }
        for n in range(10)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet", row_group_size=3)
    for where in (path, tmp_path / "chats.parquet"):
        for limits in (BatchLimits(), BatchLimits(num_documents=1), BatchLimits(num_bytes=3)):
            make = partial(
                open_chats, where, filter="quality > 0.4 and meta.lang == 'en'", limits=limits
            )
            found = assert_ledger_balances(make())
            assert [one.id for one in found.conversations] == ["chat 5", "chat 7", "chat 9"]
            assert (found.num_read, found.counts["filtered"], found.drops) == (10, 7, [])
            assert assert_resumes_exactly(make) == found
            assert_cut_is_the_source(make(), 100)
    with pytest.raises(SourceError, match="has the column 'qualty'; did you mean 'quality'"):
        list(open_chats(path, filter="qualty > 1").batches())


def test_a_function_makes_conversations_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    turns = [["q", "a"], ["alone"], ["x", "y"]]
    path.write_text("".join(json.dumps({"turns": one}) + "\n" for one in turns))
    make = partial(open_chats, path, map=f"{FUNCTIONS}:long_messages")

    found = assert_ledger_balances(make())
    assert [one.messages[0]["content"] for one in found.conversations] == ["q", "x"]
    assert found.drops == [Drop(id="turns.jsonl:2", reason="map_none")]
    assert_cut_is_the_source(make(), 20)
    assert make().describe()["map"] == f"{FUNCTIONS}:long_messages"
    with pytest.raises(OptionError, match="fields does not apply"):
        open_chats(path, fields=["turns"])


def test_a_function_that_fails_is_an_error_with_its_line_or_a_drop(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"number": "a"}\n{"other": 1}\n{"number": 5}\n{"number": "b"}\n')
    options: dict[str, Any] = {"map": f"{FUNCTIONS}:number"}

    with pytest.raises(SourceError) as caught:
        list(open_source(path, **options).batches())
    assert str(caught.value) == (
        f"{path}:2: {FUNCTIONS}:number raised KeyError: 'number' (row_functions.py, line 9); "
        "correct the row, or leave such rows out with on_bad='skip'"
    )
    found = account(open_source(path, on_bad="skip", **options).batches())
    assert (found.texts, [(one.id, one.reason) for one in found.drops]) == (
        ["a", "b"],
        [("rows.jsonl:2", "map_failed"), ("rows.jsonl:3", "map_failed")],
    )


def nested() -> Callable[..., str]:
    def inner(row: dict[str, Any]) -> str:
        return str(row)

    return inner


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (lambda row: "", "workers import it by its name"),
        (nested(), "workers import it by its name"),
        ("__main__:f", "__main__ is another program in each worker"),
        ("no.such.module:f", "ModuleNotFoundError"),
        (f"{FUNCTIONS}:missing", "has no attribute 'missing'"),
        (f"{FUNCTIONS}:Any.x", "has no attribute"),
        ("json", "wanted module:function"),
        ("builtins:str", "has no source file"),
        ("math:pi", "is no function but float"),
    ],
)
def test_a_function_that_workers_could_not_import_is_refused(
    tmp_path: Path, given: Any, problem: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(OptionError, match=problem):
        open_source(tmp_path / "a.jsonl", map=given)


def test_a_function_is_named_by_itself_and_travels_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    source = open_source(tmp_path / "a.jsonl", map=row_functions.text)
    assert source.describe()["map"] == f"{FUNCTIONS}:text"
    sent = pickle.dumps(source)
    code = "import pickle, sys; s = pickle.load(sys.stdin.buffer); print(next(s.batches()).texts)"
    folder = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, cwd=folder)
    assert b'"a"' in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fields": ["text"], "field": "text"}, "each says what the text is"),
        ({"map": f"{FUNCTIONS}:text", "field": "text"}, "each says what the text is"),
        ({"map": f"{FUNCTIONS}:text", "fields": ["text"]}, "each says what the text is"),
        ({"join": "-"}, "joins fields; name them"),
        ({"fields": ["text", "text"]}, "each once"),
        ({"fields": "text"}, "wanted a list of names"),
        ({"fields": ["txet"]}, "has the column 'txet'; did you mean 'text'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises((OptionError, SourceError), match=problem):
        list(open_source(tmp_path / "a.jsonl", **options).batches())


def test_text_files_have_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(OptionError, match="filter: is for rows with columns"):
        open_source(tmp_path, filter="a == 1")
