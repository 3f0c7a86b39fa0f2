"""Streams of documents: exact resume, every document once, counts that sum up."""

from __future__ import annotations

import logging
import os
import pickle
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import SourceError
from shardmill.loading.state import ReadCounts, StreamCursor
from shardmill.loading.streaming.documents import DocumentStream, StreamOrder
from shardmill.sources import MemorySource, open_source
from tests.loading.streaming.units import (
    UnitsSource,
    assert_stream_resumes,
    contents,
    counts_of,
    epoch_texts,
    orders,
    rows_of_units,
)

LETTERS = [["a", "b", "", "c"], [None, "d"], [None, "", None], ["e", "f\ufffd"]]


def blocks_or_none(source, order, *, stream=0, num_streams=1, most=60):
    """Blocks, or None when the stream refuses because it has no document at all."""
    documents = DocumentStream(source, order, stream=stream, num_streams=num_streams)
    try:
        return list(islice(documents.blocks(), most))
    except SourceError as problem:
        if "no document" not in str(problem):
            raise
        return None


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(
    units=rows_of_units(),
    order=orders(),
    batch_rows=st.integers(1, 7),
    streams=st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3), (0, 5)]),
)
def test_from_every_block_on_the_stream_is_the_same_twice_in_a_row(
    units, order, batch_rows, streams
):
    stream, num_streams = streams
    source = UnitsSource(units, batch_rows=batch_rows)
    if blocks_or_none(source, order, stream=stream, num_streams=num_streams) is None:
        return

    def open_stream():
        return DocumentStream(
            UnitsSource(units, batch_rows=batch_rows), order, stream=stream, num_streams=num_streams
        )

    assert_stream_resumes(open_stream, num_blocks=9)


@settings(deadline=None, max_examples=120)
@given(
    units=rows_of_units(),
    order=orders(),
    batch_rows=st.integers(1, 7),
    num_streams=st.integers(1, 5),
    epoch=st.integers(0, 2),
)
def test_over_all_streams_every_document_comes_once_per_epoch(
    units, order, batch_rows, num_streams, epoch
):
    source = UnitsSource(units, batch_rows=batch_rows)
    found: list[str] = []
    num_given = 0
    for stream in range(num_streams):
        documents = DocumentStream(
            source,
            StreamOrder(**{**as_dict(order), "repeat": True}),
            stream=stream,
            num_streams=num_streams,
        )
        try:
            texts = epoch_texts(documents, epoch)
        except SourceError as problem:
            if "no document" not in str(problem):
                raise
            continue
        num_given += 1
        found += texts
    wanted = source.texts
    if order.max_documents is None:
        assert sorted(found) == sorted(wanted)
    else:
        assert len(found) == min(order.max_documents, len(wanted))
        assert set(found) <= set(wanted)
        assert len(set(found)) == len(found)
    assert num_given or not found


def as_dict(order):
    return {name: getattr(order, name) for name in StreamOrder.__dataclass_fields__}


@settings(deadline=None, max_examples=100)
@given(units=rows_of_units(), order=orders(), batch_rows=st.integers(1, 7))
def test_without_shuffle_the_order_is_that_of_the_source(units, order, batch_rows):
    source = UnitsSource(units, batch_rows=batch_rows)
    plain = StreamOrder(max_documents=order.max_documents)
    blocks = blocks_or_none(source, plain)
    texts = [text for block in blocks or [] for text in block.texts.to_pylist()]
    assert texts == source.texts[: order.max_documents]


@settings(deadline=None, max_examples=100)
@given(units=rows_of_units(), order=orders(), batch_rows=st.integers(1, 7))
def test_counts_at_the_end_of_an_epoch_are_those_of_the_input(units, order, batch_rows):
    source = UnitsSource(units, batch_rows=batch_rows)
    whole = StreamOrder(**{**as_dict(order), "repeat": False, "max_documents": None})
    blocks = blocks_or_none(source, whole, most=10_000)
    if blocks is None:
        assert source.texts == []
        return
    assert blocks[-1].end == StreamCursor(epoch=1, read=counts_of(source.rows))
    read = blocks[-1].end.read
    assert read.documents + read.elsewhere + read.empty + read.dropped == len(source.rows)
    done = 0
    for block in blocks:
        done += len(block.texts)
        assert block.end.read.documents == done


@pytest.mark.parametrize("stream", [0, 1])
def test_of_streams_that_read_the_same_rows_one_counts_those_without_text(stream):
    source = UnitsSource(LETTERS, batch_rows=2)
    order = StreamOrder(repeat=True)
    documents = DocumentStream(source, order, stream=stream, num_streams=3)
    ends = []
    for block in documents.blocks():
        if block.end.number == 0:
            ends.append(block.end)
        if block.end.epoch == 2:
            break
    once = {"empty": 2, "dropped": 3, "repaired": 1} if stream == 0 else {}
    twice = {"empty": 4, "dropped": 6, "repaired": 2} if stream == 0 else {}
    assert ends == [
        StreamCursor(epoch=1, read=ReadCounts(documents=2, elsewhere=4, **once)),
        StreamCursor(epoch=2, read=ReadCounts(documents=4, elsewhere=8, **twice)),
    ]


def test_blocks_without_shuffle_are_the_batches_of_the_source():
    blocks = DocumentStream(UnitsSource(LETTERS, batch_rows=2), StreamOrder()).blocks()
    first, second, third = islice(blocks, 3)
    assert contents([first]) == [
        (
            StreamCursor(),
            ["a", "b"],
            StreamCursor(
                cursor={"unit": 0, "cursor": {"row": 2}}, number=2, read=ReadCounts(documents=2)
            ),
        )
    ]
    assert second.texts.to_pylist() == ["c"]
    assert second.end.read == ReadCounts(documents=3, empty=1)
    assert third.texts.to_pylist() == ["d"]
    assert third.end.read == ReadCounts(documents=4, empty=1, dropped=1)


def test_a_place_inside_a_batch_keeps_the_cursor_before_it():
    order = StreamOrder(shuffle=True, buffer_documents=2)
    source = UnitsSource([["a", None, "b", "c", "d", "e"]], batch_rows=4)
    ends = [block.end for block in DocumentStream(source, order).blocks()]
    assert ends == [
        StreamCursor(skip=2, number=2, read=ReadCounts(documents=2, dropped=1)),
        StreamCursor(cursor={"row": 4}, skip=1, number=4, read=ReadCounts(documents=4, dropped=1)),
        StreamCursor(epoch=1, read=ReadCounts(documents=5, dropped=1)),
    ]


def test_rows_without_text_after_the_last_document_are_in_the_last_count():
    source = UnitsSource([["a"], [None, ""]], batch_rows=1)
    *_, last = DocumentStream(source, StreamOrder()).blocks()
    assert last.texts.to_pylist() == []
    assert last.end == StreamCursor(epoch=1, read=ReadCounts(documents=1, empty=1, dropped=1))
    assert list(DocumentStream(source, StreamOrder()).blocks(last.end)) == []


def test_resuming_opens_only_the_units_from_the_place_on():
    units = [[f"{unit}.{row}" for row in range(4)] for unit in range(64)]
    order = StreamOrder(shuffle=True, buffer_documents=10, seed=3)
    blocks = list(DocumentStream(UnitsSource(units, batch_rows=2), order).blocks())
    for number, first, num_opened in ((0, (0, None), 3), (21, (52, {"row": 2}), 3)):
        source = UnitsSource(units, batch_rows=2)
        again = DocumentStream(source, order).blocks(blocks[number].start)
        assert contents([next(again)]) == contents([blocks[number]])
        assert (blocks[number].start.unit, source.opened[0][1]) == first
        assert [cursor for _, cursor in source.opened[1:]] == [None] * (num_opened - 1)
    # A place at the very end of a unit asks that unit whether there is more.
    assert (blocks[20].start.unit, blocks[20].start.cursor) == (49, {"row": 4})


def test_the_source_is_divided_once_and_only_when_pieces_are_needed():
    source = UnitsSource(LETTERS)
    plain = DocumentStream(source, StreamOrder())
    shuffled = DocumentStream(source, StreamOrder(shuffle=True))
    assert source.opened == []
    list(plain.blocks())
    assert source.num_divided == 0
    list(shuffled.blocks())
    list(shuffled.blocks())
    assert source.num_divided == 1


def test_many_units_are_assigned_whole_so_each_is_read_by_one_stream():
    units = [[f"{unit}"] for unit in range(33)]  # 33 units of 2 streams: at least 16 for each
    sources = [UnitsSource(units) for _ in range(2)]
    for stream, source in enumerate(sources):
        texts = epoch_texts(DocumentStream(source, StreamOrder(), stream=stream, num_streams=2))
        assert texts == [str(unit) for unit in range(stream, 33, 2)]
    assert [len(source.opened) for source in sources] == [17, 16]


def test_as_many_units_as_streams_are_dealt_whole():
    source = UnitsSource([["a", "b"], ["c"], ["d", "e", "f"]])
    assigned = [
        epoch_texts(DocumentStream(source, StreamOrder(), stream=stream, num_streams=3))
        for stream in range(3)
    ]
    assert assigned == [["a", "b"], ["c"], ["d", "e", "f"]]


def test_few_units_are_dealt_by_texts_counted_through_the_epoch():
    source = UnitsSource([["a", "b", "", "c"], ["d", "e"], ["f", "g"]], batch_rows=2)
    assigned = [
        epoch_texts(DocumentStream(source, StreamOrder(), stream=stream, num_streams=2))
        for stream in range(2)
    ]
    assert assigned == [["a", "c", "e", "g"], ["b", "d", "f"]]


def test_a_limit_of_documents_is_shared_by_all_streams():
    source = UnitsSource([[f"{unit}.{row}" for row in range(3)] for unit in range(4)])
    order = StreamOrder(max_documents=5)
    assigned = [
        epoch_texts(DocumentStream(source, order, stream=stream, num_streams=2))
        for stream in range(2)
    ]
    assert assigned == [["0.0", "0.2", "1.1"], ["0.1", "1.0"]]


def test_a_source_that_cannot_be_divided_is_one_unit():
    source = MemorySource(["a", "b", "c", "d"])
    order = StreamOrder(shuffle=True, seed=1)
    assigned = [
        epoch_texts(DocumentStream(source, order, stream=stream, num_streams=2))
        for stream in range(2)
    ]
    assert [sorted(texts) for texts in assigned] == [["a", "c"], ["b", "d"]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("rows", [[], [[]], [["", None, ""]]])
def test_an_epoch_without_a_document_is_an_error_and_no_endless_loop(rows, repeat, shuffle):
    order = StreamOrder(shuffle=shuffle, repeat=repeat)
    blocks = DocumentStream(UnitsSource(rows, name="web"), order).blocks()
    with pytest.raises(SourceError, match=r"source 'web'.*no document"):
        list(islice(blocks, 100))


def test_a_source_that_dries_up_in_a_later_epoch_is_an_error():
    texts = ["a", "b"]
    blocks = DocumentStream(MemorySource(texts), StreamOrder(repeat=True)).blocks()
    next(blocks)
    texts.clear()
    with pytest.raises(SourceError, match="no document in epoch 1"):
        list(islice(blocks, 100))


def test_fewer_texts_than_streams_are_refused_with_both_numbers():
    stream = DocumentStream(MemorySource(["a", "b"]), StreamOrder(), stream=2, num_streams=4)
    with pytest.raises(SourceError, match=r"stream 2 of 4 got no document.*2 texts for 4 streams"):
        list(stream.blocks())
    source = UnitsSource([["a"], [None]])
    with pytest.raises(SourceError, match=r"stream 1 of 2 got no document.*hold no text"):
        list(DocumentStream(source, StreamOrder(), stream=1, num_streams=2).blocks())


def test_a_generator_is_read_once_and_refused_in_the_second_epoch():
    source = MemorySource((text for text in ["a", "b"]), name="gen")
    blocks = DocumentStream(source, StreamOrder(repeat=True)).blocks()
    assert next(blocks).texts.to_pylist() == ["a", "b"]
    with pytest.raises(SourceError, match="can be read only once"):
        list(islice(blocks, 3))


@pytest.mark.parametrize(
    ("place", "found"),
    [
        (StreamCursor(unit=9), "9 units are done, but there are 4"),
        (StreamCursor(skip=2), "2 texts of a batch with 2 are done"),
        (StreamCursor(cursor={"row": 4}, skip=1), "ends at a batch that had texts"),
    ],
)
def test_a_place_of_other_input_is_refused(place, found):
    source = UnitsSource([["a", "b", "c", "d"]] * 4, batch_rows=2, name="web")
    order = StreamOrder(shuffle=True)
    with pytest.raises(SourceError, match=f"source 'web'.*{found}.*resume with the input"):
        list(DocumentStream(source, order).blocks(place))


def test_the_first_ten_drops_are_named_and_the_rest_counted(caplog):
    source = UnitsSource([[None] * 14 + ["a"]], batch_rows=4, name="web")
    with caplog.at_level(logging.WARNING, "shardmill.loading.streaming"):
        stream = DocumentStream(source, StreamOrder(repeat=True))
        list(islice(stream.blocks(), 5))
        assert len(caplog.messages) == 11
        assert caplog.messages[9] == "source 'web': web/0:row 9 gave no document: no_text"
        assert caplog.messages[10] == (
            "source 'web', epoch 0: 4 more rows gave no document (no_text: 4)"
        )
        list(islice(stream.blocks(StreamCursor(epoch=1)), 5))
        assert caplog.messages[11:] == [
            "source 'web', epoch 1: 14 more rows gave no document (no_text: 14)"
        ]


def test_a_batch_that_is_resumed_inside_is_not_named_again(caplog):
    source = UnitsSource([[None, "a", "b"]], name="web")
    order = StreamOrder(shuffle=True, buffer_documents=1)
    with caplog.at_level(logging.WARNING, "shardmill.loading.streaming"):
        first = next(DocumentStream(source, order).blocks())
        assert len(caplog.messages) == 1
        list(DocumentStream(source, order).blocks(first.end))
    assert len(caplog.messages) == 1


def test_drops_that_every_stream_reads_are_named_by_one(caplog):
    source = UnitsSource([[None, "a", "b", "c"]], name="web")
    with caplog.at_level(logging.WARNING, "shardmill.loading.streaming"):
        for stream in range(3):
            list(DocumentStream(source, StreamOrder(), stream=stream, num_streams=3).blocks())
    assert caplog.messages == ["source 'web': web/0:row 0 gave no document: no_text"]


def test_a_stream_is_pickled_before_and_after_use():
    stream = DocumentStream(UnitsSource(LETTERS), StreamOrder(shuffle=True))
    wanted = epoch_texts(pickle.loads(pickle.dumps(stream)))
    assert sorted(wanted) == ["a", "b", "c", "d", "e", "f\ufffd"]
    assert epoch_texts(stream) == wanted
    assert epoch_texts(pickle.loads(pickle.dumps(stream))) == wanted


def test_files_rewritten_at_the_same_size_are_noticed_at_the_end_of_the_epoch(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "doc {n:03d}"}}\n' for n in range(50)))
    stream = DocumentStream(open_source(str(path)), StreamOrder(repeat=True))
    blocks = stream.blocks()
    assert len(next(blocks).texts)
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceError, match="were written to during epoch 0"):
        list(islice(blocks, 10))


def test_a_file_of_many_row_groups_is_divided_into_few_parts(tmp_path):
    table = pa.table({"text": [f"row {n}" for n in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    source = open_source(str(tmp_path / "a.parquet"))
    pieces = source.divide(500)
    assert len(pieces) == 250
    texts = [t for piece in pieces for batch in piece.batches() for t in batch.texts.to_pylist()]
    assert texts == table["text"].to_pylist()
