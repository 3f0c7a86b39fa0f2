"""A set of whole numbers that grows by sorted runs and is taken from its small end.

In: rising arrays of keys.  Out: the smallest keys, rising.
Promise: every key goes in once and comes out once; adding n keys one by one or together costs
O(n log n) in all, as runs of like length are merged.
Not here: what the keys mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]


class SortedRuns:
    """A few rising arrays, each at most half as long as the one before it."""

    def __init__(self) -> None:
        self._runs: list[Keys] = []

    def add(self, keys: Keys) -> None:
        """`keys` must rise and be new."""
        if not len(keys):
            return
        while self._runs and len(self._runs[-1]) <= 2 * len(keys):
            keys = np.sort(np.concatenate((self._runs.pop(), keys)))
        self._runs.append(keys)

    def smallest(self, count: int) -> Keys:
        """The `count` smallest keys, or all; they stay."""
        if len(self._runs) == 1:
            return self._runs[0][:count]
        if not self._runs:
            return np.empty(0, dtype=np.int64)
        return np.sort(np.concatenate([run[:count] for run in self._runs]))[:count]

    def take_through(self, key: int) -> Keys:
        """All keys up to `key`, rising; they are out."""
        taken = []
        kept = []
        for run in self._runs:
            at = int(np.searchsorted(run, key, side="right"))
            if at:
                taken.append(run[:at])
            if at < len(run):
                kept.append(run[at:])
        self._runs = kept
        if len(taken) == 1:
            return taken[0]
        return np.sort(np.concatenate(taken)) if taken else np.empty(0, dtype=np.int64)
