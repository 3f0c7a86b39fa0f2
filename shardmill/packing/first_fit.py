"""First fit: each item goes to the first row that still takes it.

In: sizes, in falling groups or in any order.  Out: the row number of every item, in that order.
Promise: exactly the textbook's rows, numbered as they are opened. Falling groups are placed a
group at a time, O(n log n) in all; any order costs O(log rows) an item.
Not here: sorting, cutting, alignment (plan). Sizes are 1..capacity.

Why groups work: the first row with room for an item of size s takes the next one too, until it has
taken room // s of them; then the next such row does. So of all rows with room for s, in order,
some first ones are filled, and the rest stays as it is.
"""

from __future__ import annotations

import numpy as np

from shardmill.packing.falling import Falling, RowNumbers
from shardmill.packing.runs import Keys, SortedRuns
from shardmill.records import IntArray


def first_fit_falling(groups: Falling, capacity: int, max_per_row: int | None) -> RowNumbers:
    """(n,) for the items of `groups.order`: which row takes each."""
    placed = np.empty(len(groups.order), dtype=np.int32)
    rows = _OpenRows(groups, capacity, max_per_row or capacity)
    position = 0
    for size, count in zip(groups.sizes, groups.counts, strict=True):
        stop = position + count
        while position < stop:  # twice at most: rows that have room, then new ones
            into = rows.fill(size, stop - position)
            placed[position : position + len(into)] = into
            position += len(into)
    return placed


class _OpenRows:
    """Rows that can take more: those with room for the size at hand, and those that wait."""

    def __init__(self, groups: Falling, capacity: int, limit: int) -> None:
        self._capacity = capacity
        self._limit = limit
        self._least = groups.sizes[-1] if groups.sizes else 1  # rows with less room are done
        self._room = np.full(len(groups.order), capacity, dtype=np.int64)  # of each row, as opened
        self._free = np.full(len(groups.order), limit, dtype=np.int64)  # items it may still take
        self._num_rows = 0
        self._fitting = SortedRuns()  # numbers of rows with room for the size at hand
        self._waiting = SortedRuns()  # rows with less: (capacity - room) << 32 | number

    def fill(self, size: int, left: int) -> Keys:
        """Up to `left` items of a size, never larger than before: the row of each one placed."""
        through = ((self._capacity - size) << 32) | 0xFFFFFFFF
        self._fitting.add(np.sort(self._waiting.take_through(through) & 0xFFFFFFFF))
        rows = self._fitting.smallest(left)
        if not len(rows):
            each = min(self._capacity // size, self._limit)
            rows = np.arange(self._num_rows, self._num_rows + -(-left // each), dtype=np.int64)
            self._num_rows += len(rows)
            self._fitting.add(rows)
        takes = np.minimum(self._room[rows] // size, self._free[rows])  # at least 1 each
        total = np.cumsum(takes)
        num_used = min(int(np.searchsorted(total, left)) + 1, len(rows))
        used, takes = rows[:num_used], takes[:num_used]
        takes[-1] -= max(int(total[num_used - 1]) - left, 0)
        self._move(used, takes, size)
        return np.repeat(used, takes)

    def _move(self, used: Keys, takes: Keys, size: int) -> None:
        """Book what the rows took: they wait, are done, or, the last one only, fit again."""
        self._fitting.take_through(int(used[-1]))
        self._room[used] -= takes * size
        self._free[used] -= takes
        room = self._room[used]
        opened = (self._free[used] > 0) & (room >= self._least)
        fits = opened & (room >= size)
        self._fitting.add(used[fits])
        waits = opened & ~fits
        self._waiting.add(np.sort(((self._capacity - room[waits]) << 32) | used[waits]))


def first_fit(sizes: IntArray, capacity: int, max_per_row: int | None) -> RowNumbers:
    """(n,) which row takes each item, in the order given.

    A binary tree over the rows holds in each node the most room of any row below it (0 for a row
    that may take no more items), so that the first row with room is found from the root down.
    """
    num_leaves = 1
    tree = [0, capacity]  # from place 1 on: node k has children 2k and 2k + 1
    limit = max_per_row or capacity
    held: list[int] = []
    placed = []
    for size in sizes.tolist():
        if tree[1] < size:
            tree, num_leaves = _grown(tree, num_leaves, capacity)
        node = 1
        while node < num_leaves:
            node *= 2
            if tree[node] < size:
                node += 1
        row = node - num_leaves
        if row == len(held):
            held.append(0)
        held[row] += 1
        placed.append(row)
        tree[node] = tree[node] - size if held[row] < limit else 0
        while node > 1:
            node //= 2
            most = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == most:
                break
            tree[node] = most
    return np.array(placed, dtype=np.int32)


def _grown(tree: list[int], num_leaves: int, capacity: int) -> tuple[list[int], int]:
    """The same rows and as many new ones."""
    level = tree[num_leaves:] + [capacity] * num_leaves
    levels = [level]
    while len(level) > 1:
        level = [max(pair) for pair in zip(level[::2], level[1::2], strict=True)]
        levels.append(level)
    return [0, *(node for level in reversed(levels) for node in level)], 2 * num_leaves
