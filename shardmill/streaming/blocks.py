"""Texts become blocks; a place moves past what was taken.

In: texts of source batches, and which of them are the stream's.  Out: `Block`s, and `Place`s.
Promise: a shuffled block keeps both limits (one document always fits) and is a permutation that
its start decides; nothing in a block depends on what was read before its start.
Cost: a shuffled text is copied twice: behind its neighbours, and to its place in the order.
Not here: reading; which texts are whose (dealing).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from shardmill.records import OffsetArray, TextBatch
from shardmill.sampling import Permutation
from shardmill.sources.clean import byte_lengths
from shardmill.streaming.order import StreamOrder
from shardmill.streaming.records import Block, Place


class Collector:
    """The block being made: texts in the order of reading until it is full."""

    def __init__(self, order: StreamOrder, stream: int, start: Place) -> None:
        self._order, self._stream, self.start = order, stream, start
        self._parts: list[pa.LargeStringArray] = []
        self._documents = self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits, whatever it is."""
        return (
            self._documents >= self._order.buffer_documents
            or self._bytes >= self._order.buffer_bytes
        )

    @property
    def is_cut_by_bytes(self) -> bool:
        """Whether a block that has no room for a next text still has room for its number."""
        return self._documents < self._order.buffer_documents

    def take(self, texts: pa.LargeStringArray, mine: range) -> int:
        """As many of `mine` as fit, from the first on; how many that were."""
        if self._order.shuffle:
            mine = mine[: self._order.buffer_documents - self._documents]
        sizes = _sizes(texts, mine)
        if self._order.shuffle:
            room = self._order.buffer_bytes - self._bytes
            count = int(np.searchsorted(np.cumsum(sizes), room, side="right"))
            if not self._documents:
                count = min(max(1, count), len(mine))  # a block holds at least one
            mine, sizes = mine[:count], sizes[:count]
        if mine:
            self._parts.append(_picked(texts, mine))
            self._documents += len(mine)
            self._bytes += int(sizes.sum())
        return len(mine)

    def block(self, end: Place) -> Block:
        """What was taken, in the order of its use; the next block starts at `end`."""
        parts, self._parts = self._parts, []
        self._documents = self._bytes = 0
        texts = parts[0] if len(parts) == 1 else pa.concat_arrays(parts or [_NOTHING])
        del parts  # the copy is enough
        if self._order.shuffle and len(texts) > 1:
            texts = texts.take(pa.array(self._drawn(len(texts))))
        block = Block(start=self.start, texts=texts, end=end)
        self.start = end
        return block

    def _drawn(self, count: int) -> OffsetArray:
        path = ("documents", self.start.epoch, self._stream, self.start.number)
        return Permutation(count, self._order.seed, *path).take(np.arange(count))


_NOTHING = pa.array([], pa.large_string())


def _picked(texts: pa.LargeStringArray, mine: range) -> pa.LargeStringArray:
    """These texts: without copying when they lie together."""
    if mine.step == 1:
        return texts.slice(mine.start, len(mine))
    return texts.take(pa.array(np.arange(mine.start, mine.stop, mine.step)))


def _sizes(texts: pa.LargeStringArray, mine: range) -> OffsetArray:
    """Bytes of each of these texts."""
    if not mine:
        return np.empty(0, np.int64)
    return byte_lengths(texts.slice(mine.start, mine[-1] + 1 - mine.start))[:: mine.step]


def after_texts(
    place: Place, batch: TextBatch, *, until: int, taken: int, keeps_account: bool
) -> Place:
    """The place moved to text `until` of the batch behind its cursor, `taken` of them its own.

    A batch's rows without text count when it is entered, in the stream that keeps their account.
    At its end the place is behind it.
    """
    passed, is_done = until - place.skip, until == len(batch.texts)
    tally = replace(
        place.tally,
        documents=place.tally.documents + taken,
        elsewhere=place.tally.elsewhere + passed - taken,
    )
    if keeps_account and place.skip == 0 and (passed or is_done):
        tally = replace(
            tally,
            empty=tally.empty + batch.counts.get("empty", 0),
            dropped=tally.dropped + len(batch.drops),
            repaired=tally.repaired + batch.counts.get("invalid_utf8", 0),
        )
    return replace(
        place,
        cursor=batch.cursor if is_done else place.cursor,
        skip=0 if is_done else until,
        number=place.number + passed,
        tally=tally,
    )


def after_unit(place: Place) -> Place:
    return replace(place, unit=place.unit + 1, cursor=None, skip=0)


def after_epoch(place: Place) -> Place:
    """The start of the next epoch, which is where the last one ends."""
    return Place(epoch=place.epoch + 1, tally=place.tally)
