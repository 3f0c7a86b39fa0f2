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
