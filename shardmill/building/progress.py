"""What a build will take, told before it starts: tokens, disk, memory.

In: the grains of each feed, a tokenizer.  Out: an `Estimate`.
Promise: a grain's worth of text of each source is read, also of what is packed, and some kilobytes
of it are encoded, whatever the size of the rest; what nobody can know stays None, and is never
guessed into a refusal.
Not here: deciding how many processes there are (hands.py).

How far a build has come, source by source.

In: what was done, in any order.  Out: `Progress`.
Promise: numbers never fall; the work of all workers and of earlier runs is summed. How much of a
source is done is told by its grains, whose sizes are known, since text takes another size in every
format; of a source in one grain by its text, while that can be right.
Not here: drawing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import numpy as np

from shardmill.building import units as grains
from shardmill.building.encode import TokenRules
from shardmill.building.segments import Receipt
from shardmill.building.spec import Progress
from shardmill.building.units import FeedGrains, read_grains
from shardmill.errors import BuildError
from shardmill.protocols import Source, Tokenizer
from shardmill.records import Cursor

SAMPLE_BYTES = 2**16
_SURELY = 40
"""Bytes on disk that a byte of input never takes: a token of four bytes and its length, twice.
Not so of input that is packed."""
_PACKED = (".gz", ".zst", ".parquet")


@runtime_checkable
class _Placed(Protocol):
    """A source that can say how much of it lies before a cursor."""

    def bytes_before(self, cursor: Cursor) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedEstimate:
    """One feed."""

    source: str
    num_bytes: int | None  # of input; None when nobody knows
    num_units: int
    num_tokens: int | None  # that will be made, about; None when nobody knows
    disk_bytes: int | None  # at the peak: segments and store together


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """What a byte of input becomes."""

    tokens: float
    documents: float


def estimate_feed(
    feed: FeedGrains,
    tokenizer: Tokenizer,
    rules: TokenRules,
    *,
    num_units: int,
    most: int | None,
) -> FeedEstimate:
    """`most` tokens fill the feed's splits; None: there is no limit."""
    size = feed.source.size_hint()
    tokens: int | None = None
    disk: int | None = None
    if size is not None and feed.can_travel:
        density = density_of(feed, tokenizer)
        tokens, documents = int(size * density.tokens), int(size * density.documents)
        tokens += documents if rules.end_id is not None else 0
        if most is not None and tokens > most:
            tokens, documents = most, documents * most // tokens
        itemsize = np.dtype(rules.dtype).itemsize
        disk = 2 * (tokens * itemsize + documents * 8)
    elif most is not None:
        tokens = most
    return FeedEstimate(
        source=feed.source.name,
        num_bytes=size,
        num_units=num_units,
        num_tokens=tokens,
        disk_bytes=disk,
    )


def density_of(feed: FeedGrains, tokenizer: Tokenizer) -> Density:
    """Measured on the first grain; on its beginning, when it is packed and larger than it looks."""
    texts = documents = encoded = tokens = 0
    grain = cast(Source, feed.grains[0])
    size = grain.size_hint() or feed.sizes[0]
    with closing(read_grains([grain], None)) as batches:
        for found in batches:
            array = found.batch.texts
            texts += array.nbytes
            documents += len(array)
            if not encoded and len(array):
                some = array[: max(1, SAMPLE_BYTES * len(array) // max(array.nbytes, 1))]
                encoded = some.nbytes
                tokens = len(tokenizer.encode_batch(some).values)
            if texts >= grains.GRAIN_BYTES and isinstance(grain, _Placed):
                size = grain.bytes_before(cast(Cursor, found.batch.cursor["cursor"]))
                break
    size = max(size, 1)
    return Density(tokens=texts / size * tokens / max(encoded, 1), documents=documents / size)


def check_space(
    folder: Path, feeds: Sequence[FeedGrains], estimates: Sequence[FeedEstimate], *, there: int
) -> None:
    """Refuse to start what the disk cannot hold; `there` bytes are in the journal already."""
    needed = sum(estimate.disk_bytes or 0 for estimate in estimates) - there
    free = shutil.disk_usage(folder).free
    if needed > free:
        read = sum(estimate.num_bytes or 0 for estimate in estimates)
        raise BuildError(
            f"{folder}: {mb(free)} are free, but this build takes about {mb(needed)} there until "
            f"it is done, half of it for the store ({mb(read)} of input, {len(feeds)} source"
            f"{'s' if len(feeds) > 1 else ''}): make room, build on another disk, or limit the "
            "tokens"
        )


def is_surely_enough(folder: Path, feeds: Sequence[FeedGrains]) -> bool:
    """Whether no estimate is needed: the disk holds the worst that this input can become."""
    found = (getattr(feed.source, "files", ()) for feed in feeds)
    files = (file for listed in found if isinstance(listed, tuple) for file in listed)
    if any(file.name.lower().endswith(_PACKED) for file in files):
        return False
    size = sum(feed.source.size_hint() or 0 for feed in feeds)
    return shutil.disk_usage(folder).free > _SURELY * size


def mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What lies ahead of one feed."""

    source: str
    num_bytes: int | None  # of input, about; None when nobody knows
    most: int | None  # tokens that are wanted; None: all
    sizes: Sequence[int] = ()  # of its grains, about


@dataclass(slots=True)
class _Sum:
    edges: list[int]  # bytes before each grain, and in all
    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    reached: dict[int, int] = field(default_factory=dict)  # unit, by its first grain -> grain

    def grains_share(self) -> float | None:
        """Of the bytes in whole grains; None when they tell nothing."""
        if len(self.edges) < 3 or not self.edges[-1]:
            return None
        done = sum(self.edges[grain] - self.edges[start] for start, grain in self.reached.items())
        return done / self.edges[-1]


class ProgressMeter:
    """Counts, and tells after each call of `tell`."""

    def __init__(self, goals: Sequence[Goal], on_progress: OnProgress | None) -> None:
        self._goals, self._on_progress = goals, on_progress
        self._sums = [_Sum([0, *accumulate(goal.sizes)]) for goal in goals]

    def count(self, feed: int, *, documents: int, tokens: int, num_bytes: int) -> None:
        done = self._sums[feed]
        done.documents += documents
        done.tokens += tokens
        done.num_bytes += num_bytes

    def reach(self, feed: int, start: int, cursor: Cursor) -> None:
        """The unit that begins with grain `start` has come to a cursor of its grains."""
        grain = cursor.get("grain")
        self._reach(feed, start, start + grain if isinstance(grain, int) else start)

    def reach_end(self, receipt: Receipt) -> None:
        """The unit is done, if this is its last receipt."""
        if receipt.last:
            self._reach(receipt.feed, receipt.start, receipt.stop)

    def count_receipt(self, receipt: Receipt) -> None:
        self.count(
            receipt.feed,
            documents=receipt.num_given,
            tokens=receipt.num_tokens,
            num_bytes=receipt.num_bytes,
        )
        self.reach(receipt.feed, receipt.start, receipt.cursor)
        self.reach_end(receipt)

    def tell(self, feed: int) -> None:
        if self._on_progress is None:
            return
        goal, done = self._goals[feed], self._sums[feed]
        self._on_progress(
            Progress(
                source=goal.source,
                feed=feed,
                documents=done.documents,
                tokens=done.tokens,
                share=_share(goal, done),
            )
        )

    def _reach(self, feed: int, start: int, grain: int) -> None:
        reached = self._sums[feed].reached
        reached[start] = max(grain, reached.get(start, start))


def _share(goal: Goal, done: _Sum) -> float | None:
    """Of the tokens that are wanted, or of the input: whichever ends the feed first."""
    parts = [done.tokens / goal.most] if goal.most else []
    share = done.grains_share()
    if share is None and goal.num_bytes and done.num_bytes < goal.num_bytes:
        share = done.num_bytes / goal.num_bytes
    parts += [] if share is None else [share]
    return min(1.0, max(parts)) if parts else None
