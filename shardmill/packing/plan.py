"""What every packer returns: pieces, the rows they share, and how good that is.

A plan is a partition of its pieces, no row is over capacity, and the numbers of the metrics sum up
to the tokens that came in.

Which items lie in which row, as two flat arrays (CSR).

Every item is in one row. Ours are in rising order within a row; those of a caller, which are
checked, in the caller's order.

Examples become pieces that fit into a row.

In: lengths and a rule for those over capacity.  Out: `Pieces`, and an account of what was done.
Promise: pieces come by example and start; a token is in at most one piece; every token that is in
none is counted. An example without tokens gives no piece.
Not here: which pieces share a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.records import IntArray, OffsetArray


@dataclass(frozen=True, slots=True, eq=False)
class BinAssignment:
    """Bin `i` holds the items `indices[offsets[i]:offsets[i + 1]]`. A bin is a row's content."""

    offsets: OffsetArray  # (num_bins + 1,) int64, from 0
    indices: IntArray  # (num_items,) int32 when that is enough, else int64

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
        """Lists of items, each item 0..num_items - 1 once, in the order given.

        Without `num_items` there are as many as the lists hold.
        """
        lists = [_items(items, number) for number, items in enumerate(bins)]
        offsets = np.concatenate(([0], np.cumsum([len(items) for items in lists]))).astype(np.int64)
        indices = np.concatenate(lists) if lists else np.empty(0, dtype=np.int64)
        _check_partition(indices, len(indices) if num_items is None else num_items)
        return cls(offsets, indices.astype(index_dtype(len(indices))))

    @classmethod
    def from_rows(cls, row_of: IntArray) -> BinAssignment:
        """(n,) the row of each item, numbered from 0 without gaps."""
        num_rows = int(row_of.max()) + 1 if len(row_of) else 0
        offsets = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row_of, minlength=num_rows), out=offsets[1:])
        # sorted by 16 bits at a time, the low ones first: such keys are sorted by radix
        indices = _order(row_of.astype(np.uint16))
        for shift in range(16, (num_rows - 1).bit_length(), 16):
            indices = indices[_order((row_of >> shift).astype(np.uint16)[indices])]
        return cls(offsets, indices)


def _order(keys: npt.NDArray[np.uint16]) -> IntArray:
    """What sorts them, equals in the order they are in."""
    return np.argsort(keys, kind="stable").astype(index_dtype(len(keys)), copy=False)


def index_dtype(count: int) -> type[np.int32 | np.int64]:
    """The smaller integer that counts so far."""
    return np.int32 if count <= 2**31 else np.int64


def _items(items: Sequence[int], number: int) -> OffsetArray:
    """The items of bin `number`, as they were given: nothing is rounded."""
    try:
        found = np.asarray(items)
    except ValueError:  # lists of several lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise OptionError(f"bin {number:,}: {items!r:.100}, wanted the numbers of its items")
    return found.astype(np.int64, copy=False)


def _check_partition(indices: OffsetArray, num_items: int) -> None:
    outside = (indices < 0) | (indices >= num_items)
    if outside.any():
        raise OptionError(
            f"Sequence index out of range: {int(indices[outside][0])}, wanted 0..{num_items - 1}"
        )
    counts = np.bincount(indices, minlength=num_items)
    if (counts != 1).any():
        item = int(np.flatnonzero(counts != 1)[0])
        raise OptionError(f"item {item} is in {counts[item]} bins: wanted each item once")


Long: TypeAlias = Literal["error", "truncate", "split", "drop"]
"""What becomes of an example over capacity: refused, cut at its end, cut into pieces, left out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Piece `i` is `start[i]..stop[i]` of the tokens of `example[i]`."""

    example: IntArray  # (n,) int32 when that is enough, else int64; never falls
    start: IntArray  # (n,) all 0 unless examples are split
    stop: IntArray  # (n,)
    long: OffsetArray  # numbers of the examples over capacity, whatever became of them

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


def cut_long(lengths: OffsetArray, capacity: int, rule: Long) -> Pieces:
    """The pieces of all examples."""
    if rule not in get_args(Long):
        raise OptionError(f"long={rule!r}: wanted one of {', '.join(get_args(Long))}")
    long = np.flatnonzero(lengths > capacity)
    if len(long) and rule == "error":
        raise OptionError(
            f"example {long[0]}: {lengths[long[0]]:,} tokens, but a row holds {capacity:,} "
            f"({len(long):,} examples are too long): long='split' keeps all tokens, 'truncate' "
            "cuts off their ends, 'drop' leaves them out"
        )
    if rule == "split" and len(long):
        return _split(lengths, capacity, long)
    example = _numbers(lengths, without=long if rule == "drop" else None)
    kept = lengths if len(example) == len(lengths) else lengths[example]
    most = min(capacity, int(kept.max(initial=0)))
    cut = np.minimum(kept, most) if len(long) else kept
    stop: IntArray = cut.astype(index_dtype(most + 1))
    return Pieces(example=example, start=np.zeros_like(stop), stop=stop, long=long)


def _numbers(lengths: OffsetArray, *, without: OffsetArray | None) -> IntArray:
    """Of the examples that have tokens."""
    number = index_dtype(len(lengths))
    kept = lengths > 0
    if without is not None:
        kept[without] = False
    if kept.all():
        return np.arange(len(lengths), dtype=number)
    return np.flatnonzero(kept).astype(number, copy=False)


def _split(lengths: OffsetArray, capacity: int, long: OffsetArray) -> Pieces:
    counts = (lengths > 0).astype(np.int64)  # pieces of each example
    counts[long] = -(-lengths[long] // capacity)
    narrow = index_dtype(int(lengths.max()) + 1)  # a plan is mostly such numbers
    numbers: IntArray = np.arange(len(lengths), dtype=index_dtype(len(lengths)))
    example = np.repeat(numbers, counts)
    stop = np.repeat(lengths.astype(narrow, copy=False), counts)
    start = np.zeros_like(stop)
    # only pieces of long examples start or stop elsewhere: which ones they are, and where
    several = counts[long]
    nth = np.arange(several.sum()) - np.repeat(np.cumsum(several) - several, several)
    piece = np.repeat(np.cumsum(counts)[long] - several, several) + nth
    start[piece] = nth * capacity
    stop[piece] = start[piece] + np.minimum(stop[piece] - start[piece], capacity)
    return Pieces(example=example, start=start, stop=stop, long=long)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackMetrics:
    """How well the rows are filled. `num_tokens + truncated_tokens + dropped_tokens` came in."""

    capacity: int
    num_rows: int
    lower_bound: int  # no plan of these pieces has less rows
    num_examples: int
    num_empty: int  # examples without tokens: they have no piece
    num_items: int  # pieces
    num_tokens: int  # in rows
    num_split: int
    num_truncated: int
    truncated_tokens: int
    num_dropped: int
    dropped_tokens: int

    @property
    def padding(self) -> int:
        """Places of rows without a token, those for alignment included."""
        return self.num_rows * self.capacity - self.num_tokens

    @property
    def utilisation(self) -> float:
        """Tokens for each place of a row, 0 to 1; 1 when there are no rows."""
        places = self.num_rows * self.capacity
        return self.num_tokens / places if places else 1.0


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
    """Lengths rounded up, wide enough for that."""
    if align_to == 1:
        return lengths
    return -(-lengths.astype(np.int64, copy=False) // align_to) * align_to


def plan_of_bins(bins: BinAssignment, lengths: OffsetArray, capacity: int) -> PackPlan:
    """The plan of bins that somebody else chose, each example in one bin.

    The examples of a bin follow one another. What goes over `capacity` is cut: the end of the
    example that crosses it, and the examples after that one. A bin without tokens has no row.
    """
    order = bins.indices.astype(np.int64)
    sizes = lengths[order]
    ends = np.concatenate(([0], np.cumsum(sizes)))
    counts = np.diff(bins.offsets)
    start = ends[:-1] - np.repeat(ends[bins.offsets[:-1]], counts)  # in the bin, before any cut
    kept = np.clip(capacity - start, 0, sizes)
    cut, gone = (kept > 0) & (kept < sizes), (kept == 0) & (sizes > 0)
    used = kept > 0
    row_counts = np.bincount(np.repeat(np.arange(len(counts)), counts)[used], minlength=len(counts))
    offsets = np.concatenate(([0], np.cumsum(row_counts[row_counts > 0])))
    by_example = np.argsort(order[used], kind="stable")
    number = index_dtype(len(lengths))
    indices = np.empty(len(by_example), number)
    indices[by_example] = np.arange(len(by_example))
    stop = kept[used][by_example]
    num_tokens = int(stop.sum())
    return PackPlan(
        rows=BinAssignment(offsets.astype(np.int64), indices),
        pieces=Pieces(
            example=order[used][by_example].astype(number),
            start=np.zeros_like(stop),
            stop=stop,
            long=np.flatnonzero(lengths > capacity),
        ),
        align_to=1,
        metrics=PackMetrics(
            capacity=capacity,
            num_rows=len(offsets) - 1,
            lower_bound=-(-num_tokens // capacity),
            num_examples=len(lengths),
            num_empty=int(np.count_nonzero(lengths == 0)),
            num_items=len(stop),
            num_tokens=num_tokens,
            num_split=0,
            num_truncated=int(np.count_nonzero(cut)),
            truncated_tokens=int((sizes - kept)[cut].sum()),
            num_dropped=int(np.count_nonzero(gone)),
            dropped_tokens=int(sizes[gone].sum()),
        ),
    )


def metrics_of(
    lengths: OffsetArray, pieces: Pieces, rows: BinAssignment, capacity: int, lower_bound: int
) -> PackMetrics:
    """The account of a plan. What became of long examples is read off the pieces."""
    long = pieces.long.astype(pieces.example.dtype)  # searched for as it is: no wider copy
    left, right = (np.searchsorted(pieces.example, long, side) for side in ("left", "right"))
    kept = right - left  # pieces of each long one
    truncated, dropped = pieces.long[kept == 1], pieces.long[kept == 0]
    return PackMetrics(
        capacity=capacity,
        num_rows=rows.num_bins,
        lower_bound=lower_bound,
        num_examples=len(lengths),
        num_empty=int(np.count_nonzero(lengths == 0)),
        num_items=len(pieces),
        num_tokens=int(pieces.lengths.sum(dtype=np.int64)),
        num_split=int(np.count_nonzero(kept > 1)),
        num_truncated=len(truncated),
        truncated_tokens=int((lengths[truncated] - capacity).sum()),
        num_dropped=len(dropped),
        dropped_tokens=int(lengths[dropped].sum()),
    )
