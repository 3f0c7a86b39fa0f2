"""An order of items that a seed decides, in whole-number arithmetic.

In: a count and a seed.  Out: the numbers 0..n - 1 in another order.
Promise: the same on every machine and with every version of numpy, whose generators make no such
promise. Orders of two seeds have nothing in common.
Not here: orders without an array of them (sampling).
"""

from __future__ import annotations

import hashlib

import numpy as np

from shardmill.records import OffsetArray


def shuffled(num_items: int, seed: int) -> OffsetArray:
    """Items sorted by a hash of (seed, number): splitmix64 from a start that the seed gives."""
    digest = hashlib.sha256(f"packing shuffle {seed}".encode()).digest()
    start = np.uint64(int.from_bytes(digest[:8], "little"))
    keys = np.arange(1, num_items + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable")
