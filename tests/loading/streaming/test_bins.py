"""Documents packed whole: nothing lost, nothing split without need, a position after every row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import StateMismatchError
from shardmill.loading.state import Position, ReadCounts, StreamCursor
from shardmill.loading.streaming.documents import Encoded
from shardmill.loading.streaming.rows import BinRules, bin_rows
from shardmill.records import Ragged
from tests.loading.streaming.encoded import (
    PAD,
    Doc,
    blocks_of_documents,
    counts_of,
    documents_of,
    encoded,
    flat,
    pieces_of,
    place_of,
)

SEQ_LEN = st.integers(1, 30) | st.just(400)
CHUNKS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
RULES = st.builds(
    BinRules,
    buffer_documents=st.integers(1, 12),
    buffer_tokens=st.integers(1, 120) | st.just(2**24),
    max_per_row=st.none() | st.integers(1, 4),
    algorithm=st.sampled_from(["best-fit", "first-fit"]),
    seed=st.none() | st.integers(0, 3),
)


def rows_of(blocks, rules, seq_len, *, start=None, chunk=(3,)):
    start = start or Position(block=place_of(blocks, 0))
    stream = encoded(blocks, start=start, chunk=chunk)
    return flat(bin_rows(stream, rules, seq_len=seq_len, pad_id=PAD, start=start))


def buffers_of(blocks, rules) -> list[list[Doc]]:
    """Documents that are packed together, one by one as the rule is written."""
    buffers: list[list[Doc]] = []
    for document in documents_of(blocks):
        tokens = sum(len(other.ids) for other in buffers[-1]) if buffers else 0
        if (
            not buffers
            or len(buffers[-1]) == rules.buffer_documents
            or tokens + len(document.ids) > rules.buffer_tokens
        ):
            buffers.append([])
        buffers[-1].append(document)
    return buffers


def wanted_pieces(documents: list[Doc], width: int) -> list[tuple[int, ...]]:
    return [doc.ids[at : at + width] for doc in documents for at in range(0, len(doc.ids), width)]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(blocks=blocks_of_documents(), rules=RULES, seq_len=SEQ_LEN, chunk=CHUNKS)
def test_each_piece_of_each_document_is_one_segment_of_one_row(
    blocks, rules, seq_len, chunk
) -> None:
    rows = [pieces_of(row) for row in rows_of(blocks, rules, seq_len, chunk=chunk)]
    at = 0
    for buffer in buffers_of(blocks, rules):  # each buffer is emptied before the next begins
        wanted = wanted_pieces(buffer, seq_len + 1)
        found: list[tuple[int, ...]] = []
        while len(found) < len(wanted):
            assert rows[at] == sorted(rows[at])  # stream order: ids rise with the documents
            assert rules.max_per_row is None or len(rows[at]) <= rules.max_per_row
            found += [tuple(piece) for piece in rows[at]]
            at += 1
        assert sorted(found) == sorted(wanted)
    assert at == len(rows)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(blocks=blocks_of_documents(), rules=RULES, seq_len=SEQ_LEN)
def test_without_a_seed_rows_come_by_their_first_document(blocks, rules, seq_len) -> None:
    rules = BinRules(buffer_documents=rules.buffer_documents, max_per_row=rules.max_per_row)
    rows = [pieces_of(row) for row in rows_of(blocks, rules, seq_len)]
    at = 0
    for buffer in buffers_of(blocks, rules):
        last = max((token for document in buffer for token in document.ids), default=0)
        firsts = []
        while at < len(rows) and rows[at][0][0] <= last:
            firsts.append(rows[at][0][0])
            at += 1
        assert firsts == sorted(firsts)
    assert at == len(rows)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(blocks=blocks_of_documents(), rules=RULES, seq_len=SEQ_LEN, chunk=CHUNKS)
def test_chunks_change_neither_rows_nor_positions(blocks, rules, seq_len, chunk) -> None:
    whole = rows_of(blocks, rules, seq_len, chunk=(1000,))
    assert rows_of(blocks, rules, seq_len, chunk=chunk) == whole


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(blocks=blocks_of_documents(), rules=RULES, seq_len=SEQ_LEN, chunk=CHUNKS, picks=st.randoms())
def test_from_the_position_after_any_row_the_later_rows_follow(
    blocks, rules, seq_len, chunk, picks
) -> None:
    rows = rows_of(blocks, rules, seq_len)
    for number in picks.sample(range(1, len(rows) + 1), min(4, len(rows))):
        later = rows_of(blocks, rules, seq_len, start=rows[number - 1][2], chunk=chunk)
        assert later == rows[number:]
        if later:  # and once more, from a position of the resumed stream
            again = later[0][2]
            assert rows_of(blocks, rules, seq_len, start=again) == rows[number + 1 :]


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(blocks=blocks_of_documents(), rules=RULES, seq_len=SEQ_LEN)
def test_documents_are_counted_once_with_their_first_piece(blocks, rules, seq_len) -> None:
    rows = rows_of(blocks, rules, seq_len)
    begins = {document.ids[0] for document in documents_of(blocks) if document.ids}
    for row in rows:
        assert row[3][0] == sum(piece[0] in begins for piece in pieces_of(row))
    # a buffer of documents without ids has no row to count in
    counted = [
        doc for buffer in buffers_of(blocks, rules) if any(d.ids for d in buffer) for doc in buffer
    ]
    assert sum(row[3][1] for row in rows) == sum(document.cut > 0 for document in counted)
    assert sum(row[3][2] for row in rows) == sum(document.cut for document in counted)


def test_small_rows_as_written_by_hand() -> None:
    blocks = (
        (Doc((1, 2, 3, 4, 5), 7), Doc((6,)), Doc((), 4)),
        (Doc((7, 8, 9)), Doc((10, 11))),
    )
    first, second = place_of(blocks, 0), place_of(blocks, 1)
    # buffers of 4: pieces 1234 5 6 789; then 10 11
    assert rows_of(blocks, BinRules(buffer_documents=4), 3) == [
        ([1, 2, 3, 4], [1, 1, 1, 1], Position(block=first, part=1), (1, 2, 11)),
        ([5, 7, 8, 9], [1, 2, 2, 2], Position(block=first, part=2), (1, 0, 0)),
        ([6, 0, 0, 0], [1, 0, 0, 0], Position(block=second, document=1), (1, 0, 0)),
        ([10, 11, 0, 0], [1, 1, 0, 0], Position(block=second, document=2), (1, 0, 0)),
    ]


def test_a_buffer_ends_before_the_document_that_is_too_much() -> None:
    blocks = ((Doc((1, 2)), Doc((3, 4)), Doc((5,)), Doc((6, 7, 8, 9, 10, 11)), Doc((12,))),)
    rules = BinRules(buffer_tokens=4, max_per_row=1)
    positions = [row[2] for row in rows_of(blocks, rules, 9)]
    assert [(one.document, one.part) for one in positions] == [
        (0, 1),
        (2, 0),
        (3, 0),
        (4, 0),
        (5, 0),
    ]


def test_a_full_buffer_gives_its_rows_before_more_is_read() -> None:
    asked = []

    def stream():
        for chunk in encoded(((Doc((1,)), Doc((2,))), (Doc((3,)),))):
            asked.append(chunk)
            yield chunk

    rows = bin_rows(stream(), BinRules(buffer_documents=2), seq_len=1, pad_id=PAD, start=Position())
    assert next(rows).tokens.tolist() == [[1, 2]]
    assert len(asked) == 1


def test_the_seed_mixes_the_rows_of_a_buffer() -> None:
    blocks = (tuple(Doc((n,)) for n in range(1, 21)),)
    orders = [
        [row[0][0] for row in rows_of(blocks, BinRules(buffer_documents=10, seed=seed), 1)]
        for seed in (None, 0, 0, 1)
    ]
    assert orders[0] == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    assert orders[1] == orders[2]
    assert len({tuple(order) for order in orders}) == 3
    # two buffers of one stream are mixed in two ways
    assert [token + 10 for token in orders[1][:5]] != orders[1][5:]
    assert sorted(orders[1][:5]) == [1, 3, 5, 7, 9]


def test_rows_know_what_was_read_for_them() -> None:
    blocks = ((Doc((1, 2)), Doc((3,))), (Doc((4,)),), ())
    rows = list(
        bin_rows(
            encoded(blocks),
            BinRules(buffer_documents=2),
            seq_len=1,
            pad_id=PAD,
            start=Position(block=place_of(blocks, 0)),
        )
    )
    assert [some.read for some in rows] == [counts_of(blocks, 1), counts_of(blocks, 3)]


def test_no_documents_give_no_rows() -> None:
    assert rows_of((), BinRules(), 4) == []
    assert rows_of(((), (Doc((), 1),)), BinRules(), 4) == []


def test_a_large_buffer_of_web_like_documents_is_nearly_full() -> None:
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(6.2, 1.1, 10_000)).astype(np.int64)
    values = np.arange(1, lengths.sum() + 1, dtype=np.int32)
    chunk = Encoded(
        block=StreamCursor(),
        first=0,
        ids=Ragged.from_lengths(values, lengths),
        cut=np.zeros(10_000, dtype=np.int64),
        read=ReadCounts(),
    )
    rows = list(
        bin_rows(iter([chunk]), BinRules(seed=0), seq_len=2048, pad_id=PAD, start=Position())
    )
    tokens = np.concatenate([some.tokens[some.segments > 0] for some in rows])
    assert (np.sort(tokens) == values).all()
    places = sum(some.tokens.size for some in rows)
    assert len(values) / places > 0.999
    assert len(rows) == 3


def test_a_row_longer_than_what_is_gathered_at_a_time_is_whole() -> None:
    lengths = [70_000, 200_000, 1, 65_536]
    values = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    ids = Ragged.from_lengths(values, lengths)
    chunk = Encoded(
        block=StreamCursor(), first=0, ids=ids, cut=np.zeros(4, np.int64), read=ReadCounts()
    )
    (rows,) = bin_rows(iter([chunk]), BinRules(), seq_len=149_999, pad_id=PAD, start=Position())
    assert (np.sort(rows.tokens[rows.segments > 0]) == values).all()
    # by their first piece: the first and last documents, the long one's piece, its rest
    assert [np.bincount(row)[1:].tolist() for row in rows.segments] == [
        [70_000, 1, 65_536],
        [150_000],
        [50_000],
    ]


def test_a_state_of_other_documents_is_refused() -> None:
    blocks = ((Doc((1, 2, 3)),),)
    start = Position(block=place_of(blocks, 0), part=1)
    with pytest.raises(StateMismatchError, match=r"1 of its rows are done .* it gives 1"):
        rows_of(blocks, BinRules(), 3, start=start)
    start = Position(block=place_of(blocks, 0), document=1, part=2)
    with pytest.raises(StateMismatchError, match=r"2 of its rows are done .* it gives 0"):
        rows_of(blocks, BinRules(), 3, start=start)
