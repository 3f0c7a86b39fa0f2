"""CSV, JSON lists and Arrow: rows with columns, as documents, as conversations and as tables."""

from __future__ import annotations

import csv
import gzip
import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, SourceError
from shardmill.sources import (
    ArrowSource,
    BatchLimits,
    CsvSource,
    JsonlSource,
    JsonSource,
    open_chats,
    open_source,
)
from shardmill.sources.formats.arrow import ArrowFormat
from shardmill.sources.formats.csv import CsvFormat
from shardmill.sources.formats.json_array import JsonFormat
from shardmill.sources.source import TableFormat, read_document
from shardmill.storage.files import list_files
from shardmill.testing.sources import (
    account,
    assert_cut_is_the_source,
    assert_divides_exactly,
    assert_ledger_balances,
    assert_resumes_exactly,
    cleaned,
    json_lines,
    nasty_texts,
)
from tests.sources.forms import PACKERS, ROWS, TEXTS, arrow_bytes, csv_bytes

LIMITS = st.builds(
    BatchLimits, num_bytes=st.integers(1, 200), num_documents=st.integers(1, 9)
) | st.just(BatchLimits())
SMALL = BatchLimits(num_bytes=60, num_documents=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


def check(make_source: Callable[[], Any], num_bytes: int) -> Any:
    found = assert_ledger_balances(make_source())
    assert assert_resumes_exactly(make_source) == found
    assert_cut_is_the_source(make_source(), num_bytes)
    assert_divides_exactly(make_source, (1, 3))
    return found


@settings(deadline=None, max_examples=20)
@given(
    texts=st.lists(nasty_texts(), min_size=1, max_size=8),
    suffix=st.sampled_from(sorted(PACKERS)),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\n", "\r\n"]),
    delimiter=st.sampled_from([",", "\t"]),
    limits=LIMITS,
    num_bytes=st.integers(1, 300),
)
def test_what_a_csv_writer_wrote_is_read(
    folder: Path,
    texts: list[str],
    suffix: str,
    quoting: Any,
    end: str,
    delimiter: str,
    limits: BatchLimits,
    num_bytes: int,
) -> None:
    if "\r" in "".join(texts):
        quoting = csv.QUOTE_ALL  # every reader takes one that is not quoted for a line's end
    rows = [{"n": n, "text": text, 'a "b"': "x"} for n, text in enumerate(texts)]
    data = csv_bytes(rows, quoting=quoting, lineterminator=end, delimiter=delimiter)
    path = folder / f"a{'.csv' if delimiter == ',' else '.tsv'}{suffix}"
    path.write_bytes(PACKERS[suffix](b"\xef\xbb\xbf" + data))
    found = check(lambda: open_source(path, limits=limits), num_bytes)
    assert found.texts == [text for text in map(cleaned, texts) if text]
    assert found.num_read == len(texts)


def test_blocks_never_change_where_a_record_ends() -> None:
    """Any bytes cut anywhere: a scan in pieces finds the ends that a scan value by value finds."""
    from shardmill.sources.formats.csv import _RecordScanner

    drawn = random.Random(0)
    for _ in range(1000):
        parts = drawn.choices(['"', '"', ",", "\n", "a", "\r\n", '""'], k=drawn.randrange(1, 16))
        data = "".join(parts).encode()
        wanted = _RecordScanner(",")._ends_by_value(data).tolist()
        scanner, found, at = _RecordScanner(","), [], 0
        while at < len(data):
            piece = data[at : at + drawn.randrange(1, 5)]
            found += [at + int(end) for end in scanner.ends(piece)]
            at += len(piece)
        assert found == wanted, data


def test_a_quote_inside_a_plain_value_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text,n\n5" pipe,1\n"a"b"c,2\n"x\n""y""",3\n')
    make = lambda: CsvSource(tmp_path / "a.csv", limits=SMALL)  # noqa: E731
    assert check(make, 9).texts == ['5" pipe', 'ab"c', 'x\n"y"']


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"1,hello\n2,there\n", "no columns 'text' in the header; found '1', 'hello'.*needs one"),
        (b"text,text\na,b\n", "2 columns 'text' in the header"),
        (b"\n\ntext\na\n", "begins with a blank line; wanted a header"),
        (b'text\na\n"b\nc\n', "the last quoted value has no closing quote"),
        (b"text\na\nb,c\n", r"a\.csv:row 1: 2 values, but the header names 1"),
    ],
)
def test_what_is_no_table_with_a_header_is_refused(
    tmp_path: Path, data: bytes, problem: str
) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(SourceError, match=problem):
        account(CsvSource(tmp_path / "a.csv").batches())


def test_a_record_of_another_width_is_a_drop_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"n,text\n1,a\n\n2\n3,\xffb\n4,c\xfe,d\n5,e\n")
    make = lambda: CsvSource(tmp_path / "a.csv", on_bad="skip", limits=SMALL)  # noqa: E731
    found = check(make, 5)
    assert found.texts == ["a", "\ufffdb", "e"]
    assert [(drop.id, drop.reason) for drop in found.drops] == [
        ("a.csv:row 1", "wrong_columns"),
        ("a.csv:row 3", "wrong_columns"),
    ]


def test_a_csv_file_without_rows_has_no_documents(tmp_path: Path) -> None:
    for data in (b"", b"text\n", b"text", b"\xef\xbb\xbftext\r\n"):
        (tmp_path / "a.csv").write_bytes(data)
        assert list(CsvSource(tmp_path / "a.csv").batches()) == []


def test_bytes_that_are_not_utf8_are_repaired_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text\na\xff\n"b"\n')
    found = check(lambda: CsvSource(tmp_path / "a.csv", limits=SMALL), 4)
    assert found.texts == ["a\ufffd", "b"]
    assert found.counts["invalid_utf8"] == 1


@settings(deadline=None, max_examples=20)
@given(
    cases=st.lists(json_lines(with_bad=False), max_size=8),
    suffix=st.sampled_from(sorted(PACKERS)),
    around=st.sampled_from([b"[%s]", b" [\n%s\n]\n", b'{"v": 1, "rows": [%s], "n": {}}']),
    limits=LIMITS,
)
def test_a_list_gives_what_json_lines_give(
    folder: Path, cases: list[Any], suffix: str, around: bytes, limits: BatchLimits
) -> None:
    rows = [case.raw for case in cases]
    path, lines = folder / f"rows.json{suffix}", folder / "rows.jsonl"
    path.write_bytes(PACKERS[suffix](around.replace(b"%s", b",\n".join(rows))))
    lines.write_bytes(b"\n".join(rows))
    if not rows and b"rows" in around:
        return  # an empty list in an object holds nothing that tells it from a row
    found = check(lambda: JsonSource(path, field="text", limits=limits), 50)
    wanted = account(JsonlSource(lines, field="text", limits=limits).batches())
    assert (found.texts, found.counts) == (wanted.texts, wanted.counts)
    numbers = [int(drop.id.rpartition(":")[2]) - 1 for drop in wanted.drops]
    assert [drop.id for drop in found.drops] == [f"{path.name}:record {n}" for n in numbers]


def test_a_broken_row_of_a_list_is_an_error_or_a_drop(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, {"text": 5}, [1], {"text": "b"}]')
    with pytest.raises(SourceError, match=r"a\.json:record 1: the field 'text' holds a number"):
        account(JsonSource(path).batches())
    found = check(lambda: JsonSource(path, on_bad="skip", limits=SMALL), 9)
    assert found.texts == ["a", "b"]
    assert [drop.reason for drop in found.drops] == ["not_a_string", "bad_json"]


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        ('{"text": "a", "tags": ["x"]}\n{"text": "b", "tags": []}\n', ["a", "b"]),
        ('{"text": "a", "parts": [{"text": "no"}]}', ["a"]),
        ('{"rows": [{"text": "a"}]}', ["a"]),
    ],
)
def test_json_lines_in_a_json_file_are_known_by_the_first_line(
    tmp_path: Path, body: str, texts: list[str]
) -> None:
    (tmp_path / "a.json").write_text(body)
    assert check(lambda: JsonSource(tmp_path / "a.json", limits=SMALL), 9).texts == texts


def test_an_object_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n "name": "x"\n}')
    with pytest.raises(SourceError, match="an object without a list"):
        account(JsonSource(tmp_path / "a.json").batches())


@settings(deadline=None, max_examples=20)
@given(
    texts=st.lists(nasty_texts() | st.none(), max_size=14),
    is_stream=st.booleans(),
    suffix=st.sampled_from(["", ".gz"]),
    size=st.integers(1, 5),
    kind=st.sampled_from(["string", "large_string", "string_view", "binary", "dictionary"]),
    limits=LIMITS,
    num_bytes=st.integers(1, 2000),
)
def test_every_row_of_an_arrow_file_is_a_document_or_a_drop(
    folder: Path,
    texts: list[str | None],
    is_stream: bool,
    suffix: str,
    size: int,
    kind: str,
    limits: BatchLimits,
    num_bytes: int,
) -> None:
    column = pa.array(texts, pa.string())
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    table = pa.table({"n": list(range(len(texts))), "text": column})
    path = folder / f"a.arrow{suffix}"
    path.write_bytes(PACKERS[suffix](arrow_bytes(table, is_stream=is_stream, size=size)))
    found = check(lambda: ArrowSource(path, field="text", limits=limits), num_bytes)
    assert found.texts == [cleaned(text) for text in texts if text and cleaned(text)]
    missing = [f"{path.name}:{n}" for n, text in enumerate(texts, 1) if text is None]
    assert [drop.id for drop in found.drops] == missing


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_damaged_arrow_file_is_an_error_not_a_short_one(tmp_path: Path, is_stream: bool) -> None:
    data = arrow_bytes(ROWS, is_stream=is_stream)
    path = tmp_path / "a.arrow"
    for stop in range(0, len(data), 31):
        path.write_bytes(data[:stop])
        with pytest.raises(SourceError, match=r"a\.arrow: not a readable Arrow file"):
            account(ArrowSource(path, field="text").batches())


def test_a_file_in_file_form_is_cut_by_record_batches(tmp_path: Path) -> None:
    rows = [{"text": f"row {n}" if n % 5 else None} for n in range(40)]
    (tmp_path / "a.arrow").write_bytes(arrow_bytes(rows, size=4))
    source = ArrowSource(tmp_path / "a.arrow", limits=SMALL)
    pieces = assert_cut_is_the_source(source, 700)
    assert len(pieces) > 3
    cursor = next(iter(pieces[1].batches())).cursor
    with pytest.raises(SourceError, match="of another range"):
        list(pieces[2].batches(cursor))


def save(folder: Path, parts: Sequence[Sequence[dict[str, Any]]]) -> None:
    """As `datasets.save_to_disk` writes a dataset."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(parts):05}.arrow" for n in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        (folder / name).write_bytes(arrow_bytes(rows, is_stream=True))
    (folder / "cache-1234.arrow").write_bytes(arrow_bytes(ROWS, is_stream=True))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_saved_dataset_is_its_data_files(tmp_path: Path) -> None:
    save(tmp_path / "saved", [ROWS[:3], ROWS[3:]])
    source = open_source(tmp_path / "saved")
    assert [file.name[:10] for file in source.files] == ["data-00000", "data-00001"]  # type: ignore[attr-defined]
    assert check(lambda: open_source(tmp_path / "saved", limits=SMALL), 90).texts == TEXTS
    (tmp_path / "saved/data-00001-of-00002.arrow").unlink()
    with pytest.raises(SourceError, match=r"state\.json: lists 'data-00001-of-00002\.arrow'"):
        open_source(tmp_path / "saved")


def test_of_a_saved_dict_of_datasets_one_must_be_named(tmp_path: Path) -> None:
    for split in ("test", "train"):
        save(tmp_path / "saved" / split, [ROWS])
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for opened in (open_source, open_chats):
        with pytest.raises(SourceError, match=r"several splits; .*saved/test, .*saved/train"):
            opened(tmp_path / "saved")
    assert account(open_source(tmp_path / "saved/train").batches()).texts == TEXTS


TALKS = [{"prompt": f"q{n}", "response": "a\nb" * n} for n in range(1, 6)]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.arrow", "b.arrow", "a.csv.gz", "a.json"])
def test_rows_of_tables_are_conversations_too(tmp_path: Path, name: str) -> None:
    data = {
        "a.csv": csv_bytes(TALKS),
        "a.tsv": csv_bytes(TALKS, delimiter="\t"),
        "a.arrow": arrow_bytes(TALKS),
        "b.arrow": arrow_bytes(TALKS, is_stream=True),
        "a.csv.gz": gzip.compress(csv_bytes(TALKS)),
        "a.json": json.dumps(TALKS).encode(),
    }[name]
    (tmp_path / name).write_bytes(data)
    make = lambda: open_chats(tmp_path / name, limits=SMALL)  # noqa: E731
    found = assert_ledger_balances(make())
    assert assert_resumes_exactly(make) == found
    assert_cut_is_the_source(make(), 100)
    said = [[message["content"] for message in chat.messages] for chat in found.conversations]
    assert said == [[row["prompt"], row["response"]] for row in TALKS]
    assert len({chat.id for chat in found.conversations}) == len(TALKS)


@pytest.mark.parametrize(
    ("format", "name"),
    [(CsvFormat(), "a.csv"), (ArrowFormat(), "a.arrow"), (JsonFormat(), "a.json")],
)
@pytest.mark.parametrize("columns", [None, ["text"], ["id", "none"], []])
def test_tables_have_the_columns_asked_for_and_go_on_from_any_position(
    tmp_path: Path, format: TableFormat, name: str, columns: list[str] | None
) -> None:
    data = {"a.csv": csv_bytes(ROWS), "a.arrow": arrow_bytes(ROWS, size=3)}
    (tmp_path / name).write_bytes(data.get(name, json.dumps(ROWS).encode()))
    (file,) = list_files(tmp_path / name, suffixes=("",))
    found = list(format.tables(file, None, SMALL, columns))
    names = ["id", "text"] if columns is None else [one for one in columns if one != "none"]
    assert {tuple(table.rows.schema.names) for table in found} == {tuple(names)}
    assert sum(table.rows.num_rows for table in found) == len(ROWS)
    row = 0
    for number, table in enumerate(found):
        assert table.first_row == row
        row += table.rows.num_rows
        rest = list(format.tables(file, table.position, SMALL, columns))
        assert [one.rows for one in rest] == [one.rows for one in found[number + 1 :]]
        assert [one.position for one in rest] == [one.position for one in found[number + 1 :]]


@pytest.mark.parametrize("name", ["a.csv", "a.arrow", "a.json"])
def test_the_row_of_a_document_is_found_again(tmp_path: Path, name: str) -> None:
    data = {"a.csv": csv_bytes(ROWS), "a.arrow": arrow_bytes(ROWS, size=3)}
    (tmp_path / name).write_bytes(data.get(name, json.dumps(ROWS).encode()))
    ids = {"a.csv": "row 3", "a.arrow": "4", "a.json": "record 3"}
    source = open_source(tmp_path / name, limits=SMALL)
    text, where = read_document(source, None, 3) or ("", None)
    assert where is not None
    assert (text, where.id) == (TEXTS[3], f"{name}:{ids[name]}")


@pytest.mark.parametrize("name", ["a.csv", "a.json"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"{n} " * 100} for n in range(12_000)]
    (tmp_path / name).write_bytes(csv_bytes(rows) if name == "a.csv" else json.dumps(rows).encode())
    source = open_source(tmp_path / name, limits=BatchLimits(num_bytes=2**17))
    tracemalloc.start()
    try:
        assert sum(batch.num_read for batch in source.batches()) == len(rows)
        assert tracemalloc.get_traced_memory()[1] < (tmp_path / name).stat().st_size // 3
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.txt.gz"])
def test_a_document_that_is_too_large_is_refused_before_it_is_held(
    tmp_path: Path, name: str
) -> None:
    text = "x" * 3_000_000
    data = {"a.csv": csv_bytes([{"text": text}]), "a.json": json.dumps([{"text": text}]).encode()}
    (tmp_path / name).write_bytes(data.get(name, gzip.compress(text.encode())))
    limits = BatchLimits(num_bytes=50_000, most_bytes=500_000)
    with pytest.raises(SourceError, match=r"can be read: cut it into several"):
        account(
            open_source(tmp_path / name, field="text", limits=limits).batches()
            if name != "a.txt.gz"
            else open_source(tmp_path / name, limits=limits).batches()
        )


def test_endings_are_words_with_or_without_a_dot(tmp_path: Path) -> None:
    for name in ("a.c", "b.H", "c.txt"):
        (tmp_path / name).write_text(name)
    assert account(open_source(tmp_path, ext="c,.h").batches()).texts == ["a.c", "b.H"]
    assert account(open_source(tmp_path, ext=[".h"]).batches()).texts == ["b.H"]
    with pytest.raises(OptionError, match="wanted endings such as"):
        open_source(tmp_path, ext="")
