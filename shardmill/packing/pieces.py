"""Examples become pieces that fit into a row.

In: lengths and a rule for those over capacity.  Out: `Pieces`, and an account of what was done.
Promise: pieces come by example and start; a token is in at most one piece; every token that is in
none is counted. An example without tokens gives no piece.
Not here: which pieces share a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.packing.assignment import index_dtype
from shardmill.records import IntArray, OffsetArray

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
    kept = lengths > 0
    if rule == "drop":
        kept[long] = False
    example = np.flatnonzero(kept)
    stop = np.minimum(lengths[example], capacity)
    return _narrow(example, np.zeros_like(stop), stop, long)


def _split(lengths: OffsetArray, capacity: int, long: OffsetArray) -> Pieces:
    counts = -(-lengths // capacity)
    example = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts  # the number of each example's first piece
    start = (np.arange(len(example)) - first[example]) * capacity
    stop = np.minimum(start + capacity, lengths[example])
    return _narrow(example, start, stop, long)


def _narrow(
    example: OffsetArray, start: OffsetArray, stop: OffsetArray, long: OffsetArray
) -> Pieces:
    """Numbers as narrow as they can be: a plan of many examples is mostly these."""
    number = index_dtype(int(example[-1]) + 1 if len(example) else 0)
    position = index_dtype(int(stop.max(initial=0)) + 1)
    return Pieces(
        example=example.astype(number, copy=False),
        start=start.astype(position, copy=False),
        stop=stop.astype(position, copy=False),
        long=long,
    )
