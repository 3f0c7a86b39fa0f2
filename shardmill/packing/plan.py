"""What every packer returns: pieces, the rows they share, and how good that is.

In: pieces and the row of each.  Out: `PackPlan`, with `PackMetrics`.
Promise: a plan is a partition of its pieces; no row is over capacity; the numbers of the metrics
sum up to the tokens that came in.
Not here: choosing rows (best_fit, first_fit, pack); reading tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmill.packing.assignment import BinAssignment
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
