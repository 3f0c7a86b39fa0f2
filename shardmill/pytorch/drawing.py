"""Batches of indices, drawn ahead of what was given.

In: a sampler with a position.  Out: lists of indices, and for each where the run is behind it.
Promise: a batch that was drawn before the sampler's order changed (new weights) is told apart from
those after, and what it held is drawn again by the new order.
Not here: reading (stateful).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from shardmill.pytorch.ranked import CHUNK, RankedSampler


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch that is being read."""

    revision: int  # of the sampler's order when it was drawn
    stop: int  # samples of the epoch, of all ranks, consumed once it is given


class BatchDraws:
    """The batch sampler of a `DataLoader`. It is its own iterator, begins where the sampler is,
    and may go on after its end when new weights put it back."""

    def __init__(self, sampler: RankedSampler, batch_size: int, *, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self.under_way: deque[Drawn] = deque()  # in the order in which they will be given
        self._go_back()

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._num_batches(0)

    @property
    def at_end(self) -> bool:
        """No batch is left behind the sampler's position."""
        return not self._num_batches(self._sampler.samples)

    def __iter__(self) -> BatchDraws:
        self.under_way.clear()
        self._go_back()
        return self

    def __next__(self) -> list[int]:
        if self._revision != self._sampler.revision:
            self._go_back()
        if not self._num_batches(self._at):
            raise StopIteration
        size = min(self._batch_size, self._sampler.remaining(self._at))
        if self._used + size > len(self._ready):
            self._fill()
        indices: list[int] = self._ready[self._used : self._used + size].tolist()
        self._used += size
        self._at += size * self._sampler.num_replicas
        self.under_way.append(Drawn(self._revision, self._at))
        return indices

    def _go_back(self) -> None:
        self._revision = self._sampler.revision
        self._at = self._sampler.samples
        self._ready = np.empty(0, np.int64)  # indices of this rank from `_at - used` on
        self._used = 0

    def _fill(self) -> None:
        """Whole batches at once: an order costs less by the thousand."""
        many = max(1, CHUNK // self._batch_size) * self._batch_size
        count = min(many, self._sampler.remaining(self._at))
        self._ready, self._used = self._sampler.draw(self._at, count), 0

    def _num_batches(self, start: int) -> int:
        left = self._sampler.remaining(start)
        return left // self._batch_size if self._drop_last else -(-left // self._batch_size)
