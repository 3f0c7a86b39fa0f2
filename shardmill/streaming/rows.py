"""Encoded chunks as one table of documents, the same however the chunks fell.

In: consecutive `Encoded` records.  Out: `Documents`: flat ids with a column for each thing that
packers ask about a document.
Promise: documents keep their order; a document is known by the place of its block and its number
there, whichever chunk brought it.
Not here: how documents become rows (sequential, bins).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardmill.errors import StateMismatchError
from shardmill.records import OffsetArray, Ragged
from shardmill.streaming.records import Encoded, Mark, Place, Rows, Tally, Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Documents:
    """Consecutive documents of a stream; some may be without ids."""

    values: Tokens  # (total,) their ids, end to end
    offsets: OffsetArray  # (n + 1,) from 0: where each begins in `values`
    places: tuple[Place, ...]  # of their blocks, in order
    place: OffsetArray  # (n,) which of `places`
    document: OffsetArray  # (n,) number in the block
    cut: OffsetArray  # (n,) ids taken off its end

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> OffsetArray:
        return np.diff(self.offsets)


def table_of(parts: Sequence[Encoded]) -> Documents:
    """The documents of all parts, in order. Needs at least one part."""
    ids = Ragged.concatenate([part.ids for part in parts])
    counts = [len(part.ids) for part in parts]
    places: list[Place] = []
    numbers = []
    for part in parts:
        if not places or places[-1] != part.block:
            places.append(part.block)
        numbers.append(len(places) - 1)
    firsts = np.array([part.first for part in parts], dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int64)
    return Documents(
        values=ids.values.astype(np.int32, copy=False),
        offsets=ids.offsets,
        places=tuple(places),
        place=np.repeat(np.array(numbers, dtype=np.int64), counts),
        document=np.arange(sum(counts), dtype=np.int64) + np.repeat(firsts - before, counts),
        cut=np.concatenate([part.cut for part in parts]).astype(np.int64, copy=False),
    )


def part_of(encoded: Encoded, start: int, stop: int) -> Encoded:
    """Documents `start..stop` of a chunk, sharing its ids."""
    return replace(
        encoded,
        first=encoded.first + start,
        ids=encoded.ids.slice(start, stop),
        cut=encoded.cut[start:stop],
    )


def without_ids(encoded: Encoded, num_ids: int) -> Encoded:
    """The chunk without the first `num_ids` ids of its first document."""
    ids = encoded.ids
    offsets = ids.offsets - num_ids
    offsets[0] = 0
    return replace(encoded, ids=Ragged(ids.values[num_ids:], offsets))


def resumed(encoded: Encoded, start: Mark) -> Encoded:
    """The first chunk with documents after a resume, without the ids that earlier rows hold."""
    if (encoded.block, encoded.first) != (start.place, start.document):
        raise StateMismatchError(
            f"the state goes on inside document {start.document:,} of the block at "
            f"{start.place}, but the stream begins with document {encoded.first:,} of the block at "
            f"{encoded.block}: the source is not the one that the state was taken from"
        )
    length = int(encoded.ids.offsets[1])
    if length <= start.part:
        raise StateMismatchError(
            f"document {start.document:,} of the block at {start.place}: the state says that "
            f"{start.part:,} of its ids are done and more follow, but it has {length:,}: the "
            "source or the tokenizer is not the one that the state was taken from"
        )
    return without_ids(encoded, start.part)


def no_rows(width: int, read: Tally) -> Rows:
    """What was read at the end of a stream and gave no row: input without text."""
    tokens: Tokens = np.empty((0, width), np.int32)
    none = np.empty(0, np.int64)
    return Rows(
        tokens=tokens,
        segments=tokens,
        places=(),
        place=none,
        document=none,
        part=none,
        begun=none,
        cut_documents=none,
        cut_tokens=none,
        read=read,
    )


def nothing_left(start: Mark) -> StateMismatchError:
    """For a stream that ends where the state promises more."""
    return StateMismatchError(
        f"the state goes on inside document {start.document:,} of the block at {start.place}, but "
        "nothing comes from there: the source is not the one that the state was taken from"
    )
