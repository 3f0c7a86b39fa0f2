"""Which samples a rank reads at each step.

In: a stream, where the first step begins, batch size and rank.  Out: a `Step` for any step number.
Promise: step `k` is the global samples `start + k * world * batch_size` on, as many as all ranks
read together, cut by `rank_slice`; so every rank has exactly `batch_size` of them. The order is
asked for up to `CHUNK` samples at a time, which costs little more than for one batch.
Not here: reading. Not for two threads at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardmill.errors import OptionError
from shardmill.loading.stream import SampleStream
from shardmill.records import OffsetArray
from shardmill.sampling import rank_slice

FIRST_CHUNK, CHUNK = 64, 8192
"""Samples asked for at a time: few for a first batch without delay, then more. With twice as many
the arrays of the order would be fresh memory at every call."""

MOST_STEP_SAMPLES = 2**40

HORIZON = 8
"""Steps that may be looked at before their turn without asking for anything twice."""


class Step(NamedTuple):
    """The samples of one rank at one step."""

    samples: range  # global numbers
    source: OffsetArray  # (n,)
    epoch: OffsetArray  # (n,)
    item: OffsetArray  # (n,)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """The steps `first..stop`."""

    first: int
    stop: int
    table: OffsetArray  # (steps, 3, batch_size) source, epoch and item


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Who reads how much at a step."""

    batch_size: int  # samples of one rank
    rank: int
    world: int

    def __post_init__(self) -> None:
        if self.step_samples > MOST_STEP_SAMPLES:
            raise OptionError(
                f"{self.world:,} ranks x {self.batch_size:,} samples: a step has at most "
                f"{MOST_STEP_SAMPLES:,}"
            )

    @property
    def step_samples(self) -> int:
        """Of all ranks together."""
        return self.world * self.batch_size

    def samples_at(self, start: int) -> range:
        """The samples of this rank, of the step that begins with the global sample `start`."""
        return rank_slice(start, start + self.step_samples, rank=self.rank, world=self.world)


class Steps:
    """The steps of one rank from `start` on; `num_steps` None: endless."""

    def __init__(
        self, stream: SampleStream, shape: Shape, *, start: int, num_steps: int | None
    ) -> None:
        self.stream, self.shape = stream, shape
        self.start, self.num_steps = start, num_steps
        self.step_samples = shape.step_samples
        self._batch_size = shape.batch_size
        self._begin = shape.samples_at(start).start  # of this rank; every step as much further on
        # Enough for a step and those behind it up to the horizon, also when a chunk is one step.
        self._kept: deque[_Chunk] = deque(maxlen=2 + HORIZON)
        self._last = _Chunk(0, 0, np.empty((0, 3, shape.batch_size), np.int64))  # the one in use

    def at(self, step: int) -> Step:
        """Step `step`; the next one is near at hand then."""
        chunk = self._last
        if not chunk.first <= step < chunk.stop:
            chunk = self._last = self._chunk_of(step)
        # copied: a batch that is kept must not keep the orders of a hundred others
        source, epoch, item = chunk.table[step - chunk.first].copy()
        begin = self._begin + step * self.step_samples
        return Step(range(begin, begin + self._batch_size), source, epoch, item)

    def _chunk_of(self, step: int) -> _Chunk:
        for chunk in reversed(self._kept):
            if chunk.first <= step < chunk.stop:
                return chunk
        self._kept.append(self._ask(step))
        return self._kept[-1]

    def _ask(self, first: int) -> _Chunk:
        """The steps from `first` on: few at first, then more and more of them."""
        last = self._kept[-1] if self._kept else None
        grown = last is not None and last.stop == first
        samples = min(CHUNK, 4 * last.table[:, 0].size) if last and grown else FIRST_CHUNK
        count = max(1, samples // self._batch_size)
        if self.num_steps is not None:
            count = min(count, self.num_steps - first)
        starts = self._begin + np.arange(first, first + count) * self.step_samples
        numbers = np.add.outer(starts, np.arange(self._batch_size))
        found = self.stream.take(numbers.reshape(-1))
        columns = [one.reshape(numbers.shape) for one in (found.source, found.epoch, found.item)]
        return _Chunk(first, first + count, np.stack(columns, axis=1))
