"""Copy many windows, or many pieces of any length, from one array into another.

One gather and one cast per block of rows; temporary memory stays under `BLOCK_BYTES`. Callers have
checked that every start is inside the array.

A window is read as one opaque item as long as the window, from a view in which item `i` begins at
token `i`: numpy then gathers with one memcpy per window, without an inner loop. Half of the cost
of random windows is waiting for memory, so the first token of every window is loaded before: these
loads do not depend on each other and wait together.

Pieces are copied in chunks: 150 tokens are three chunks of 64, from 0, from 64 and from 86 on. One
copy moves 64 tokens and needs two positions, where token by token it would be 64 copies and 128
positions. Chunks that overlap carry the same values, so their order does not matter. A piece of
less than 64 is copied token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.records import IntArray, OffsetArray, Ragged

BLOCK_BYTES = 256 * 1024
"""The buffer of gathered ids before their cast: small enough for a core's own cache."""

LONG_ROW_BYTES = 16 * 1024
"""For longer rows the second copy costs more than a Python step per row."""

WindowView = npt.NDArray[np.void]


def view_windows(tokens: IntArray, length: int) -> WindowView:
    """Every window of `length` tokens as one item. Shares the memory of `tokens`."""
    shape = (max(0, len(tokens) - length + 1),)
    width = tokens.itemsize
    return np.ndarray(shape, f"V{length * width}", buffer=tokens, strides=(width,))


def is_long(tokens: IntArray, length: int) -> bool:
    return length * tokens.itemsize >= LONG_ROW_BYTES


def copy_long(tokens: IntArray, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
    """`out[i] = tokens[starts[i] : starts[i] + out.shape[1]]`, cast: for few long rows."""
    length = out.shape[1]
    for row, start in enumerate(starts.tolist()):
        out[row] = tokens[start : start + length]


def copy_viewed(
    tokens: IntArray, windows: WindowView, starts: OffsetArray, out: npt.NDArray[Any]
) -> None:
    """The same for many short rows; `windows` is `view_windows(tokens, out.shape[1])`."""
    step = BLOCK_BYTES // windows.itemsize
    if len(starts) > step:
        for row in range(0, len(starts), step):
            copy_viewed(tokens, windows, starts[row : row + step], out[row : row + step])
        return
    tokens[starts]  # only to load them into the cache, see above
    out[...] = windows[starts].view(tokens.dtype).reshape(out.shape)


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
            ends = np.cumsum(counts)
            offset = np.arange(ends[-1])
            offset -= np.repeat(ends - counts, counts)
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


ReadChunks: TypeAlias = Callable[[OffsetArray, int], npt.NDArray[Any]]
"""`read(starts, size)` gives (n, size): the values from each start on, as `take` does."""


def lay_pieces(
    columns: Ragged,
    lengths: OffsetArray,
    *copies: tuple[ReadChunks, OffsetArray, npt.NDArray[Any]],
) -> OffsetArray:
    """Copy pieces of examples into packed rows. The one place where packed rows are filled.

    `columns` holds for each row the columns at which its pieces begin; piece `i`, counted over all
    rows, has `lengths[i]` tokens. Each copy is (how to read, where the pieces begin there, the rows
    to fill); rows are contiguous and of the dtype that is read. What no piece covers stays as it
    is. Returns where pieces begin in the rows end to end.
    """
    row = np.repeat(np.arange(len(columns)), columns.lengths)
    chunks = cut_chunks(lengths)
    targets = columns.values.astype(np.int64)
    for read, starts, rows in copies:
        targets = row * rows.shape[1] + columns.values
        for part in chunks:
            put(read(part.at(starts), part.size), rows.reshape(-1), part.at(targets))
    return targets
