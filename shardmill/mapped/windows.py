"""A token space cut into windows for training.

In: a `TokenSpace` and `seq_len`.  Out: windows of `seq_len + 1` tokens, many at a time.
Promise: window `i` begins at token `i * seq_len`, so neighbours share one token and every
transition from a token to the next is in exactly one window. Tokens that do not fill a last window
are in none: fewer than `seq_len + 1` at the end, or all of a short space.
Not here: order, documents, the shift into inputs and targets.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.mapped.space import TokenSpace, as_positions, first_outside
from shardmill.records import IntArray, OffsetArray


class Windows:
    """Every whole window of a space: a read-only sequence without a state."""

    def __init__(self, space: TokenSpace, *, seq_len: int) -> None:
        self.space = space
        self.seq_len = whole_number(seq_len, "seq_len")

    def __len__(self) -> int:
        return max(0, (self.space.num_tokens - 1) // self.seq_len)

    def gather(self, indices: npt.ArrayLike, out: npt.NDArray[Any] | None = None) -> IntArray:
        """The windows of these numbers, (n, seq_len + 1); `out` as in `TokenSpace.gather`."""
        return self.space.gather_unchecked(self._starts(indices), self.seq_len + 1, out)

    def gather_unchecked(self, indices: OffsetArray) -> IntArray:
        """`gather` for callers who know that all are int64 and below `len(self)`."""
        return self.space.gather_unchecked(indices * self.seq_len, self.seq_len + 1)

    def prefetch(self, indices: npt.ArrayLike) -> None:
        """Ask the kernel to read these windows ahead; see `TokenSpace.prefetch`."""
        self.space.prefetch(self._starts(indices), self.seq_len + 1)

    def __repr__(self) -> str:
        return f"Windows({self.space!r}, seq_len={self.seq_len:,}, windows={len(self):,})"

    def _starts(self, indices: npt.ArrayLike) -> OffsetArray:
        array = as_positions(indices)
        row = first_outside(array, len(self) - 1)
        if row is not None:
            raise IndexError(f"window {array[row]:,} of {len(self):,}")
        return array * self.seq_len
