"""Documents end to end: nothing lost, nothing twice, and every row can be gone on from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import StateMismatchError
from shardmill.loading.state import Position, ReadCounts, StreamCursor
from shardmill.loading.streaming import rows as rows_module
from shardmill.loading.streaming.documents import Encoded
from shardmill.loading.streaming.rows import join, sequential_rows
from shardmill.records import OffsetArray, Ragged
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


def rows_of(blocks, seq_len, *, start=None, chunk=(3,)):
    start = start or Position(block=place_of(blocks, 0))
    stream = encoded(blocks, start=start, chunk=chunk)
    return flat(sequential_rows(stream, seq_len=seq_len, pad_id=PAD, start=start))


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(blocks=blocks_of_documents(), seq_len=SEQ_LEN, chunk=CHUNKS)
def test_rows_joined_are_the_documents_end_to_end(blocks, seq_len, chunk) -> None:
    rows = rows_of(blocks, seq_len, chunk=chunk)
    pieces = [piece for row in rows for piece in pieces_of(row)]
    everything = [token for document in documents_of(blocks) for token in document.ids]
    assert [token for piece in pieces for token in piece] == everything
    assert all(0 not in segments for _, segments, _, _ in rows[:-1])
    assert len(rows) == -(-len(everything) // (seq_len + 1))
    # a border between pieces is a border between documents, or between rows
    begins = {document.ids[0] for document in documents_of(blocks) if document.ids}
    for row in rows:
        for piece in pieces_of(row)[1:]:
            assert piece[0] in begins
        for piece in pieces_of(row):
            assert not begins & set(piece[1:])


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(blocks=blocks_of_documents(), seq_len=SEQ_LEN, chunk=CHUNKS)
def test_chunks_change_neither_rows_nor_positions(blocks, seq_len, chunk) -> None:
    assert rows_of(blocks, seq_len, chunk=chunk) == rows_of(blocks, seq_len, chunk=(1000,))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(blocks=blocks_of_documents(), seq_len=SEQ_LEN, chunk=CHUNKS, picks=st.randoms())
def test_from_the_position_after_any_row_the_later_rows_follow(
    blocks, seq_len, chunk, picks
) -> None:
    rows = rows_of(blocks, seq_len)
    for number in picks.sample(range(1, len(rows) + 1), min(6, len(rows))):
        later = rows_of(blocks, seq_len, start=rows[number - 1][2], chunk=chunk)
        assert later == rows[number:]
        if later:  # and once more, from a position of the resumed stream
            again = later[0][2]
            assert rows_of(blocks, seq_len, start=again) == rows[number + 1 :]


@settings(deadline=None, max_examples=100)
@given(blocks=blocks_of_documents(), seq_len=SEQ_LEN)
def test_documents_are_counted_once_where_they_begin(blocks, seq_len) -> None:
    rows = rows_of(blocks, seq_len)
    wanted = [[0, 0, 0] for _ in rows]
    position = 0
    for document in documents_of(blocks):
        row = position // (seq_len + 1)
        if row < len(rows):  # after the last id of a stream there may be no row to count in
            wanted[row][0] += bool(document.ids)
            wanted[row][1] += document.cut > 0
            wanted[row][2] += document.cut
        position += len(document.ids)
    assert [list(row[3]) for row in rows] == wanted
    assert sum(row[3][0] for row in rows) == sum(bool(doc.ids) for doc in documents_of(blocks))


def test_small_rows_as_written_by_hand() -> None:
    blocks = (
        (Doc((1, 2, 3), 7), Doc((), 4), Doc((4,))),
        (),
        (Doc((5, 6, 7, 8, 9, 10)), Doc((11,), 1)),
    )
    first, third = place_of(blocks, 0), place_of(blocks, 2)
    assert rows_of(blocks, 3) == [
        ([1, 2, 3, 4], [1, 1, 1, 2], Position(block=first, document=3), (2, 2, 11)),
        ([5, 6, 7, 8], [1, 1, 1, 1], Position(block=third, part=4), (1, 0, 0)),
        ([9, 10, 11, 0], [1, 1, 2, 0], Position(block=third, document=2), (1, 1, 1)),
    ]


def test_a_document_cut_to_nothing_counts_in_the_row_being_filled() -> None:
    blocks = ((Doc((1, 2)), Doc((), 4), Doc((3,))),)
    assert [row[3] for row in rows_of(blocks, 1)] == [(1, 0, 0), (1, 1, 4)]


def test_rows_know_what_was_read_for_them() -> None:
    blocks = ((Doc((1, 2)), Doc((3,))), (Doc((4,)), Doc((5,))), ())
    rows = list(sequential_rows(encoded(blocks), seq_len=1, pad_id=PAD, start=Position()))
    assert [(len(some), some.read) for some in rows] == [
        (1, counts_of(blocks, 1)),
        (1, counts_of(blocks, 2)),
        (1, counts_of(blocks, 3)),
    ]


def test_no_documents_give_no_rows() -> None:
    assert rows_of((), 4) == []
    assert rows_of(((), (Doc(()),)), 4) == []


def chunk_of(ids: Ragged, first: int = 0) -> Encoded:
    cut = np.zeros(len(ids), dtype=np.int64)
    return Encoded(block=StreamCursor(), first=first, ids=ids, cut=cut, read=ReadCounts())


def test_many_tiny_chunks_for_one_row_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []

    def counted(parts: Sequence[Encoded]) -> tuple[Ragged, OffsetArray]:
        joined.append(len(parts))
        return join(parts)

    monkeypatch.setattr(rows_module, "join", counted)
    ids = Ragged.from_sequences([[1]], np.int32)
    chunks = (chunk_of(ids, first) for first in range(5_000))
    (rows,) = sequential_rows(chunks, seq_len=10**6, pad_id=PAD, start=Position())
    assert int(rows.begun[0, 0]) == 5_000
    assert joined == [5_000]


@pytest.mark.slow
def test_one_long_document_makes_many_rows() -> None:
    ids = Ragged.from_lengths(np.arange(3_000_000, dtype=np.int32), [3_000_000])
    (rows,) = sequential_rows(iter([chunk_of(ids)]), seq_len=2, pad_id=PAD, start=Position())
    assert len(rows) == 1_000_000
    assert (rows.tokens.reshape(-1) == np.arange(3_000_000)).all()
    assert (rows.segments == 1).all()
    assert rows.after[:3, 2].tolist() == [3, 6, 9]
    assert rows.position_after(999_999) == Position(block=StreamCursor(), document=1)
    assert int(rows.begun[:, 0].sum()) == 1
    assert all(b - a == 3 for a, b in pairwise(rows.after[:-1, 2].tolist()[:1000]))


def test_a_state_of_other_documents_is_refused() -> None:
    blocks = ((Doc((1, 2, 3)),), (Doc((4, 5)),))
    place = place_of(blocks, 0)
    with pytest.raises(
        StateMismatchError, match=r"3 of its ids are done and more follow, .* has 3"
    ):
        rows_of(blocks, 3, start=Position(block=place, part=3))
    with pytest.raises(StateMismatchError, match="the stream begins with document 0"):
        rows_of(blocks, 3, start=Position(block=place, document=1, part=1))
    with pytest.raises(StateMismatchError, match="nothing comes from there"):
        rows_of(blocks, 3, start=Position(block=place_of(blocks, 1), document=1, part=1))
