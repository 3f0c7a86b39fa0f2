"""Which grains are one piece of work.

In: the grains of each feed, how large a unit should be, units that an earlier run began.
Out: units in order.
Promise: the units of a feed are a partition of its grains, in order; what was begun stays as it is.
Unit borders are a matter of speed and never show in the store.
Not here: what becomes of a unit (task.py), in which order units are done (stage.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardmill.build.grains import grain_sizes, grains_of
from shardmill.build.segments import UnitKey
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import ConversationSource, CuttableSource, Source
from shardmill.sources import stamp_of

UNIT_BYTES = 64 * 2**20
ALONE_BYTES = 2**30
"""What a worker gets at a time, and what one process alone makes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedGrains:
    """One feed, cut."""

    source: Source | ConversationSource
    grains: Sequence[Source | ConversationSource]
    sizes: Sequence[int]  # bytes of each grain, about; 0 when nobody knows

    @property
    def can_travel(self) -> bool:
        """Whether its grains were made to be read in another process."""
        return isinstance(self.source, CuttableSource)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A run of grains of one feed."""

    key: UnitKey
    grains: tuple[Source | ConversationSource, ...]
    source: str  # the name of the whole source
    num_bytes: int  # about
    can_travel: bool

    @property
    def name(self) -> str:
        """What it reads, for messages."""
        first, last = self.grains[0].name, self.grains[-1].name
        return first if first == last else f"{first} ... {last}"


def cut_feed(source: Source) -> FeedGrains:
    """The grains of a source of texts."""
    grains = grains_of(source)
    return FeedGrains(source=source, grains=grains, sizes=grain_sizes(grains))


def make_unit(feed: FeedGrains, number: int, start: int, stop: int, *, plan: str) -> Unit:
    """Grains `start..stop` of feed `number`."""
    grains = tuple(feed.grains[start:stop])
    key = UnitKey(feed=number, start=start, stop=stop, plan=plan, inputs=inputs_of(grains))
    return Unit(
        key=key,
        grains=grains,
        source=feed.source.name,
        num_bytes=sum(feed.sizes[start:stop]),
        can_travel=feed.can_travel,
    )


def inputs_of(grains: Sequence[Source | ConversationSource]) -> str:
    """A hash over the files of some grains as they are on this machine now."""
    try:
        stamps = [(grain.name, stamp_of(grain)) for grain in grains]
    except OSError as error:
        raise SourceError(
            f"{error.filename}: {error.strerror}; a file must not go while a store is built from it"
        ) from error
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()


def unit_ranges(
    sizes: Sequence[int], unit_bytes: int, begun: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Half-open runs of grains of about `unit_bytes`. `begun` tells the stop of runs that an
    earlier call made, by their start: these are kept, and the rest is cut around them."""
    if unit_bytes < 1:
        raise OptionError(f"unit_bytes={unit_bytes}: wanted how large a unit should be, 1 or more")
    start = 0
    while start < len(sizes):
        stop, total = start + 1, sizes[start]
        if start in begun:
            stop = begun[start]
        else:
            while stop < len(sizes) and stop not in begun and total + sizes[stop] <= unit_bytes:
                total += sizes[stop]
                stop += 1
        yield start, stop
        start = stop
