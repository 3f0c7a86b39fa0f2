"""Copy many windows of one token array into the rows of another.

In: tokens, starts, rows of the final dtype.  Out: nothing; the rows are filled.
Promise: one gather and one cast per block of rows; temporary memory under `BLOCK_BYTES`.
Not here: bounds. Starts were checked; memory is mapped.

A window is read as one opaque item as long as the window, from a view in which item `i` begins at
token `i`: numpy then gathers with one memcpy a window, without a loop of its own over a second
axis. Half of the cost of random windows is waiting for memory, so the first token of every window
is asked for before: these loads do not depend on each other and wait together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.records import IntArray, OffsetArray

BLOCK_BYTES = 256 * 1024
"""Gathered ids wait here for their cast: small enough for a core's own cache."""

LONG_ROW_BYTES = 16 * 1024
"""From here on the second copy costs more than a Python step per row."""

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
    tokens[starts]  # the values are not needed, see above
    out[...] = windows[starts].view(tokens.dtype).reshape(out.shape)
