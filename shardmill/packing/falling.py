"""Sizes in falling order, as groups of equals.

In: sizes.  Out: their order and, for each distinct size, how many have it.
Promise: larger first; equal sizes in the order of their numbers.
Not here: where anything goes. The decreasing packers work on groups: equals are interchangeable,
so one step can place a thousand of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardmill.records import IntArray

RowNumbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Falling:
    """Item numbers by falling size, with the groups they fall into."""

    order: IntArray  # (n,) item numbers
    sizes: list[int]  # of each group, falling
    counts: list[int]  # items of each group


def falling(sizes: IntArray) -> Falling:
    if not len(sizes):
        return Falling(np.empty(0, np.int64), [], [])
    largest = int(sizes.max())
    # 16-bit keys are sorted by radix: several times quicker
    keys: IntArray = sizes.astype(np.uint16 if largest < 2**16 else np.int64)
    np.subtract(largest, keys, out=keys)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    counts = np.diff(starts, append=len(ordered))
    return Falling(order, (largest - ordered[starts].astype(np.int64)).tolist(), counts.tolist())
