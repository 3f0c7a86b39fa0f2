"""The packers: from the length of each example to a plan of which examples share a row.

Same lengths, same plan, on every machine. Rows are numbered as the algorithm opens them and hold
their pieces in the order of the examples. The decreasing packers place groups of equal length at
once, because equals are interchangeable: a million examples take less than 0.1 s.

To add a packer, write a function like `concatenate` and add it to `PACKERS`.
"""

from __future__ import annotations

import hashlib
import inspect
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Literal, SupportsIndex, TypeAlias, TypedDict, Unpack

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
    cut_examples,
    metrics_of,
)
from shardmill.records import IntArray, OffsetArray

RowNumbers = npt.NDArray[np.int32]
Place = Callable[[IntArray, int, int | None], RowNumbers]
"""Sizes (each 1..capacity), capacity, max_per_row -> the row of each item."""

MAX_TOKENS = 2**62
"""Larger sums might overflow 64 bits."""


class PackOptions(TypedDict, total=False):
    """What every packer takes besides lengths and capacity."""

    max_per_row: SupportsIndex | None  # pieces in a row; None, the default: no limit
    align_to: SupportsIndex  # every piece starts at a multiple of it; 1 by default
    long: Long  # examples over capacity; "error" by default


def best_fit_decreasing(
    lengths: npt.ArrayLike, capacity: SupportsIndex, **options: Unpack[PackOptions]
) -> PackPlan:
    """Longest first, each into the fullest row that has room; ties go to the lower number."""
    return _plan(lengths, capacity, partial(_place_decreasing, FullestFirst), **options)


def first_fit_decreasing(
    lengths: npt.ArrayLike, capacity: SupportsIndex, **options: Unpack[PackOptions]
) -> PackPlan:
    """Longest first, each into the first row that has room; ties go to the lower number."""
    return _plan(lengths, capacity, partial(_place_decreasing, OldestFirst), **options)


def first_fit_shuffle(
    lengths: npt.ArrayLike,
    capacity: SupportsIndex,
    *,
    seed: int,
    **options: Unpack[PackOptions],
) -> PackPlan:
    """In an order chosen by the seed, each into the first row that has room.

    Rows mix long and short examples, at the price of a little more padding.
    """
    seed = whole_number(seed, "seed", least=0)

    def place(sizes: IntArray, room: int, limit: int | None) -> RowNumbers:
        order = shuffled(len(sizes), seed)
        rows = np.empty(len(sizes), dtype=np.int32)
        rows[order] = first_fit(sizes[order], room, limit)
        return rows

    return _plan(lengths, capacity, place, **options)


def concatenate(
    lengths: npt.ArrayLike, capacity: SupportsIndex, **options: Unpack[PackOptions]
) -> PackPlan:
    """In the order given; a row ends where the next example does not fit."""
    return _plan(lengths, capacity, next_fit, **options)


Algorithm: TypeAlias = Literal["best-fit", "first-fit", "first-fit-shuffle", "concatenate"]
"""The names that options and stored plans use."""

PACKERS: dict[str, Callable[..., PackPlan]] = {
    "best-fit": best_fit_decreasing,
    "first-fit": first_fit_decreasing,
    "first-fit-shuffle": first_fit_shuffle,
    "concatenate": concatenate,
}
"""Name -> packer: the only registry. A packer with a parameter `seed` needs one."""


def takes_seed(algorithm: str) -> bool:
    return "seed" in inspect.signature(PACKERS[algorithm]).parameters


def packer_named(algorithm: str, seed: int | None = None) -> Callable[..., PackPlan]:
    """The packer of that name, with its seed bound; OptionError if it needs none, or needs one."""
    if algorithm not in PACKERS:
        raise OptionError(f"{{algorithm}}: wanted one of {', '.join(PACKERS)}", algorithm=algorithm)
    if takes_seed(algorithm) != (seed is not None):
        needs = "needs a seed" if seed is None else "takes no seed: it shuffles nothing"
        raise OptionError(f"{{algorithm}} {needs}", algorithm=algorithm)
    return PACKERS[algorithm] if seed is None else partial(PACKERS[algorithm], seed=seed)


def _plan(
    lengths: npt.ArrayLike,
    capacity: SupportsIndex,
    place: Place,
    *,
    max_per_row: SupportsIndex | None = None,
    align_to: SupportsIndex = 1,
    long: Long = "error",
) -> PackPlan:
    found = checked_lengths(lengths)
    room, step = whole_number(capacity, "capacity"), whole_number(align_to, "align_to")
    limit = None if max_per_row is None else whole_number(max_per_row, "max_per_row")
    if room % step:
        raise OptionError(
            "{capacity} is not a multiple of {align_to}: the last piece of a row could not be "
            f"rounded up; use {room // step * step or step:,}",
            capacity=room,
            align_to=step,
        )
    if float(found.sum(dtype=np.float64)) + room >= MAX_TOKENS:
        raise OptionError(
            f"{{capacity}} and {len(found):,} examples: more than {MAX_TOKENS:,} tokens in all, "
            "which no real data has; check the lengths",
            capacity=room,
        )
    pieces = cut_examples(found, room, long)
    sizes = aligned(pieces.lengths, step)
    bound = max(
        -(-int(sizes.sum(dtype=np.int64)) // room), -(-len(pieces) // limit) if limit else 0
    )
    row_of = place(sizes, room, limit)
    del sizes  # what follows needs the most memory
    rows = BinAssignment.from_rows(row_of)
    metrics = metrics_of(found, pieces, len(rows), room, bound)
    return PackPlan(rows=rows, pieces=pieces, align_to=step, metrics=metrics)


# The decreasing packers. A span is a run of consecutive rows that took the same so far: they have
# equal room and hold equally many items. A row that takes an item of size s takes the next one too
# until it has no room left: in first fit it is still the first, in best fit it has become the
# fullest. So each row of a span takes as many as it can before the next one takes any, and a span
# falls into at most three: rows that took all they could, one row that took the last items, and
# rows that took none. Work is per span, never per row or item.
#
# The rule of a packer is which of the spans with room left it gives out: `take` removes the span
# whose first row takes the next item, or returns None if none has room. Sizes never increase from
# one call to the next.

Span: TypeAlias = tuple[int, int, int, int]
"""Rows start..stop, the room that each has left, the items that each holds."""

_FLUSH = 2**18  # spans are kept as Python integers, which are large; write them out now and then


class FullestFirst:
    """Best fit gives out the span with the least sufficient room, the oldest among equals."""

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = {}  # room -> heap, the oldest rows first
        self._rooms: list[int] = []  # its keys, ascending

    def put(self, span: Span) -> None:
        room = span[2]
        if room in self._spans:
            heappush(self._spans[room], span)
        else:
            self._spans[room] = [span]
            insort(self._rooms, room)

    def take(self, size: int) -> Span | None:
        at = bisect_left(self._rooms, size)
        if at == len(self._rooms):
            return None
        room = self._rooms[at]
        spans = self._spans[room]
        if len(spans) > 1:
            return heappop(spans)
        del self._rooms[at], self._spans[room]
        return spans[0]


class OldestFirst:
    """First fit gives out the oldest span with enough room."""

    def __init__(self) -> None:
        self._fitting: list[Span] = []  # heap, the oldest rows first
        self._waiting: list[tuple[int, Span]] = []  # too little room yet; heap by negative room

    def put(self, span: Span) -> None:
        heappush(self._waiting, (-span[2], span))

    def take(self, size: int) -> Span | None:
        while self._waiting and -self._waiting[0][0] >= size:
            heappush(self._fitting, heappop(self._waiting)[1])
        return heappop(self._fitting) if self._fitting else None


def _place_decreasing(
    rule: type[FullestFirst | OldestFirst], sizes: IntArray, capacity: int, max_per_row: int | None
) -> RowNumbers:
    """The row of each item, largest items first; equal sizes in the order of their numbers."""
    if not len(sizes):
        return np.empty(0, np.int32)
    largest = int(sizes.max())
    # 16-bit keys are sorted by radix, which is several times faster.
    keys: IntArray = sizes.astype(np.uint16 if largest < 2**16 else np.int64)
    np.subtract(largest, keys, out=keys)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    group_counts = np.diff(starts, append=len(ordered)).tolist()
    group_sizes = (largest - ordered[starts].astype(np.int64)).tolist()
    rows = np.empty(len(sizes), dtype=np.int32)
    rows[order] = _place_groups(rule(), group_sizes, group_counts, capacity, max_per_row)
    return rows


def _place_groups(
    open_rows: FullestFirst | OldestFirst,
    group_sizes: list[int],
    group_counts: list[int],
    capacity: int,
    max_per_row: int | None,
) -> RowNumbers:
    """The row of each item, for groups of equal size, largest first."""
    limit = max_per_row or capacity
    smallest = group_sizes[-1]  # a row with less room is finished
    row_of = np.empty(sum(group_counts), dtype=np.int32)
    num_written = 0
    spans: list[int] = []  # not yet in `row_of`: first row, number of rows, items in each
    take, put = open_rows.take, open_rows.put  # looked up once: this loop is the whole cost
    num_rows = 0
    for size, count in zip(group_sizes, group_counts, strict=True):
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
                if room - each * size >= smallest and held + each < limit:
                    put((start, start + whole, room - each * size, held + each))
                start += whole
            if start < stop:
                if left:  # too few for another whole row
                    spans += (start, 1, left)
                    if room - left * size >= smallest:
                        put((start, start + 1, room - left * size, held + left))
                    left = 0
                    start += 1
                if start < stop:
                    put((start, stop, room, held))
        if len(spans) >= _FLUSH:
            num_written = _write_spans(spans, row_of, num_written)
    _write_spans(spans, row_of, num_written)
    return row_of


def _write_spans(spans: list[int], row_of: RowNumbers, num_written: int) -> int:
    """Write the rows of the items in `spans`, empty it, and return how many items are written."""
    # [[5 2 2] [2 1 3]] -> rows [5 6 2] -> items [5 5 6 6 2 2 2]
    first, num_rows, each = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    rows = np.repeat((first - np.cumsum(num_rows) + num_rows).astype(np.int32), num_rows)
    rows += np.arange(len(rows), dtype=np.int32)
    items = np.repeat(rows, np.repeat(each, num_rows))
    row_of[num_written : num_written + len(items)] = items
    spans.clear()
    return num_written + len(items)


def first_fit(sizes: IntArray, capacity: int, max_per_row: int | None) -> RowNumbers:
    """The row of each item, in the order given: the first with room. O(log rows) for each item.

    Each node of a binary tree over the rows holds the most room of any row below it (0 for a row
    that may take no more items), so a walk down from the root finds the first row with room.
    """
    num_leaves = 1
    tree = [0, capacity]  # node k has children 2k and 2k + 1; the root is node 1
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
    """The tree with twice as many leaves, the new ones empty rows."""
    level = tree[num_leaves:] + [capacity] * num_leaves
    levels = [level]
    while len(level) > 1:
        level = [max(pair) for pair in zip(level[::2], level[1::2], strict=True)]
        levels.append(level)
    return [0, *(node for level in reversed(levels) for node in level)], 2 * num_leaves


def next_fit(sizes: IntArray, capacity: int, max_per_row: int | None) -> RowNumbers:
    """The row of each item, in the order given: the last row, or a new one."""
    ends = np.cumsum(sizes, dtype=np.int64)
    # For every item, if it opened a row: the item that opens the next one. Only rows are walked.
    next_opener = np.searchsorted(ends, ends - sizes + capacity, side="right")
    if max_per_row is not None:
        next_opener = np.minimum(next_opener, np.arange(max_per_row, len(sizes) + max_per_row))
    opens = np.zeros(len(sizes), dtype=np.int32)
    item = 0
    while item < len(sizes):
        opens[item] = 1
        item = int(next_opener[item])
    return np.cumsum(opens, dtype=np.int32) - np.int32(1)


def shuffled(num_items: int, seed: int) -> OffsetArray:
    """0..num_items - 1 sorted by a hash of (seed, number): splitmix64 from a start derived from
    the seed.

    Integer arithmetic only, so the order is the same on every machine and with every version of
    numpy, whose generators make no such promise.
    """
    digest = hashlib.sha256(f"packing shuffle {seed}".encode()).digest()
    start = np.uint64(int.from_bytes(digest[:8], "little"))
    keys = np.arange(1, num_items + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable")
