"""Pack plans: which pieces of which examples share a row, as flat arrays.

A plan is a partition: every piece is in exactly one row, and no row is over capacity. Its metrics
count every token that came in, including those that were cut off or left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.records import IntArray, OffsetArray

Long: TypeAlias = Literal["error", "truncate", "split", "drop"]
"""Examples over capacity: refuse them, cut off their ends, cut them into pieces, leave them out."""


@dataclass(frozen=True, slots=True, eq=False)
class BinAssignment:
    """Bin `i`, the content of a row, holds the items `indices[offsets[i]:offsets[i + 1]]`."""

    offsets: OffsetArray  # (num_bins + 1,) int64, from 0
    indices: IntArray  # (num_items,) int32 if that is wide enough, else int64

    @property
    def num_bins(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_items(self) -> int:
        return len(self.indices)

    def bin_indices(self, bin_id: int) -> IntArray:
        """The items of one bin, as a view."""
        if not 0 <= bin_id < self.num_bins:
            raise IndexError(f"bin_id out of range: {bin_id} of {self.num_bins:,} bins")
        return self.indices[self.offsets[bin_id] : self.offsets[bin_id + 1]]

    def __len__(self) -> int:
        return self.num_bins

    @classmethod
    def from_bins(
        cls, bins: Iterable[Sequence[int]], num_items: int | None = None
    ) -> BinAssignment:
        """Lists of items, each of 0..num_items - 1 exactly once, in the order given.

        Without `num_items` there are as many items as the lists hold.
        """
        lists = [_checked_items(items, number) for number, items in enumerate(bins)]
        offsets = np.concatenate(([0], np.cumsum([len(items) for items in lists]))).astype(np.int64)
        indices = np.concatenate(lists) if lists else np.empty(0, dtype=np.int64)
        num_items = len(indices) if num_items is None else num_items
        outside = (indices < 0) | (indices >= num_items)
        if outside.any():
            raise OptionError(
                f"Sequence index out of range: {indices[outside][0]}, wanted 0..{num_items - 1}"
            )
        counts = np.bincount(indices, minlength=num_items)
        if (counts != 1).any():
            item = int(np.flatnonzero(counts != 1)[0])
            raise OptionError(f"item {item} is in {counts[item]} bins: wanted each item once")
        return cls(offsets, indices.astype(_index_dtype(len(indices))))

    @classmethod
    def from_rows(cls, row_of: IntArray) -> BinAssignment:
        """From the row of each item, numbered from 0 without gaps. Items ascend within a row."""
        num_rows = int(row_of.max()) + 1 if len(row_of) else 0
        offsets = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row_of, minlength=num_rows), out=offsets[1:])
        # Sort by 16 bits at a time, low bits first: numpy sorts 16-bit keys by radix.
        dtype = _index_dtype(len(row_of))
        indices: IntArray = np.argsort(row_of.astype(np.uint16), kind="stable").astype(dtype)
        for shift in range(16, (num_rows - 1).bit_length(), 16):
            keys = (row_of >> shift).astype(np.uint16)[indices]
            indices = indices[np.argsort(keys, kind="stable").astype(dtype, copy=False)]
        return cls(offsets, indices)


def _index_dtype(count: int) -> type[np.int32 | np.int64]:
    """The smaller dtype that can index `count` items."""
    return np.int32 if count <= 2**31 else np.int64


def _checked_items(items: Sequence[int], number: int) -> OffsetArray:
    """The items of bin `number`. Floats are refused, not rounded."""
    try:
        found = np.asarray(items)
    except ValueError:  # nested lists of different lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise OptionError(f"bin {number:,}: {items!r:.100}, wanted the numbers of its items")
    return found.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Piece `i` is tokens `start[i]..stop[i]` of `example[i]`. Ordered by example and start."""

    example: IntArray  # (n,) int32 if that is wide enough, else int64; never decreases
    start: IntArray  # (n,) all 0 unless examples are split
    stop: IntArray  # (n,)
    long: OffsetArray  # the examples that are not one whole piece: split, truncated or left out

    def __len__(self) -> int:
        return len(self.example)

    @property
    def lengths(self) -> IntArray:
        return self.stop - self.start


def checked_lengths(lengths: npt.ArrayLike) -> OffsetArray:
    """One whole number of at least 0 for each example, as int64."""
    found = np.asarray(lengths)
    if not found.size:
        return np.empty(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise OptionError(
            f"lengths of shape {found.shape} and dtype {found.dtype}: wanted one whole number for "
            "each example"
        )
    wrong = found < 0 if found.dtype.kind == "i" else found > 2**63 - 1
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise OptionError(f"example {at}: {found[at]} tokens, wanted 0 to 2**63 - 1")
    return found.astype(np.int64, copy=False)


def cut_examples(lengths: OffsetArray, capacity: int, long: Long, *, overlap: int = 0) -> Pieces:
    """Cut examples into pieces of at most `capacity` tokens. An empty example gives no piece.

    Pieces of a split example share `overlap` tokens with the next. With an overlap of 1 every pair
    of neighbouring tokens is in exactly one piece, so no label is lost at a cut.
    """
    if long not in get_args(Long):
        raise OptionError(f"{{long}}: wanted one of {', '.join(get_args(Long))}", long=long)
    too_long = np.flatnonzero(lengths > capacity)
    if len(too_long) and long == "error":
        first = int(too_long[0])
        raise OptionError(
            f"example {first:,}: {lengths[first]:,} tokens, but a row holds {capacity:,} "
            f"({len(too_long):,} of {len(lengths):,} examples are too long): {{long}} keeps all "
            "tokens, 'truncate' cuts off the ends, 'drop' leaves these examples out",
            long="split",
        )
    if len(too_long) and long == "split":
        return _split_examples(lengths, capacity, too_long, overlap)
    kept = lengths > 0
    if long == "drop":
        kept[too_long] = False
    example: IntArray = np.flatnonzero(kept).astype(_index_dtype(len(lengths)), copy=False)
    sizes = lengths if len(example) == len(lengths) else lengths[example]
    most = min(capacity, int(sizes.max(initial=0)))
    stop: IntArray = np.minimum(sizes, most).astype(_index_dtype(most + 1))
    return Pieces(example=example, start=np.zeros_like(stop), stop=stop, long=too_long)


def _split_examples(
    lengths: OffsetArray, capacity: int, too_long: OffsetArray, overlap: int
) -> Pieces:
    # capacity 4, 8 tokens: 0..4, 4..8 without overlap; 0..4, 3..7, 6..8 with an overlap of 1.
    step = capacity - overlap
    counts = (lengths > 0).astype(np.int64)  # pieces of each example
    counts[too_long] = -(-(lengths[too_long] - overlap) // step)
    numbers: IntArray = np.arange(len(lengths), dtype=_index_dtype(len(lengths)))
    # Plans of millions of examples are mostly these three arrays, so they are kept narrow.
    narrow = _index_dtype(int(lengths.max()) + 1)
    example = np.repeat(numbers, counts)
    stop = np.repeat(lengths.astype(narrow, copy=False), counts)
    start = np.zeros_like(stop)
    several = counts[too_long]
    nth = np.arange(several.sum()) - np.repeat(np.cumsum(several) - several, several)
    piece = np.repeat(np.cumsum(counts)[too_long] - several, several) + nth
    start[piece] = nth * step
    stop[piece] = start[piece] + np.minimum(stop[piece] - start[piece], capacity)
    return Pieces(example=example, start=start, stop=stop, long=too_long)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackMetrics:
    """How full the rows are. `num_tokens + truncated_tokens + dropped_tokens` is the input."""

    capacity: int
    num_rows: int
    lower_bound: int  # no plan of these pieces has fewer rows
    num_examples: int
    num_empty: int  # examples without tokens, which have no piece
    num_items: int  # pieces
    num_tokens: int  # in rows
    num_split: int
    num_truncated: int
    truncated_tokens: int
    num_dropped: int
    dropped_tokens: int

    @property
    def padding(self) -> int:
        """Positions of rows that hold no token, alignment gaps included."""
        return self.num_rows * self.capacity - self.num_tokens

    @property
    def utilisation(self) -> float:
        """Share of row positions that hold a token; 1 if there are no rows."""
        positions = self.num_rows * self.capacity
        return self.num_tokens / positions if positions else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackPlan:
    """Row `i` holds the pieces `rows.bin_indices(i)`, in that order."""

    rows: BinAssignment  # of pieces
    pieces: Pieces
    align_to: int  # every piece starts at a multiple of it
    metrics: PackMetrics

    def __len__(self) -> int:
        return self.rows.num_bins

    def positions(self) -> IntArray:
        """(num_items,) where in its row each piece starts, in the order of `rows.indices`."""
        sizes = aligned(self.pieces.lengths[self.rows.indices], self.align_to)
        before = np.cumsum(sizes, dtype=np.int64) - sizes
        firsts = self.rows.offsets[:-1]
        return before - np.repeat(before[firsts], np.diff(self.rows.offsets))


def aligned(lengths: IntArray, align_to: int) -> IntArray:
    """Lengths rounded up to a multiple of `align_to`."""
    if align_to == 1:
        return lengths
    return -(-lengths.astype(np.int64, copy=False) // align_to) * align_to


def plan_of_bins(bins: BinAssignment, lengths: OffsetArray, capacity: int) -> PackPlan:
    """A plan from bins chosen elsewhere, with each example in one bin.

    The examples of a bin follow one another. Tokens over `capacity` are cut off: the end of the
    example that crosses it and all examples after that. A bin without tokens gives no row.
    """
    order = bins.indices.astype(np.int64)
    sizes = lengths[order]
    ends = np.concatenate(([0], np.cumsum(sizes)))
    counts = np.diff(bins.offsets)
    start = ends[:-1] - np.repeat(ends[bins.offsets[:-1]], counts)  # in the bin, before any cut
    kept = np.clip(capacity - start, 0, sizes)
    used = kept > 0
    row_counts = np.bincount(np.repeat(np.arange(len(counts)), counts)[used], minlength=len(counts))
    offsets = np.concatenate(([0], np.cumsum(row_counts[row_counts > 0]))).astype(np.int64)
    by_example = np.argsort(order[used], kind="stable")
    dtype = _index_dtype(len(lengths))
    indices = np.empty(len(by_example), dtype)
    indices[by_example] = np.arange(len(by_example))
    stop = kept[used][by_example]
    pieces = Pieces(
        example=order[used][by_example].astype(dtype),
        start=np.zeros_like(stop),
        stop=stop,
        long=np.sort(order[kept < sizes]),
    )
    bound = -(-int(stop.sum()) // capacity)
    metrics = metrics_of(lengths, pieces, len(offsets) - 1, capacity, bound)
    rows = BinAssignment(offsets, indices)
    return PackPlan(rows=rows, pieces=pieces, align_to=1, metrics=metrics)


def metrics_of(
    lengths: OffsetArray, pieces: Pieces, num_rows: int, capacity: int, lower_bound: int
) -> PackMetrics:
    """Count what happened to every example. Only `pieces.long` is looked at one by one."""
    long = pieces.long.astype(pieces.example.dtype)  # same dtype: searchsorted copies nothing
    left, right = (np.searchsorted(pieces.example, long, side) for side in ("left", "right"))
    kept = right - left  # pieces of each long example
    truncated, dropped = pieces.long[kept == 1], pieces.long[kept == 0]
    return PackMetrics(
        capacity=capacity,
        num_rows=num_rows,
        lower_bound=lower_bound,
        num_examples=len(lengths),
        num_empty=int(np.count_nonzero(lengths == 0)),
        num_items=len(pieces),
        num_tokens=int(pieces.lengths.sum(dtype=np.int64)),
        num_split=int(np.count_nonzero(kept > 1)),
        num_truncated=len(truncated),
        truncated_tokens=int((lengths[truncated] - pieces.stop[left[kept == 1]]).sum()),
        num_dropped=len(dropped),
        dropped_tokens=int(lengths[dropped].sum()),
    )
