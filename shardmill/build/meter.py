"""How far a build has come, source by source.

In: what was done, in any order.  Out: `Progress`.
Promise: numbers never fall; the work of all workers and of earlier runs is summed. How much of a
source is done is told by its grains, whose sizes are known, since text takes another size in every
format; of a source in one grain by its text, while that can be right.
Not here: drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from shardmill.build.segments import Receipt
from shardmill.build.spec import Progress
from shardmill.records import Cursor

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


class Meter:
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
