"""The turns of a fixed set of shares, at any place.

In: whole-number shares; sample numbers.  Out: the source of each sample, and its place in the
source's own endless stream.
Promise: what `quota` promises. Answers do not depend on what was asked before; only their cost
does: turns are kept a stretch at a time, a whole period if it is short.
Not here: changing shares (mixture).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardmill.sampling.keys import Indices
from shardmill.sampling.order import by_value
from shardmill.sampling.quota import counts_at, turns

LONGEST_PERIOD = 2**16
"""A period up to this long is gone through once and kept: 0.1 s, 640 KiB."""
STRETCH = 2048
"""Longer ones are kept in stretches of so many samples, a few milliseconds each."""
KEPT = 64


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Some turns behind one another."""

    source: npt.NDArray[np.uint16]  # (n,) whose turn it is
    place: Indices  # (n,) which sample of that source
    after: tuple[int, ...]  # the counts behind the last turn


class Schedule:
    """Whose turn it is, for ever, by shares that do not change."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        self._each = np.array(self.weights, np.int64)
        self._period = sum(self.weights)
        self._length = self._period if self._period <= LONGEST_PERIOD else STRETCH
        self._kept: OrderedDict[int, Stretch] = OrderedDict()

    def counts(self, n: int) -> list[int]:
        """How many of the first n samples are of each source."""
        return counts_at(self.weights, n)

    def locate(self, numbers: Indices) -> tuple[Indices, Indices]:
        """(source, place in the source's stream) of each sample."""
        lap, within = np.divmod(numbers, self._period)
        source = np.empty(len(numbers), np.int64)
        place = np.empty(len(numbers), np.int64)
        for number, chosen in by_value(within // self._length):
            stretch = self._stretch(number)
            at = within[chosen] - number * self._length
            source[chosen] = stretch.source[at]
            place[chosen] = stretch.place[at]
        place += lap * self._each[source]
        return source, place

    def _stretch(self, number: int) -> Stretch:
        found = self._kept.get(number)
        if found is None:
            found = self._kept[number] = self._walk(number)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    def _walk(self, number: int) -> Stretch:
        start = number * self._length
        before = self._kept.get(number - 1)
        counts = before.after if before else tuple(counts_at(self.weights, start))
        length = min(self._length, self._period - start)
        source = np.array(turns(self.weights, counts, start, length), np.uint16)
        place = np.empty(length, np.int64)
        after = list(counts)
        for one in range(len(counts)):
            at = np.flatnonzero(source == one)
            place[at] = np.arange(counts[one], counts[one] + len(at))
            after[one] += len(at)
        return Stretch(source, place, tuple(after))
