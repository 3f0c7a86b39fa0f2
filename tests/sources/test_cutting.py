"""A source that is cut gives the same documents in pieces, and its drops their true rows."""

from __future__ import annotations

import gzip
import multiprocessing
import pickle
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import CuttableSource, Source, continues
from shardmill.records import Drop
from shardmill.sources import (
    BatchLimits,
    ConcatSource,
    JsonlSource,
    MemorySource,
    ParquetSource,
    TextSource,
    open_source,
)
from shardmill.sources.batches import MAX_RUN, runs
from shardmill.testing.sources import (
    Account,
    RowCase,
    account,
    assert_cut_is_the_source,
    joined,
    json_lines,
    parquet_bytes,
    raw_bytes,
)

LIMITS = st.builds(
    BatchLimits, num_bytes=st.integers(1, 200), num_documents=st.integers(1, 9)
) | st.just(BatchLimits())
NUM_BYTES = st.integers(1, 2000)
NULL = st.just(RowCase(raw=b"", document=None, reason="no_text"))
BLANKS = st.sampled_from([b"", b"", b"\n", b"\r\n", b" \t\n", b"\n\n\n\n\n\n\n\n"])
LONG = st.integers(0, 300).map(
    lambda size: RowCase(raw=b'{"text": "' + b"x" * size + b'"}', document="x" * size)
)


@st.composite
def json_bodies(draw: st.DrawFn) -> bytes:
    """A file of JSON lines: blank ones, bad ones, long ones, CR LF, a BOM, perhaps no end."""
    end = draw(st.sampled_from([b"\n", b"\r\n"]))
    rows = draw(st.lists(st.tuples(BLANKS, json_lines(with_bad=True) | LONG), max_size=10))
    body = b"".join(blank + case.raw + end for blank, case in rows) + draw(BLANKS)
    if draw(st.booleans()):
        body = body.removesuffix(end)
    return b"\xef\xbb\xbf" + body if draw(st.booleans()) else body


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(bodies=st.lists(json_bodies(), min_size=1, max_size=3), limits=LIMITS, num_bytes=NUM_BYTES)
def test_json_lines_cut_anywhere_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    bodies: list[bytes],
    limits: BatchLimits,
    num_bytes: int,
) -> None:
    root = tmp_path_factory.mktemp("jsonl")
    for number, body in enumerate(bodies):
        (root / f"{number}.jsonl").write_bytes(body)

    source = JsonlSource(root, field="text", on_bad="skip", limits=limits)
    assert_cut_is_the_source(source, num_bytes)


@settings(deadline=None, max_examples=100)
@given(
    lines=st.lists(raw_bytes(), max_size=10),
    end=st.sampled_from([b"\n", b"\r\n"]),
    limits=LIMITS,
    num_bytes=NUM_BYTES,
)
def test_lines_of_text_cut_anywhere_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[RowCase],
    end: bytes,
    limits: BatchLimits,
    num_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_bytes(end.join(line.raw for line in lines))

    assert_cut_is_the_source(TextSource(path, split="line", limits=limits), num_bytes)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    files=st.lists(st.lists(raw_bytes() | NULL, max_size=12), min_size=1, max_size=4),
    size=st.integers(1, 5),
    limits=LIMITS,
    num_bytes=NUM_BYTES,
)
def test_parquet_cut_into_row_groups_is_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[RowCase]],
    size: int,
    limits: BatchLimits,
    num_bytes: int,
) -> None:
    root = tmp_path_factory.mktemp("parquet")
    for number, cases in enumerate(files):
        column = pa.array([None if case.reason else case.raw for case in cases], pa.binary())
        (root / f"{number}.parquet").write_bytes(parquet_bytes(column, row_group_size=size))

    assert_cut_is_the_source(ParquetSource(root, limits=limits), num_bytes)


@settings(deadline=None, max_examples=40)
@given(
    files=st.lists(raw_bytes(), min_size=1, max_size=12),
    split=st.sampled_from([None, "line"]),
    limits=LIMITS,
    num_bytes=NUM_BYTES,
)
def test_many_small_files_cut_into_runs_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[RowCase],
    split: str | None,
    limits: BatchLimits,
    num_bytes: int,
) -> None:
    root = tmp_path_factory.mktemp("texts")
    for number, case in enumerate(files):
        (root / f"{number:02}.txt").write_bytes(case.raw)

    source = TextSource(root, split=split, limits=limits)  # type: ignore[arg-type]
    assert_cut_is_the_source(source, num_bytes)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    body=json_bodies(),
    other=json_bodies(),
    texts=st.lists(raw_bytes(), min_size=1, max_size=6),
    num_bytes=NUM_BYTES,
)
def test_sources_of_several_kinds_joined_cut_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    body: bytes,
    other: bytes,
    texts: list[RowCase],
    num_bytes: int,
) -> None:
    root = tmp_path_factory.mktemp("joined")
    for name, data in (("a", body), ("b", other)):
        (root / name).mkdir()
        # One name twice: rows are counted by the order of the pieces, not by names.
        (root / name / "rows.jsonl").write_bytes(data)
    (root / "rows.jsonl.gz").write_bytes(gzip.compress(other))
    (root / "rows.jsonl.zst").write_bytes(zstandard.compress(body))
    column = pa.array([case.raw for case in texts], pa.binary())
    (root / "part.parquet").write_bytes(parquet_bytes(column, row_group_size=2))
    rows = [root / "a/rows.jsonl", root / "b/rows.jsonl", root / "rows.jsonl.gz"]
    limits = BatchLimits(num_bytes=100, num_documents=5)
    parts: list[Source] = [
        JsonlSource(path, field="text", on_bad="skip", limits=limits)
        for path in [*rows, root / "rows.jsonl.zst"]
    ]

    memory = MemorySource(["m", "n"], limits=limits)
    source = ConcatSource([*parts, memory, ParquetSource(root / "part.parquet", limits=limits)])
    assert_cut_is_the_source(source, num_bytes)


@settings(max_examples=200)
@given(sizes=st.lists(st.none() | st.integers(0, 9), max_size=30), num_bytes=st.integers(1, 20))
def test_runs_cover_everything_once_and_are_as_long_as_they_may_be(
    sizes: list[int | None], num_bytes: int
) -> None:
    found = list(runs(sizes, num_bytes))

    assert [index for start, stop in found for index in range(start, stop)] == [*range(len(sizes))]
    for start, stop in found:
        run = sizes[start:stop]
        assert len(run) == 1 or (None not in run and sum(map(int, run)) <= num_bytes)  # type: ignore[arg-type]
    for (start, stop), (_, after) in pairwise(found):
        longer = sizes[start : stop + 1]
        assert stop < after
        assert None in longer or sum(map(int, longer)) > num_bytes  # type: ignore[arg-type]


def test_runs_have_a_maximal_length() -> None:
    assert list(runs([0] * (MAX_RUN + 1), 10)) == [(0, MAX_RUN), (MAX_RUN, MAX_RUN + 1)]


def test_a_range_counts_its_own_lines_and_the_pieces_before_it_name_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": null}\n{"text": "b"}\n\n\n\n[]\n{"text": "c"}\n')
    source = JsonlSource(path, field="text", on_bad="skip")
    pieces = assert_cut_is_the_source(source, 20)

    drops = [account(piece.batches()).drops for piece in pieces]
    rows = [sum(batch.num_rows for batch in piece.batches()) for piece in pieces]
    assert drops == [
        [Drop(id="rows.jsonl", reason="no_text", row=2)],
        [],
        [Drop(id="rows.jsonl", reason="bad_json", row=3)],
        [],
    ]
    assert rows == [3, 1, 4, 1]
    assert [continues(piece) for piece in pieces] == [False, True, True, True]
    assert joined(pieces).drops == [
        Drop(id="rows.jsonl:3", reason="no_text"),
        Drop(id="rows.jsonl:8", reason="bad_json"),
    ]
    assert [piece.describe()["bytes"] for piece in pieces] == [
        [0, 16], [16, 32], [32, 48], [48, 64]
    ]  # fmt: skip
    assert pieces[1].name == "rows.jsonl/rows.jsonl:bytes 16-32"


def test_lines_that_are_all_blank_still_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" * 50 + "{}\n")
    source = JsonlSource(path, field="text", limits=BatchLimits(num_bytes=5))
    pieces = assert_cut_is_the_source(source, 7)

    assert joined(pieces).drops == [Drop(id="rows.jsonl:51", reason="no_text")]
    (only,) = pieces[0].batches()
    assert (len(only.texts), only.num_read, only.num_rows, only.drops) == (0, 0, 6, ())


def test_a_drop_that_has_its_full_id_keeps_it() -> None:
    drop = Drop(id="a.jsonl:3", reason="no_text")

    assert drop.numbered(100) == drop
    assert Drop(id="a.jsonl", reason="no_text", row=0).numbered(100) == Drop(
        id="a.jsonl:101", reason="no_text"
    )


@settings(deadline=None, max_examples=30)
@given(before=st.integers(0, 40), num_bytes=st.integers(1, 200))
def test_an_error_in_a_range_names_the_line_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, before: int, num_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("bad") / "rows.jsonl"
    path.write_text('{"text": "fine"}\n\n' * before + "broken\n" + '{"text": "fine"}\n')
    pieces = JsonlSource(path, field="text").cut(num_bytes)

    with pytest.raises(SourceError, match=f"rows.jsonl, line {2 * before + 1}: broken JSON"):
        joined(pieces)


def test_a_range_refuses_the_cursor_of_another(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 20)
    source = JsonlSource(path, limits=BatchLimits(num_documents=1))
    first, second, *_ = source.cut(40)
    mine = next(iter(second.batches())).cursor

    assert account(second.batches(mine)).texts == ["a"] * 2
    for stranger in (next(iter(first.batches())), next(iter(source.batches()))):
        with pytest.raises(SourceError, match=r"another range|wanted exactly the keys"):
            list(second.batches(stranger.cursor))
    with pytest.raises(SourceError, match="wanted exactly the keys"):
        list(source.batches(mine))


def test_pieces_are_about_as_large_as_asked_for(tmp_path: Path) -> None:
    for number, size in enumerate([10, 20, 30, 500, 10, 0, 10]):
        (tmp_path / f"{number}.txt").write_text("x" * size)
    pieces = TextSource(tmp_path, split="line").cut(100)

    assert [piece.name.partition("/")[2] for piece in pieces] == [
        "0.txt to 2.txt",
        *(f"3.txt:bytes {start}-{start + 100}" for start in range(0, 500, 100)),
        "4.txt to 6.txt",
    ]
    assert [piece.size_hint() for piece in pieces] == [60, *[100] * 5, 20]
    whole = [piece.name.partition("/")[2] for piece in TextSource(tmp_path).cut(99)]
    assert whole == ["0.txt to 2.txt", "3.txt", "4.txt to 6.txt"]


def test_row_groups_come_in_runs_and_the_rows_keep_their_names(tmp_path: Path) -> None:
    column = pa.array([None if row == 8 else "x" * 100 for row in range(10)], pa.string())
    (tmp_path / "part.parquet").write_bytes(parquet_bytes(column, row_group_size=2))
    source = ParquetSource(tmp_path)
    size = source.size_hint()
    assert size is not None
    pieces = assert_cut_is_the_source(source, size // 2)

    assert [piece.name.partition(":")[2] for piece in pieces] == [
        "row groups 0 to 1", "row groups 2 to 3", "row group 4"
    ]  # fmt: skip
    assert [piece.describe().get("row_groups") for piece in pieces] == [[0, 2], [2, 4], None]
    assert account(pieces[2].batches()).drops == [Drop(id="part.parquet:row 8", reason="no_text")]
    assert len(source.cut(10 * size)) == 1


def test_compressed_files_and_whole_texts_are_one_piece_each(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 100))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "b"}\n' * 100))
    (tmp_path / "c.txt").write_text("c\n" * 100)

    assert len(assert_cut_is_the_source(JsonlSource(tmp_path), 1)) == 2
    assert len(assert_cut_is_the_source(TextSource(tmp_path), 1)) == 1


def test_an_empty_file_is_a_piece_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")

    assert len(assert_cut_is_the_source(JsonlSource(tmp_path), 1)) == 1
    assert joined(JsonlSource(tmp_path).cut(1)) == Account(counts={"empty": 0, "invalid_utf8": 0})


def test_files_named_one_by_one_are_cut_into_runs_too(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(9)]
    for path in paths:
        path.write_text("x" * 10)
    source = open_source(paths)

    assert isinstance(source, ConcatSource)
    assert [len(account(piece.batches()).texts) for piece in source.cut(40)] == [4, 4, 1]
    assert_cut_is_the_source(source, 40)


@pytest.mark.slow
def test_thousands_of_files_are_cut_into_small_pieces(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number:04}.jsonl").write_text('{"text": "x"}\n')
    pieces = JsonlSource(tmp_path).cut(14 * 100)

    assert [len(piece.files) for piece in pieces] == [100] * 30
    assert max(len(pickle.dumps(piece)) for piece in pieces) < 20_000


def _read(piece: Source) -> Account:
    return account(piece.batches())


@pytest.mark.slow
def test_a_fresh_process_reads_a_piece(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{}\n{"text": "b"}\n' * 20)
    pieces = JsonlSource(tmp_path).cut(100)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(_read, pieces)

    assert found == [account(piece.batches()) for piece in pieces]


def test_only_sources_that_can_be_cut_are_cuttable(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    source = TextSource(tmp_path)

    assert isinstance(source, CuttableSource)
    assert isinstance(ConcatSource([source]), CuttableSource)
    assert not isinstance(MemorySource(["a"]), CuttableSource)
    assert not continues(MemorySource(["a"]))
    for asked in (source, ConcatSource([source])):
        with pytest.raises(OptionError, match="wanted at least 1"):
            asked.cut(0)
