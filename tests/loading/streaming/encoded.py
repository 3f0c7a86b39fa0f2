"""Encoded streams for the tests of packers: documents in blocks, cut into chunks anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from shardmill.loading.state import Position, ReadCounts, StreamCursor
from shardmill.loading.streaming.documents import Encoded
from shardmill.loading.streaming.rows import StreamRows
from shardmill.loading.streaming.tokenizer import DocumentIds, StreamTokenizer
from shardmill.records import Ragged
from shardmill.tokenizers import ByteTokenizer

PAD = 0


def framing(
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    max_doc_tokens: int | None = None,
    vocab_size: int = 2**40,
) -> StreamTokenizer:
    """A tokenizer that frames documents with the ids that are not None."""
    ids = DocumentIds(
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=PAD,
        add_bos=bos_id is not None,
        add_eos=eos_id is not None,
        max_doc_tokens=max_doc_tokens,
    )
    return StreamTokenizer(tokenizer=ByteTokenizer(), vocab_size=vocab_size, ids=ids)


@dataclass(frozen=True)
class Doc:
    """One document: ids that occur in no other document, and how many were cut off."""

    ids: tuple[int, ...]
    cut: int = 0


Blocks = tuple[tuple[Doc, ...], ...]


@st.composite
def blocks_of_documents(draw, *, longest: int = 40) -> Blocks:
    """Some blocks, some of them empty; documents without ids, of one id, of many rows."""
    lengths = st.sampled_from([0, 1, 1, 2, 3, longest]) | st.integers(0, longest)
    shape = draw(st.lists(st.lists(st.tuples(lengths, st.sampled_from([0, 0, 5]))), max_size=6))
    following = 1  # 0 is padding
    blocks = []
    for block in shape:
        documents = []
        for length, cut in block:
            documents.append(Doc(tuple(range(following, following + length)), cut))
            following += length
        blocks.append(tuple(documents))
    return tuple(blocks)


def place_of(blocks: Blocks, block: int) -> StreamCursor:
    """Two blocks an epoch, numbers counted within it."""
    first = block - block % 2
    before = sum(len(documents) for documents in blocks[first:block])
    return StreamCursor(
        epoch=block // 2,
        unit=block % 2,
        cursor={"block": block},
        number=before,
        read=counts_of(blocks, block),
    )


def counts_of(blocks: Blocks, stop: int) -> ReadCounts:
    return ReadCounts(documents=sum(len(documents) for documents in blocks[:stop]))


def encoded(
    blocks: Blocks, *, start: Position | None = None, chunk: Sequence[int] = (3,)
) -> Iterator[Encoded]:
    """The stream from a position's document on, in chunks of `chunk` documents, again and again."""
    begin = 0 if start is None else int(start.block.cursor["block"])  # type: ignore[index,arg-type]
    skip = 0 if start is None else start.document
    turn = 0
    for number, documents in enumerate(blocks[begin:], begin):
        place = place_of(blocks, number)
        if start is not None and number == begin:
            assert place == start.block
        position, skip = skip, 0
        while True:
            size = chunk[turn % len(chunk)]
            turn += 1
            some = documents[position : position + size]
            yield Encoded(
                block=place,
                first=position,
                ids=Ragged.from_sequences([doc.ids for doc in some], np.int32),
                cut=np.array([doc.cut for doc in some], dtype=np.int64),
                read=counts_of(blocks, number + 1),
            )
            position += size
            if position >= len(documents):
                break


Flat = list[tuple[list[int], list[int], Position, tuple[int, int, int]]]


def flat(rows: Iterator[StreamRows]) -> Flat:
    """Row by row: tokens, segments, the position after it, begun and cut counts."""
    found: Flat = []
    for some in rows:
        assert some.tokens.dtype == some.segments.dtype == np.int32
        for columns in (some.after, some.begun):
            assert (columns.shape, columns.dtype) == ((len(some), 3), np.int64)
        for row in range(len(some)):
            counts = some.begun[row]
            found.append(
                (
                    some.tokens[row].tolist(),
                    some.segments[row].tolist(),
                    some.position_after(row),
                    (int(counts[0]), int(counts[1]), int(counts[2])),
                )
            )
    return found


def documents_of(blocks: Blocks) -> list[Doc]:
    return [document for block in blocks for document in block]


def pieces_of(
    row: tuple[list[int], list[int], Position, tuple[int, int, int]],
) -> list[list[int]]:
    """The tokens of each segment of a row; asserts that segments are 1, 2, ..., then padding."""
    tokens, segments = row[0], row[1]
    filled = sum(segment > 0 for segment in segments)
    assert segments[:filled] == sorted(segments[:filled])
    assert set(segments[:filled]) == set(range(1, max(segments) + 1))
    assert segments[filled:] == [0] * (len(segments) - filled)
    assert tokens[filled:] == [PAD] * (len(tokens) - filled)
    pieces: list[list[int]] = [[] for _ in range(max(segments))]
    for token, segment in zip(tokens[:filled], segments[:filled], strict=True):
        pieces[segment - 1].append(token)
    return pieces
