"""Do two sequences of documents come in the same order?

In: the documents of a split that both stores have, as streams of (hashes, places), and which of
them one side has more often.  Out: the places where the order first differs, or None.
Promise: a document that one side has more often is passed over where the other side goes on
without it, so that leaving one of several equal documents out is no other order; each that is
passed over is told. Memory is that of a chunk of the streams.
Not here: which documents both have (match.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from shardmill.compare.hashes import Hashes
from shardmill.compare.match import Surplus
from shardmill.records import OffsetArray

Chunks = Iterator[tuple[Hashes, OffsetArray]]
LeaveOut = Callable[[int], None]
_LEAST, _MOST = 64, 2**18  # documents compared at a time


def align(
    streams: tuple[Chunks, Chunks], surplus: Surplus, leave_out: tuple[LeaveOut, LeaveOut]
) -> tuple[int, int] | None:
    """`leave_out` is called with the places that have no partner."""
    a, b = _Stream(streams[0]), _Stream(streams[1])
    left = _Left(surplus)
    found, window = None, _LEAST
    while a.fill() and b.fill():
        size = min(len(a.hashes), len(b.hashes), window)
        parts = np.flatnonzero(a.hashes[:size] != b.hashes[:size])
        step = int(parts[0]) if len(parts) else size
        a.skip(step)
        b.skip(step)
        if not len(parts):
            window = min(2 * window, _MOST)
            continue
        window = _LEAST
        if left.take(a.hashes[0], 1):
            leave_out[0](a.skip(1))
        elif left.take(b.hashes[0], -1):
            leave_out[1](b.skip(1))
        else:
            found = int(a.places[0]), int(b.places[0])
            break
    for stream, sign, leave in ((a, 1, leave_out[0]), (b, -1, leave_out[1])):
        _pass_rest(stream, left, sign, leave)
    return found


class _Stream:
    """Chunks as one run with a front."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self.hashes: Hashes = np.empty(0, np.uint64)
        self.places: OffsetArray = np.empty(0, np.int64)

    def fill(self) -> bool:
        """Whether there is anything more; then the front is here."""
        while not len(self.hashes):
            found = next(self._chunks, None)
            if found is None:
                return False
            self.hashes, self.places = found
        return True

    def skip(self, count: int) -> int:
        """The place at the front, which is passed with `count - 1` others."""
        place = int(self.places[0])
        self.hashes, self.places = self.hashes[count:], self.places[count:]
        return place


class _Left:
    """How many documents more one side still has."""

    def __init__(self, surplus: Surplus) -> None:
        self._hashes, self._more = surplus.hashes, surplus.more.copy()

    def take(self, one: np.uint64, sign: int) -> bool:
        """Whether the side of this sign has one more of this document; it is passed over then."""
        at = int(np.searchsorted(self._hashes, one))
        known = at < len(self._hashes) and self._hashes[at] == one
        if not known or sign * self._more[at] <= 0:
            return False
        self._more[at] -= sign
        return True

    def among(self, hashes: Hashes) -> OffsetArray:
        """Which of these may be taken."""
        return np.flatnonzero(np.isin(hashes, self._hashes[self._more != 0]))


def _pass_rest(stream: _Stream, left: _Left, sign: int, leave: LeaveOut) -> None:
    """Behind the last common place: the first ones that are too many have no partner."""
    while stream.fill():
        for at in left.among(stream.hashes).tolist():
            if left.take(stream.hashes[at], sign):
                leave(int(stream.places[at]))
        stream.skip(len(stream.hashes))
