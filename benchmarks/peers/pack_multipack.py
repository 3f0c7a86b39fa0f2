"""Multipack's way: first fit, longest first, in numba, a group of sequences at a time.

Written here after the published description (groups of 100,000 sequences, at most 200 in a row,
rows looked at one after the other), with flat arrays, which is quicker than lists of lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from peers.packers import Numbers, Rows, rows_of_items

GROUP, MOST_PER_ROW = 100_000, 200


@njit
def first_fit(sizes: Any, order: Any, capacity: int, row_of: Any) -> int:
    """Fills in the row of each item; how many rows there are."""
    rooms = np.empty(len(sizes), dtype=np.int64)
    held = np.empty(len(sizes), dtype=np.int64)
    num_rows = 0
    for item in order:
        row = 0
        while row < num_rows and (rooms[row] < sizes[item] or held[row] == MOST_PER_ROW):
            row += 1
        if row == num_rows:
            rooms[row], held[row] = capacity, 0
            num_rows += 1
        rooms[row] -= sizes[item]
        held[row] += 1
        row_of[item] = row
    return num_rows


def prepare(lengths: Numbers, _capacity: int) -> Numbers:
    return lengths


def pack(lengths: Numbers, capacity: int) -> Numbers:
    row_of = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0
    for start in range(0, len(lengths), GROUP):
        sizes, rows = lengths[start : start + GROUP], row_of[start : start + GROUP]
        opened = first_fit(sizes, np.argsort(sizes)[::-1], capacity, rows)
        rows += num_rows
        num_rows += opened
    return row_of


def rows(row_of: Numbers, _lengths: Numbers) -> Rows:
    return rows_of_items(row_of)
