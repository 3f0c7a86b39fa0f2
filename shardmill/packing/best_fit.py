"""Best fit, largest first: each item goes to the fullest row that still takes it.

In: groups of equal sizes, falling.  Out: the row number of every item, in that order.
Promise: exactly the textbook's rows, numbered as they are opened; among equally full rows the one
opened first.
Not here: what a row takes (spans).

Why groups work: of the rows with the least sufficient room r, the first takes an item of size s,
has then room r - s, less than any other, and so takes the next, until it has taken r // s of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush

from shardmill.packing.falling import Falling, RowNumbers
from shardmill.packing.spans import Span, place_groups


def best_fit(groups: Falling, capacity: int, max_per_row: int | None) -> RowNumbers:
    """(n,) for the items of `groups.order`: which row takes each."""
    return place_groups(groups, capacity, max_per_row, _ByRoom())


class _ByRoom:
    """Open spans by the room of their rows; the least sufficient one is given out."""

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = {}  # heaps: the first rows come first
        self._in_use: list[int] = []  # its keys, rising

    def put(self, span: Span) -> None:
        room = span[2]
        if room in self._spans:
            heappush(self._spans[room], span)
        else:
            self._spans[room] = [span]
            insort(self._in_use, room)

    def take(self, size: int) -> Span | None:
        at = bisect_left(self._in_use, size)
        if at == len(self._in_use):
            return None
        room = self._in_use[at]
        spans = self._spans[room]
        if len(spans) > 1:
            return heappop(spans)
        del self._in_use[at], self._spans[room]
        return spans[0]
