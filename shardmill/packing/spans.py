"""Items of falling sizes go into rows that are counted, not looked at one by one.

In: groups of equal sizes, falling, and a way to choose among open rows.  Out: the row number of
every item, in the order of the groups.
Promise: rows are numbered as they are opened; work is per span that takes something, never per row
or item, and every span that is asked takes at least one item.
Not here: which row is chosen (best_fit, first_fit); sorting, cutting, alignment (plan). Sizes are
1..capacity.

A span is some rows next to each other that took the same so far: they have equal room and hold
equally many items. Of equal items each row of a span takes as many as it can before the next row
takes one, so a span falls into at most three: rows that took all they could, one row that took the
last items, rows that took none.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np

from shardmill.packing.falling import Falling, RowNumbers

Span: TypeAlias = tuple[int, int, int, int]
"""Rows start..stop, the room that each of them has, the items that each of them holds."""

_MANY = 2**18  # numbers kept as Python's own, which are large


class OpenRows(Protocol):
    """Spans that can take more. A rule of choice is which one is given out."""

    def put(self, span: Span) -> None: ...

    def take(self, size: int) -> Span | None:
        """The span whose first row takes the next item; it is out. None: no row has room.

        `size` is never larger than before.
        """


def place_groups(
    groups: Falling, capacity: int, max_per_row: int | None, rows: OpenRows
) -> RowNumbers:
    """(n,) for the items of `groups.order`: which row takes each."""
    limit = max_per_row or capacity
    least = groups.sizes[-1] if groups.sizes else 1  # rows with less room are done
    placed = _Placed(len(groups.order))
    spans, take, put = placed.spans, rows.take, rows.put  # looked up once: the loop is all there is
    num_rows = 0
    for size, count in zip(groups.sizes, groups.counts, strict=True):
        left = count
        while left:
            span = take(size)
            if span is None:
                opened = -(-left // min(capacity // size, limit))
                span = (num_rows, num_rows + opened, capacity, 0)
                num_rows += opened
            start, stop, room, held = span
            each = room // size
            if each > limit - held:
                each = limit - held
            whole = left // each  # rows that take all they can
            if whole > stop - start:
                whole = stop - start
            if whole:
                spans += (start, whole, each)
                left -= whole * each
                if room - each * size >= least and held + each < limit:
                    put((start, start + whole, room - each * size, held + each))
                start += whole
            if start < stop:
                if left:  # too little for another whole row
                    spans += (start, 1, left)
                    if room - left * size >= least:
                        put((start, start + 1, room - left * size, held + left))
                    left = 0
                    start += 1
                if start < stop:
                    put((start, stop, room, held))
        placed.write(_MANY)
    placed.write()
    return placed.row_of


class _Placed:
    """The row of each item, written from spans when there are many."""

    def __init__(self, num_items: int) -> None:
        self.row_of = np.empty(num_items, dtype=np.int32)
        self.num_written = 0
        self.spans: list[int] = []  # not written yet: first row, number of rows, items each

    def write(self, at_least: int = 0) -> None:
        """Nothing, when there are fewer than so many numbers to write."""
        if len(self.spans) < at_least:
            return
        # [[5 2 2] [2 1 3]] -> rows [5 6 2] -> items [5 5 6 6 2 2 2]
        first, num_rows, each = np.array(self.spans, dtype=np.int64).reshape(-1, 3).T
        rows = np.repeat((first - np.cumsum(num_rows) + num_rows).astype(np.int32), num_rows)
        rows += np.arange(len(rows), dtype=np.int32)
        items = np.repeat(rows, np.repeat(each, num_rows))
        self.row_of[self.num_written : self.num_written + len(items)] = items
        self.num_written += len(items)
        self.spans.clear()
