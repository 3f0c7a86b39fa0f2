"""Many pieces of any length, copied by chunks of one.

In: lengths of pieces.  Out: chunks, each of one piece; later their values, put where they belong.
Promise: the chunks of a piece cover it exactly; two that overlap carry the same values there, so
they may be put in any order. No loop over pieces.
Not here: where pieces come from and go to.

A piece of 150 tokens is three chunks of 64: from 0, from 64 and from 86 on. One copy moves 64
tokens and needs two positions, where token by token it would be 64 copies and 128 positions.
A piece of less than 64 is copied token by token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardmill.mapped.rows import view_windows
from shardmill.records import IntArray, OffsetArray

CHUNK = 64


class Chunks(NamedTuple):
    """Parts of pieces, all of one size."""

    size: int
    piece: OffsetArray  # (n,) which piece
    offset: OffsetArray  # (n,) where in it

    def at(self, starts: OffsetArray) -> OffsetArray:
        """Where these chunks begin, when pieces begin at `starts`."""
        return starts[self.piece] + self.offset


def cut_chunks(lengths: OffsetArray) -> list[Chunks]:
    """All pieces as chunks, of at most two sizes."""
    long = lengths >= CHUNK
    found = []
    for size, chosen in ((CHUNK, np.flatnonzero(long)), (1, np.flatnonzero(~long))):
        if len(chosen):
            own = lengths[chosen]
            counts = -(-own // size)
            behind = np.cumsum(counts)
            offset = np.arange(behind[-1])
            offset -= np.repeat(behind - counts, counts)
            offset *= size
            np.minimum(offset, np.repeat(own - size, counts), out=offset)
            found.append(Chunks(size, np.repeat(chosen, counts), offset))
    return found


def take(values: npt.NDArray[Any], starts: OffsetArray, size: int) -> npt.NDArray[Any]:
    """(n, size): the values from each start on. Starts were checked."""
    if size == 1:
        return values[starts, None]
    return view_windows(values, size)[starts].view(values.dtype).reshape(-1, size)


def put(chunks: npt.NDArray[Any], out: IntArray | npt.NDArray[Any], starts: OffsetArray) -> None:
    """`out[starts[i] : starts[i] + size]` becomes `chunks[i]`, for all of them."""
    size = chunks.shape[1]
    if size == 1:
        out[starts] = chunks[:, 0]
        return
    windows = view_windows(out, size)
    windows[starts] = np.ascontiguousarray(chunks).view(windows.dtype)[:, 0]
