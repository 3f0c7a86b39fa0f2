"""Shuffled streams: permutations within limits, another for every epoch and seed; real files."""

from __future__ import annotations

import json
import logging
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.loading.state import StreamCursor
from shardmill.loading.streaming.documents import DocumentStream, StreamOrder
from shardmill.sources import BatchLimits, MemorySource, open_source
from tests.loading.streaming.units import (
    UnitsSource,
    assert_stream_resumes,
    epoch_texts,
    rows_of_units,
)

NUMBERS = [str(number) for number in range(200)]


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    units=rows_of_units(),
    batch_rows=st.integers(1, 7),
    documents=st.integers(1, 9),
    num_bytes=st.integers(1, 60),
    seed=st.integers(0, 2**32),
)
def test_a_block_keeps_both_limits_and_is_as_full_as_they_allow(
    units, batch_rows, documents, num_bytes, seed
):
    source = UnitsSource(units, batch_rows=batch_rows)
    if not source.texts:
        return
    order = StreamOrder(shuffle=True, seed=seed, buffer_documents=documents, buffer_bytes=num_bytes)
    blocks = [block.texts.to_pylist() for block in DocumentStream(source, order).blocks()]
    sizes = [sum(len(text.encode()) for text in block) for block in blocks]
    for number, block in enumerate(blocks):
        assert len(block) <= documents
        assert sizes[number] <= num_bytes or len(block) == 1
        if number + 1 < len(blocks) and blocks[number + 1]:
            # Something of the next block did not fit: by its number, or by its bytes.
            most = max(len(text.encode()) for text in blocks[number + 1])
            assert len(block) == documents or sizes[number] + most > num_bytes
    assert sorted(chain(*blocks)) == sorted(source.texts)


def test_two_seeds_two_epochs_and_two_streams_have_different_orders():
    source = MemorySource(NUMBERS)
    order = StreamOrder(shuffle=True, repeat=True, seed=1)
    stream = DocumentStream(source, order)
    first, second = epoch_texts(stream, 0), epoch_texts(stream, 1)
    other = epoch_texts(DocumentStream(source, StreamOrder(shuffle=True, seed=2)), 0)
    assert sorted(first) == sorted(second) == sorted(other) == sorted(NUMBERS)
    assert len({tuple(texts) for texts in (NUMBERS, first, second, other)}) == 4
    places = []
    for number in range(2):
        half = DocumentStream(source, order, stream=number, num_streams=2)
        places.append([int(text) // 2 for text in epoch_texts(half, 0)])
    assert sorted(places[0]) == sorted(places[1]) == list(range(100))
    assert places[0] != places[1]


def test_the_order_is_the_same_on_every_machine():
    stream = DocumentStream(MemorySource(NUMBERS[:10]), StreamOrder(shuffle=True, seed=7))
    assert epoch_texts(stream) == list("2596481730")


def test_equal_blocks_of_one_epoch_have_different_orders():
    order = StreamOrder(shuffle=True, buffer_documents=50)
    blocks = list(DocumentStream(MemorySource(NUMBERS), order).blocks())
    places = [[int(text) - 50 * n for text in b.texts.to_pylist()] for n, b in enumerate(blocks)]
    assert [len(place) for place in places] == [50, 50, 50, 50, 0]
    assert len({tuple(place) for place in places[:4]}) == 4


def test_units_come_in_another_order_each_epoch():
    units = [[str(unit)] for unit in range(100)]
    order = StreamOrder(shuffle=True, buffer_documents=1, repeat=True)  # only units are shuffled
    stream = DocumentStream(UnitsSource(units), order)
    first, second = epoch_texts(stream, 0), epoch_texts(stream, 1)
    assert sorted(first, key=int) == sorted(second, key=int) == [str(n) for n in range(100)]
    assert first != second
    assert sorted(first, key=int) != first


def test_where_a_document_goes_is_uniform_within_its_block():
    """Chi-square of first third -> thirds over 600 blocks: 9 degrees of freedom would give 9."""
    moved = np.zeros((3, 3))
    order = StreamOrder(shuffle=True, buffer_documents=30)
    texts = [str(number) for number in range(30 * 600)]
    for block in DocumentStream(MemorySource(texts), order).blocks():
        came = np.array([int(text) % 30 for text in block.texts.to_pylist()], int)
        np.add.at(moved, (came // 10, np.arange(len(came)) // 10), 1)
    wanted = 10 * 600 / 3
    assert moved.sum() == 30 * 600
    assert ((moved - wanted) ** 2 / wanted).sum() < 20


def test_a_block_that_is_full_of_bytes_is_said_once(caplog):
    order = StreamOrder(shuffle=True, buffer_bytes=10)
    with caplog.at_level(logging.INFO, "shardmill.loading.streaming"):
        blocks = list(DocumentStream(MemorySource(["abcd"] * 9, name="web"), order).blocks())
    assert [len(block.texts) for block in blocks] == [2, 2, 2, 2, 1]
    assert caplog.messages == [
        "source 'web': 10 bytes of text fill a shuffled block before 10000 documents do"
    ]


def test_a_document_larger_than_the_buffer_is_a_block_of_its_own():
    order = StreamOrder(shuffle=True, buffer_bytes=4)
    source = MemorySource(["a", "b" * 9, "c", "d"])
    blocks = [sorted(b.texts.to_pylist()) for b in DocumentStream(source, order).blocks()]
    assert blocks == [["a"], ["b" * 9], ["c", "d"]]


def write_corpus(folder, kind):
    """Three files of 40 texts each; the last of each file is empty."""
    wanted = []
    for number in range(3):
        texts = [f"{kind} {number}.{row} " + "x" * (row % 7) for row in range(40)] + [""]
        wanted += texts[:-1]
        if kind == "jsonl":
            lines = [json.dumps({"text": text}) for text in texts]
            (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
        elif kind == "parquet":
            pq.write_table(
                pa.table({"text": texts}), folder / f"{number}.parquet", row_group_size=6
            )
        else:
            for row, text in enumerate(texts):
                (folder / f"{number}-{row:02}.txt").write_text(text)
    return wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
@pytest.mark.parametrize(("shuffle", "streams"), [(False, (0, 1)), (True, (1, 2))])
def test_streams_of_real_files_resume_and_lose_nothing(tmp_path, kind, shuffle, streams):
    wanted = write_corpus(tmp_path, kind)
    limits = BatchLimits(num_bytes=600, num_documents=20)
    order = StreamOrder(shuffle=shuffle, buffer_documents=25, repeat=True, seed=5)
    stream, num_streams = streams

    def open_stream(number=stream):
        source = open_source(tmp_path, limits=limits)
        return DocumentStream(source, order, stream=number, num_streams=num_streams)

    assert_stream_resumes(open_stream, num_blocks=9)
    found = [epoch_texts(open_stream(number), 1) for number in range(num_streams)]
    assert sorted(chain(*found)) == sorted(wanted)
    assert (list(chain(*found)) == wanted) is (not shuffle and num_streams == 1)


def test_a_resumed_stream_of_parquet_opens_the_right_row_group(tmp_path):
    write_corpus(tmp_path, "parquet")
    order = StreamOrder(shuffle=True, buffer_documents=25)
    blocks = list(DocumentStream(open_source(tmp_path), order).blocks())
    assert sum(len(block.texts) for block in blocks) == 120
    assert blocks[2].start.unit > 0
    again = DocumentStream(open_source(tmp_path), order).blocks(blocks[2].start)
    assert next(again).texts.equals(blocks[2].texts)


def test_blocks_are_independent_of_what_the_source_put_into_a_batch():
    """With another batching the places differ, the documents of each block do not."""
    order = StreamOrder(shuffle=True, buffer_documents=9, buffer_bytes=40, seed=3)
    rows = [[text * (1 + int(text) % 3) for text in NUMBERS]]
    wanted = None
    for batch_rows in (1, 4, 500):
        stream = DocumentStream(UnitsSource(rows, batch_rows=batch_rows), order)
        found = [texts for block in stream.blocks() if (texts := block.texts.to_pylist())]
        wanted = wanted or found
        assert found == wanted
    assert len(wanted) > 20


def test_endless_streams_do_not_end():
    order = StreamOrder(shuffle=True, repeat=True, buffer_documents=3)
    blocks = list(islice(DocumentStream(MemorySource(["a", "b", "c", "d"]), order).blocks(), 40))
    assert [len(block.texts) for block in blocks] == [3, 1] * 20
    assert blocks[-1].end == StreamCursor(epoch=20, read=blocks[-1].end.read)
    assert blocks[-1].end.read.documents == 80
