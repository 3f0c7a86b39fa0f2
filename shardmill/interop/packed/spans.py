"""Many half-open spans as one array of places.

In: starts and stops.  Out: every place of every span, and where each span begins among them.
Promise: pure; one allocation of the result's size.
Not here: what lies at the places.
"""

from __future__ import annotations

import numpy as np

from shardmill.records import OffsetArray


def spread(starts: OffsetArray, stops: OffsetArray) -> tuple[OffsetArray, OffsetArray]:
    """starts [5 0], stops [7 3] -> [5 6 0 1 2], [0 2 5]"""
    lengths = stops - starts
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths), offsets
