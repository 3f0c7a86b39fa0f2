"""How far a build has come, source by source.

In: what was done, in any order.  Out: `Progress`.
Promise: numbers never fall; the work of all workers and of earlier runs is summed.
Not here: drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardmill.build.segments import Receipt
from shardmill.build.spec import Progress

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What lies ahead of one feed."""

    source: str
    num_bytes: int | None  # of input, about; None when nobody knows
    most: int | None  # tokens that are wanted; None: all


@dataclass(slots=True)
class _Sum:
    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0


class Meter:
    """Counts, and tells after each call of `tell`."""

    def __init__(self, goals: Sequence[Goal], on_progress: OnProgress | None) -> None:
        self._goals, self._on_progress = goals, on_progress
        self._sums = [_Sum() for _ in goals]

    def count(self, feed: int, *, documents: int, tokens: int, num_bytes: int) -> None:
        done = self._sums[feed]
        done.documents += documents
        done.tokens += tokens
        done.num_bytes += num_bytes

    def count_receipt(self, receipt: Receipt) -> None:
        self.count(
            receipt.feed,
            documents=receipt.num_given,
            tokens=receipt.num_tokens,
            num_bytes=receipt.num_bytes,
        )

    def tell(self, feed: int) -> None:
        if self._on_progress is None:
            return
        goal, done = self._goals[feed], self._sums[feed]
        parts = [done.tokens / goal.most] if goal.most else []
        if goal.num_bytes and done.num_bytes < goal.num_bytes:
            parts.append(done.num_bytes / goal.num_bytes)
        self._on_progress(
            Progress(
                source=goal.source,
                documents=done.documents,
                tokens=done.tokens,
                share=min(1.0, max(parts)) if parts else None,
            )
        )
