"""Bins, sizes and paths as a caller gives them.

In: whatever a caller passes to a writer.  Out: plain arrays, numbers and paths that can be written.
Promise: what cannot be is refused in the caller's words, before anything is written: ragged lists,
arrays with a mask of their own, ids that do not fit, bins against the invariant, impossible paths.
Not here: the invariant itself (records.py), files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, TokenRangeError
from shardmill.interop.packed.records import bin_problem
from shardmill.records import IntArray

MOST_PACKED = 2**32 - 1
"""No bin is longer: starts are 32 bits wide."""

Arrays = tuple[IntArray, IntArray, IntArray]


def given_pack_size(pack_size: SupportsIndex) -> int:
    """A length that bins can have."""
    size = whole_number(pack_size, "pack_size")
    if size > MOST_PACKED:
        raise OptionError(f"pack_size={size:,}: wanted at most {MOST_PACKED:,}")
    return size


def given_array(part: npt.ArrayLike, name: str, where: str) -> npt.NDArray[Any]:
    """A plain array of what was given, not copied if it is one."""
    if isinstance(part, np.ma.MaskedArray):
        raise OptionError(
            f"{where}: {name} is a numpy masked array, whose mask would be lost; fill it, or leave "
            "out what it hides"
        )
    try:
        return np.asarray(part)
    except (ValueError, TypeError, OverflowError) as error:
        raise OptionError(
            f"{where}: {name} is no array of whole numbers: {error!s:.200}"
        ) from error


def given_bin(
    parts: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    pack_size: int,
    dtype: np.dtype[Any],
    where: str,
) -> Arrays:
    """Ids, mask and starts of one bin that keeps the invariant and fits `dtype`."""
    names = ("input_ids", "loss_mask", "seq_start_id")
    ids, mask, starts = (
        given_array(part, name, where) for part, name in zip(parts, names, strict=True)
    )
    problem = bin_problem(ids, mask, starts, pack_size)
    if problem is not None:
        raise OptionError(f"{where}: {problem}")
    check_ids(ids, dtype, where)
    return ids, mask, starts


def check_ids(ids: IntArray, dtype: np.dtype[Any], where: str) -> None:
    """Refuse ids that are no whole numbers or do not fit: numpy would wrap them without a word."""
    if ids.dtype.kind not in "iu":
        raise OptionError(f"{where}: ids are {ids.dtype}, wanted ints")
    if not ids.size:
        return
    low, high, most = int(ids.min()), int(ids.max()), int(np.iinfo(dtype).max)
    if low < 0 or high > most:
        raise TokenRangeError(
            f"{where}: token id {low if low < 0 else high:,} does not fit {dtype.name}, which "
            f"holds 0 to {most:,}"
        )


def given_path(path: str | Path) -> Path:
    """An absolute path that the file system can be asked about."""
    try:
        found = Path(path).absolute()
        found.resolve().exists()  # raises for names that no file can have, and for loops of links
        return found
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise OptionError(f"{str(path)!r:.300}: no path to write to: {words}") from error
