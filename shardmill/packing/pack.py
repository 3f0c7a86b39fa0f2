"""The packers: lengths to a plan of which examples share a row.

In: the length of each example and the capacity of a row.  Out: a `PackPlan`.
Promise: same input, same plan, on every machine; every token is in one row, or the metrics say
what became of it; rows are numbered as the algorithm opens them, and hold their pieces in the
order of the examples. No time depends on rows times examples.
Not here: tokens, padding, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.packing.assignment import BinAssignment
from shardmill.packing.best_fit import best_fit
from shardmill.packing.falling import Falling, RowNumbers, falling
from shardmill.packing.first_fit import first_fit, first_fit_falling
from shardmill.packing.pieces import Long, checked_lengths, cut_long
from shardmill.packing.plan import PackPlan, aligned, metrics_of
from shardmill.packing.shuffled import shuffled
from shardmill.records import IntArray

MOST_TOKENS = 2**62
"""Beyond this sums would no longer fit 64 bits."""

Place = Callable[[IntArray, int, int | None], RowNumbers]
"""Sizes, capacity, max_per_row -> the row of each item."""


def best_fit_decreasing(
    lengths: npt.ArrayLike,
    capacity: SupportsIndex,
    *,
    max_per_row: SupportsIndex | None = None,
    align_to: SupportsIndex = 1,
    long: Long = "error",
) -> PackPlan:
    """Longest first, each into the fullest row that takes it; ties: the lower number."""
    return _plan(lengths, capacity, _decreasing(best_fit), max_per_row, align_to, long)


def first_fit_decreasing(
    lengths: npt.ArrayLike,
    capacity: SupportsIndex,
    *,
    max_per_row: SupportsIndex | None = None,
    align_to: SupportsIndex = 1,
    long: Long = "error",
) -> PackPlan:
    """Longest first, each into the first row that takes it; ties: the lower number."""
    return _plan(lengths, capacity, _decreasing(first_fit_falling), max_per_row, align_to, long)


def first_fit_shuffle(
    lengths: npt.ArrayLike,
    capacity: SupportsIndex,
    *,
    seed: int,
    max_per_row: SupportsIndex | None = None,
    align_to: SupportsIndex = 1,
    long: Long = "error",
) -> PackPlan:
    """In an order that the seed decides, each into the first row that takes it: rows mix long and
    short examples, at the price of a little more padding."""
    seed = whole_number(seed, "seed", least=0)

    def place(sizes: IntArray, room: int, limit: int | None) -> RowNumbers:
        order = shuffled(len(sizes), seed)
        rows = np.empty(len(sizes), dtype=np.int32)
        rows[order] = first_fit(sizes[order], room, limit)
        return rows

    return _plan(lengths, capacity, place, max_per_row, align_to, long)


def concatenate(
    lengths: npt.ArrayLike,
    capacity: SupportsIndex,
    *,
    max_per_row: SupportsIndex | None = None,
    align_to: SupportsIndex = 1,
    long: Long = "error",
) -> PackPlan:
    """In the order given; a row ends where the next one does not fit."""
    return _plan(lengths, capacity, _next_fit, max_per_row, align_to, long)


PACKERS: Mapping[str, Callable[..., PackPlan]] = {
    "best-fit": best_fit_decreasing,
    "first-fit": first_fit_decreasing,
    "first-fit-shuffle": first_fit_shuffle,  # the one that needs a seed
    "concatenate": concatenate,
}
"""By the names that commands and files know them by."""


def _plan(
    lengths: npt.ArrayLike,
    capacity: SupportsIndex,
    place: Place,
    max_per_row: SupportsIndex | None,
    align_to: SupportsIndex,
    long: Long,
) -> PackPlan:
    found = checked_lengths(lengths)
    room, step = whole_number(capacity, "capacity"), whole_number(align_to, "align_to")
    limit = None if max_per_row is None else whole_number(max_per_row, "max_per_row")
    if room % step:
        raise OptionError(
            f"capacity={room:,} is no multiple of align_to={step:,}: the last piece of a row could "
            f"not be rounded up; take {room // step * step or step:,}"
        )
    if float(found.sum(dtype=np.float64)) + room >= MOST_TOKENS:
        raise OptionError(
            f"capacity={room:,} and {len(found):,} examples: more than {MOST_TOKENS:,} tokens in "
            "all, which no data has; check the lengths"
        )
    pieces = cut_long(found, room, long)
    sizes = aligned(pieces.lengths, step)
    bound = max(
        -(-int(sizes.sum(dtype=np.int64)) // room), -(-len(pieces) // limit) if limit else 0
    )
    row_of = place(sizes, room, limit)
    del sizes  # what follows needs the most memory
    rows = BinAssignment.from_rows(row_of)
    metrics = metrics_of(found, pieces, rows, room, bound)
    return PackPlan(rows=rows, pieces=pieces, align_to=step, metrics=metrics)


def _decreasing(place: Callable[[Falling, int, int | None], RowNumbers]) -> Place:
    def of_sizes(sizes: IntArray, room: int, limit: int | None) -> RowNumbers:
        groups = falling(sizes)
        rows = np.empty(len(sizes), dtype=np.int32)
        rows[groups.order] = place(groups, room, limit)
        return rows

    return of_sizes


def _next_fit(sizes: IntArray, room: int, limit: int | None) -> RowNumbers:
    """Every item knows which item opens the row after it; only rows are walked one by one."""
    ends = np.cumsum(sizes, dtype=np.int64)
    behind = np.searchsorted(ends, ends - sizes + room, side="right")
    if limit is not None:
        behind = np.minimum(behind, np.arange(limit, len(sizes) + limit))
    opens = np.zeros(len(sizes), dtype=np.int32)
    item = 0
    while item < len(behind):
        opens[item] = 1
        item = int(behind[item])
    return np.cumsum(opens, dtype=np.int32) - np.int32(1)
