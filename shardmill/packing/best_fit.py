"""Best fit, largest first: each item goes to the fullest row that still takes it.

In: groups of equal sizes, falling.  Out: the row number of every item, in that order.
Promise: exactly the textbook's rows, numbered as they are opened; among equally full rows the one
opened first. Work is per (size, room), not per item, and no row is looked at in vain.
Not here: sorting, cutting, alignment (plan). Sizes are 1..capacity.

Why groups work: of the rows with the least sufficient room r, the first takes an item of size s,
has then room r - s, less than any other, and so takes the next, until it has taken r // s of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from shardmill.packing.falling import Falling, RowNumbers


def best_fit(groups: Falling, capacity: int, max_per_row: int | None) -> RowNumbers:
    """(n,) for the items of `groups.order`: which row takes each."""
    placed = np.empty(len(groups.order), dtype=np.int32)
    rooms = _Rooms(groups, max_per_row)
    num_rows = position = 0
    for size, count in zip(groups.sizes, groups.counts, strict=True):
        stop = position + count
        while position < stop:
            left = stop - position
            room, rows = rooms.take(size)
            if rows is None:
                room, each = capacity, min(capacity // size, max_per_row or capacity)
                rows = np.arange(num_rows, num_rows + -(-left // each), dtype=np.int32)
                num_rows += len(rows)
            into = rooms.fill(rows, room, size, left)
            placed[position : position + len(into)] = into
            position += len(into)
    return placed


class _Rooms:
    """Open rows by the room they have left."""

    def __init__(self, groups: Falling, max_per_row: int | None) -> None:
        self._least = groups.sizes[-1] if groups.sizes else 1  # rows with less room are done
        self._rows: dict[int, list[RowNumbers]] = {}
        self._in_use: list[int] = []  # its keys, rising
        self._limit = max_per_row
        self._held = np.zeros(len(groups.order) if max_per_row else 0, dtype=np.int32)

    def take(self, size: int) -> tuple[int, RowNumbers | None]:
        """The least room of at least `size` and all rows that have it, rising; they are out."""
        at = bisect_left(self._in_use, size)
        if at == len(self._in_use):
            return 0, None
        room = self._in_use.pop(at)
        parts = self._rows.pop(room)
        return room, parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))

    def fill(self, rows: RowNumbers, room: int, size: int, left: int) -> RowNumbers:
        """Up to `left` items into rows of one room, which are in again: the row of each placed."""
        if self._limit is not None:
            return self._fill_limited(rows, room, size, left)
        each = room // size
        whole, rest = divmod(left, each)  # rows that take `each`, and what one more takes
        self._put(room - each * size, rows[:whole])
        if whole >= len(rows):
            return np.repeat(rows, each)
        if rest:
            self._put(room - rest * size, rows[whole : whole + 1])
        self._put(room, rows[whole + (rest > 0) :])
        return np.repeat(rows[: whole + 1], each)[:left]

    def _fill_limited(self, rows: RowNumbers, room: int, size: int, left: int) -> RowNumbers:
        assert self._limit is not None
        each = room // size
        takes = np.minimum(each, self._limit - self._held[rows[:left]])  # at least 1 each
        total = np.cumsum(takes)
        num_used = min(int(np.searchsorted(total, left)) + 1, len(takes))
        used, takes = rows[:num_used], takes[:num_used]
        over = max(int(total[num_used - 1]) - left, 0)
        takes[-1] -= over
        self._held[used] += takes
        still_open = self._held[used] < self._limit
        still_open[-1] &= not over
        self._put(room - each * size, used[still_open])
        if over:
            self._put(room - int(takes[-1]) * size, used[-1:])
        self._put(room, rows[num_used:])
        return np.repeat(used, takes)

    def _put(self, room: int, rows: RowNumbers) -> None:
        if room < self._least or not len(rows):
            return
        if room in self._rows:
            self._rows[room].append(rows)
        else:
            self._rows[room] = [rows]
            insort(self._in_use, room)
