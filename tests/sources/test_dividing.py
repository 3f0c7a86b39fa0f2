"""A source that can be divided gives the same documents in pieces, whatever the pieces are."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import DividedSource
from shardmill.sources import (
    BatchLimits,
    ConcatSource,
    JsonlSource,
    MemorySource,
    ParquetSource,
    TextSource,
)
from shardmill.testing.sources import (
    RowCase,
    account,
    assert_divides_exactly,
    json_lines,
    parquet_bytes,
    raw_bytes,
)

LIMITS = st.builds(
    BatchLimits, num_bytes=st.integers(1, 200), num_documents=st.integers(1, 9)
) | st.just(BatchLimits())
NULL = st.just(RowCase(raw=b"", document=None, reason="no_text"))


def written(folder: Path, columns: list[list[str]], *, row_group_size: int = 2) -> Path:
    """A folder of Parquet files, one per list of texts."""
    folder.mkdir()
    for number, texts in enumerate(columns):
        data = parquet_bytes(pa.array(texts, pa.string()), row_group_size=row_group_size)
        (folder / f"{number}.parquet").write_bytes(data)
    return folder


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    files=st.lists(st.lists(raw_bytes() | NULL, max_size=9), min_size=1, max_size=4),
    limits=LIMITS,
    size=st.integers(1, 4),
)
def test_parquet_files_divide_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[RowCase]],
    limits: BatchLimits,
    size: int,
) -> None:
    root = tmp_path_factory.mktemp("parquet")
    num_groups = 0
    for number, cases in enumerate(files):
        column = pa.array([None if case.reason else case.raw for case in cases], pa.binary())
        (root / f"{number}.parquet").write_bytes(parquet_bytes(column, row_group_size=size))
        num_groups += max(-(-len(cases) // size), 1)
    counts = assert_divides_exactly(
        lambda: ParquetSource(root, limits=limits), at_least=(1, len(files), len(files) + 1, 100)
    )

    assert counts == [len(files), len(files), num_groups, num_groups]


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    files=st.lists(st.lists(json_lines(with_bad=True), max_size=6), min_size=1, max_size=4),
    limits=LIMITS,
)
def test_json_lines_divide_into_files(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[RowCase]], limits: BatchLimits
) -> None:
    root = tmp_path_factory.mktemp("jsonl")
    for number, cases in enumerate(files):
        (root / f"{number}.jsonl").write_bytes(b"\n".join(case.raw for case in cases))
    counts = assert_divides_exactly(
        lambda: JsonlSource(root, field="text", on_bad="skip", limits=limits)
    )

    assert counts == [len(files)] * 4


@settings(deadline=None, max_examples=20)
@given(
    files=st.lists(raw_bytes(), min_size=1, max_size=5),
    split=st.sampled_from([None, "line"]),
    limits=LIMITS,
)
def test_text_files_divide_into_files(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[RowCase],
    split: str | None,
    limits: BatchLimits,
) -> None:
    root = tmp_path_factory.mktemp("text")
    for number, case in enumerate(files):
        (root / f"{number}.txt").write_bytes(case.raw)
    counts = assert_divides_exactly(
        lambda: TextSource(root, split=split, limits=limits)  # type: ignore[arg-type]
    )

    assert counts == [len(files)] * 4


def test_a_piece_names_rows_as_the_whole_file_does(tmp_path: Path) -> None:
    column = pa.array(["a", "b", "c", None, "e"], pa.string())
    (tmp_path / "part.parquet").write_bytes(parquet_bytes(column, row_group_size=2))
    first, second, third = ParquetSource(tmp_path).divide(2)

    assert account(first.batches()).texts == ["a", "b"]
    assert account(third.batches()).texts == ["e"]
    (batch,) = second.batches()
    assert [drop.id for drop in batch.drops] == ["part.parquet:row 3"]
    assert batch.cursor == {"file": "part.parquet", "position": {"row_group": 1, "rows": 2}}
    assert second.describe()["row_group"] == 1
    assert second.name.endswith("part.parquet:row group 1")
    assert second.divide(7) != []
    assert account(second.divide(7)[0].batches()).texts == ["c"]


def test_a_piece_refuses_the_cursor_of_another(tmp_path: Path) -> None:
    root = written(tmp_path / "files", [["a", "b", "c", "d"], ["e"]])
    pieces = ParquetSource(root).divide(3)
    (batch,) = pieces[0].batches()

    with pytest.raises(SourceError, match="only row group 1 is read"):
        list(pieces[1].batches({"file": "0.parquet", "position": {"row_group": 0, "rows": 1}}))
    with pytest.raises(SourceError, match="not among its 1 files"):
        list(pieces[2].batches(batch.cursor))


def test_the_field_that_all_files_decide_holds_in_each_piece(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"body": "first", "zzz": "no"}\n')
    (tmp_path / "1.jsonl").write_text('{"zzz": "no", "body": "second"}\n')
    pq.write_table(pa.table({"body": ["p"], "zzz": ["no"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"zzz": ["no"], "body": ["q"]}), tmp_path / "1.parquet")

    for source, texts in (
        (JsonlSource(tmp_path), ["first", "second"]),
        (ParquetSource(tmp_path), ["p", "q"]),
    ):
        for at_least in (2, 9):
            pieces = pickle.loads(pickle.dumps(source.divide(at_least)))
            assert [account(piece.batches()).texts for piece in pieces] == [[t] for t in texts]


def test_sources_joined_divide_into_the_pieces_of_their_parts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    small = written(tmp_path / "small", [["b", "c"]])
    large = written(tmp_path / "large", [["d"] * 20, ["e"] * 4])

    def make() -> ConcatSource:
        parts = [TextSource(tmp_path / "a.txt"), ParquetSource(small)]
        memory = MemorySource(["m", "n"])
        return ConcatSource([*parts, memory, ParquetSource(large)])

    # The coarsest are 1 + 1 + 1 + 2 pieces, the finest 1 + 1 + 1 + 12.
    assert assert_divides_exactly(make, at_least=(1, 5, 6, 12, 15, 999)) == [5, 5, 15, 15, 15, 15]
    assert isinstance(make(), DividedSource)
    assert not isinstance(MemorySource(["m"]), DividedSource)


def test_files_without_rows_are_pieces(tmp_path: Path) -> None:
    root = written(tmp_path / "files", [[], ["a"], []])

    assert assert_divides_exactly(lambda: ParquetSource(root)) == [3, 3, 3, 3]


@pytest.mark.parametrize("at_least", [0, -1])
def test_at_least_one_piece_must_be_asked_for(tmp_path: Path, at_least: int) -> None:
    (tmp_path / "a.txt").write_text("one")
    source = TextSource(tmp_path)
    for asked in (source, ConcatSource([source])):
        with pytest.raises(OptionError, match="wanted at least 1"):
            asked.divide(at_least)


@pytest.mark.slow
def test_thousands_of_files_divide_into_small_pieces(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number:04}.jsonl").write_text('{"text": "x"}\n')
    source = JsonlSource(tmp_path)
    pieces = source.divide(100)

    assert len(pieces) == 3000
    assert len(pickle.dumps(pieces[0])) < 2000
