"""What every packer returns: pieces, the rows they share, and how good that is.

A plan is a partition of its pieces, no row is over capacity, and the numbers of the metrics sum up
to the tokens that came in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmill.packing.assignment import BinAssignment, index_dtype
from shardmill.packing.pieces import Pieces
from shardmill.records import IntArray, OffsetArray


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
