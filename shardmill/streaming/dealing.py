"""Who takes what: the units of a source and its texts, dealt to streams.

In: a source, an order, which of how many streams.  Out: the units of an epoch; which texts of a
batch are this stream's.
Promise: over all streams every text of an epoch is taken once. How it is dealt follows from the
input and the number of streams alone, so a resumed stream deals as the first one did.
Not here: reading.

Many units, or a number of them that the streams share evenly: each stream reads its own, and
nobody reads the others'. Else, or when an epoch has a limit that all streams share, every stream
reads everything and takes each `num_streams`-th text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.errors import SourceError
from shardmill.protocols import DividedSource, Source
from shardmill.records import OffsetArray
from shardmill.sampling import Permutation
from shardmill.streaming.order import StreamOrder

UNITS_PER_STREAM = 16
"""From here on streams that differ by one unit are even enough."""
UNITS_TO_SHUFFLE = 64
"""A drawn order of fewer units moves documents too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How one stream shares a source with the others."""

    num_units: int
    stream: int
    num_streams: int
    by_texts: bool  # each stream reads everything; else only its own units
    seed: int | None  # of the order of units; None: as they come

    @property
    def keeps_account(self) -> bool:
        """Whether rows without text count here: of streams that read the same rows, one does."""
        return not self.by_texts or self.stream == 0

    def units(self, epoch: int) -> OffsetArray:
        """The units that this stream reads in an epoch, in order."""
        step = 1 if self.by_texts else self.num_streams
        mine = np.arange(0 if self.by_texts else self.stream, self.num_units, step)
        if self.seed is None:
            return mine
        return Permutation(self.num_units, self.seed, "units", epoch).take(mine)

    def mine(self, number: int, start: int, stop: int) -> range:
        """Which of the texts `start..stop` of a batch are this stream's.

        `number` is that of the text at `start`, counted through the epoch.
        """
        if not self.by_texts:
            return range(start, stop)
        first = start + (self.stream - number) % self.num_streams
        return range(min(first, stop), stop, self.num_streams)

    def num_mine(self, number: int) -> int:
        """How many of the first `number` texts of an epoch are this stream's."""
        return len(self.mine(0, 0, number))


def divide_source(source: Source, order: StreamOrder, num_streams: int) -> Sequence[Source]:
    """The units; the whole source when nobody needs pieces of it. At least one."""
    at_least = max(
        UNITS_TO_SHUFFLE if order.shuffle else 1,
        UNITS_PER_STREAM * num_streams if num_streams > 1 else 1,
    )
    if at_least == 1 or not isinstance(source, DividedSource):
        return (source,)
    units = source.divide(at_least)
    if not units:
        raise SourceError(
            f"source {source.name!r} is divided into no pieces at all: it holds no document"
        )
    return units


def deal(num_units: int, order: StreamOrder, *, stream: int, num_streams: int) -> Dealing:
    is_even = num_units % num_streams == 0 or num_units >= UNITS_PER_STREAM * num_streams
    return Dealing(
        num_units=num_units,
        stream=stream,
        num_streams=num_streams,
        by_texts=num_streams > 1 and (not is_even or order.max_documents is not None),
        seed=order.seed if order.shuffle else None,
    )
