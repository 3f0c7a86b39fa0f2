"""The packers: lengths to a plan of which examples share a row.

In: the length of each example and the capacity of a row.  Out: a `PackPlan`.
Promise: same input, same plan, on every machine; every token is in one row, or the metrics say
what became of it; rows are numbered as the algorithm opens them, and hold their pieces in the
order of the examples. No time depends on rows times examples.
Not here: tokens, padding, files.

Best fit, largest first: each item goes to the fullest row that still takes it.

In: groups of equal sizes, falling.  Out: the row number of every item, in that order.
Promise: exactly the textbook's rows, numbered as they are opened; among equally full rows the one
opened first.
Not here: what a row takes (spans).

Why groups work: of the rows with the least sufficient room r, the first takes an item of size s,
has then room r - s, less than any other, and so takes the next, until it has taken r // s of them.

First fit: each item goes to the first row that still takes it.

In: sizes, in falling groups or in any order.  Out: the row number of every item, in that order.
Promise: exactly the textbook's rows, numbered as they are opened. Falling groups are placed a span
of rows at a time; any order costs O(log rows) an item.
Not here: what a row takes of a group (spans); sorting, cutting, alignment (plan). Sizes are
1..capacity.

Why groups work: the first row with room for an item of size s takes the next one too, until it has
taken room // s of them; then the next such row does.

Sizes in falling order, as groups of equals.

In: sizes.  Out: their order and, for each distinct size, how many have it.
Promise: larger first; equal sizes in the order of their numbers.
Not here: where anything goes. The decreasing packers work on groups: equals are interchangeable,
so one step can place a thousand of them.

An order of items that a seed decides, in whole-number arithmetic.

In: a count and a seed.  Out: the numbers 0..n - 1 in another order.
Promise: the same on every machine and with every version of numpy, whose generators make no such
promise. Orders of two seeds have nothing in common.
Not here: orders without an array of them (sampling).

Items of falling sizes go into rows that are counted, not looked at one by one.

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

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.packing.plan import (
    BinAssignment,
    Long,
    PackPlan,
    aligned,
    checked_lengths,
    cut_long,
    metrics_of,
)
from shardmill.records import IntArray, OffsetArray

RowNumbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Falling:
    """Item numbers by falling size, with the groups they fall into."""

    order: IntArray  # (n,) item numbers
    sizes: list[int]  # of each group, falling
    counts: list[int]  # items of each group


def falling(sizes: IntArray) -> Falling:
    if not len(sizes):
        return Falling(np.empty(0, np.int64), [], [])
    largest = int(sizes.max())
    # 16-bit keys are sorted by radix: several times quicker
    keys: IntArray = sizes.astype(np.uint16 if largest < 2**16 else np.int64)
    np.subtract(largest, keys, out=keys)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    counts = np.diff(starts, append=len(ordered))
    return Falling(order, (largest - ordered[starts].astype(np.int64)).tolist(), counts.tolist())


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
