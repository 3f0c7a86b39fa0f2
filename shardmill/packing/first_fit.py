"""First fit: each item goes to the first row that still takes it.

In: sizes, in falling groups or in any order.  Out: the row number of every item, in that order.
Promise: exactly the textbook's rows, numbered as they are opened. Falling groups are placed a span
of rows at a time; any order costs O(log rows) an item.
Not here: what a row takes of a group (spans); sorting, cutting, alignment (plan). Sizes are
1..capacity.

Why groups work: the first row with room for an item of size s takes the next one too, until it has
taken room // s of them; then the next such row does.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from shardmill.packing.falling import Falling, RowNumbers
from shardmill.packing.spans import Span, place_groups
from shardmill.records import IntArray


def first_fit_falling(groups: Falling, capacity: int, max_per_row: int | None) -> RowNumbers:
    """(n,) for the items of `groups.order`: which row takes each."""
    return place_groups(groups, capacity, max_per_row, _InOrder())


class _InOrder:
    """Open spans: those with room for the size at hand, and those that wait for smaller ones."""

    def __init__(self) -> None:
        self._fitting: list[Span] = []  # heap: the first rows come first
        self._waiting: list[tuple[int, Span]] = []  # heap by room, negative: the most comes first

    def put(self, span: Span) -> None:
        heappush(self._waiting, (-span[2], span))

    def take(self, size: int) -> Span | None:
        while self._waiting and -self._waiting[0][0] >= size:
            heappush(self._fitting, heappop(self._waiting)[1])
        return heappop(self._fitting) if self._fitting else None


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
