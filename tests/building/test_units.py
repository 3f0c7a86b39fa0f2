"""Units are runs of chunks that the input alone decides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.building import plan
from shardmill.building.plan import (
    CHUNK_BYTES,
    MOST_UNIT_BYTES,
    chunk_sizes,
    chunks_of,
    cut_source,
    cut_units,
    inputs_of,
    read_units,
    unit_ranges,
)
from shardmill.records import Cursor, TextBatch
from shardmill.sources import BatchLimits, JsonlSource, MemorySource

MIB = 2**20
SIZES = st.lists(
    st.one_of(st.integers(0, 50 * MIB), st.just(8 * MIB), st.integers(0, 10**4)), max_size=120
)
SHARDS = st.sampled_from([2, 10**6, 8 * MIB, 128 * MIB, 10**12])


def ranges(sizes: list[int], shard_bytes: int = 128 * MIB) -> list[tuple[int, int]]:
    return list(unit_ranges(sizes, shard_bytes, "uint16"))


@given(sizes=SIZES, shard_bytes=SHARDS)
def test_units_are_runs_that_cover_all_chunks_and_are_not_too_large(sizes, shard_bytes):
    found = ranges(sizes, shard_bytes)
    assert [chunk for run in found for chunk in range(*run)] == list(range(len(sizes)))
    # Four bytes of input for each token of a full shard.
    most = min(max(2 * shard_bytes, CHUNK_BYTES), MOST_UNIT_BYTES)
    for number, (start, stop) in enumerate(found):
        size = sum(sizes[start:stop])
        assert stop == start + 1 or size <= min(CHUNK_BYTES << (number // 16), most)


@given(sizes=SIZES, more=SIZES, shard_bytes=SHARDS)
def test_files_that_are_added_change_the_last_unit_only(sizes, more, shard_bytes):
    before, now = ranges(sizes, shard_bytes), ranges([*sizes, *more], shard_bytes)
    assert now[: max(len(before) - 1, 0)] == before[:-1]


def test_small_input_is_work_for_many_and_large_input_makes_few_shards():
    sizes = [8 * MIB] * 8_000  # 62.5 GiB
    found = [stop - start for start, stop in ranges(sizes)]
    assert found[:34] == [1] * 16 + [2] * 16 + [4, 4]
    assert max(found) == 32  # 256 MiB of text for a shard of 128 MiB
    assert len(found) < 8_000 // 32 + 5 * 16 + 1


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 1_000)
    rows = [json.dumps({"text": f"{number} " * 20}) for number in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "a.jsonl"


def source_of(corpus: Path) -> JsonlSource:
    return JsonlSource(corpus, limits=BatchLimits(num_documents=4))


def texts_of(batches: Iterator[TextBatch]) -> list[str]:
    return [text for batch in batches for text in batch.texts.to_pylist()]


def test_the_units_of_a_source_read_its_documents_in_order(corpus):
    feed = cut_source(source_of(corpus), (("train", None),))
    units = list(cut_units(feed, 3, plan="p", shard_bytes=10**6, dtype="uint16"))
    assert len(units) > 3
    assert [unit.key for unit in units] == [(3, number) for number in range(len(units))]
    rest = cut_units(feed, 3, plan="p", shard_bytes=10**6, dtype="uint16", first=2)
    assert [(unit.key, unit.inputs, unit.mark) for unit in rest] == [
        (unit.key, unit.inputs, unit.mark) for unit in units[2:]
    ]
    assert sum(unit.num_bytes for unit in units) == pytest.approx(
        corpus.stat().st_size, abs=len(feed.chunks)
    )
    batches = chain.from_iterable(chunk.batches() for unit in units for chunk in unit.chunks)
    assert texts_of(batches) == texts_of(source_of(corpus).batches())
    assert len({unit.mark for unit in units}) == len(units)
    assert units[0].name.startswith("a.jsonl/a.jsonl:bytes 0-")


def test_sizes_of_chunks_are_about_those_of_their_files(corpus):
    chunks = chunks_of(source_of(corpus))
    assert sum(chunk_sizes(chunks)) == pytest.approx(corpus.stat().st_size, abs=len(chunks))


def test_a_source_that_cannot_be_cut_is_one_chunk():
    source = MemorySource(["a"])
    assert list(chunks_of(source)) == [source]


class Numbers:
    """A source of one text a batch that cannot be cut, and says where it is read from."""

    name = "numbers"

    def __init__(self, count: int) -> None:
        self.count = count
        self.cursors: list[Cursor | None] = []

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        self.cursors.append(cursor)
        for number in range((cursor or {"next": 0})["next"], self.count):
            (batch,) = MemorySource([str(number)]).batches()
            yield TextBatch(texts=batch.texts, num_read=1, cursor={"next": number + 1})

    def size_hint(self) -> None:
        return None


def test_a_source_that_cannot_be_cut_is_read_in_units_that_a_cursor_continues():
    source = Numbers(300)
    feed = cut_source(source, (("train", None),))
    found = list(read_units(feed, 0, plan="p", first=0, cursor=None))
    sizes = [len(unit.chunks[0].held) for unit in found]
    assert sizes[:33] == [2] * 16 + [4] * 16 + [8]
    assert max(sizes) == plan._MOST_BATCHES
    assert [texts_of(unit.chunks[0].batches()) for unit in found[:2]] == [["0", "1"], ["2", "3"]]
    for number in (0, 1, 15, 16, 31, len(found) - 1):
        rest = list(read_units(feed, 0, plan="p", first=number + 1, cursor=found[number].cursor))
        assert [unit.number for unit in rest] == [unit.number for unit in found[number + 1 :]]
        assert [texts_of(unit.chunks[0].batches()) for unit in rest] == [
            texts_of(unit.chunks[0].batches()) for unit in found[number + 1 :]
        ]
    assert source.cursors[:2] == [None, {"next": 2}]


def test_inputs_depend_on_when_a_file_was_written(corpus):
    pieces = chunks_of(source_of(corpus))
    before = inputs_of(pieces)
    assert inputs_of(chunks_of(source_of(corpus))) == before
    corpus.write_bytes(corpus.read_bytes())
    assert inputs_of(pieces) != before
