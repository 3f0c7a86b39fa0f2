"""Check bins, sizes and paths as a caller gives them, before anything is written.

Refused in the caller's words: ragged lists, masked arrays, ids that do not fit, bins that break the
invariant of records.py, impossible paths, and URLs where a local path is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import refuse_url, whole_number
from shardmill.errors import OptionError, TokenRangeError
from shardmill.interop.packed.records import bin_problem, without_end
from shardmill.records import IntArray

MOST_PACKED = 2**32 - 1
"""No bin is longer: starts are 32 bits wide."""

WRITE_INSTEAD = (
    "shardmill.remote.process_chat_sft_pack_from_spool_core packs a spool to a file system"
)
"""What can be done for a file at a URL."""

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
    """Ids, mask and starts of one bin that keeps the invariant and fits `dtype`.

    A last start at the end of the bin, an empty sequence, is left out.
    """
    names = ("input_ids", "loss_mask", "seq_start_id")
    ids, mask, starts = (
        given_array(part, name, where) for part, name in zip(parts, names, strict=True)
    )
    starts = without_end(starts, len(ids) if ids.ndim else 0)
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


def given_path(path: str | Path, what: str, *, instead: str) -> Path:
    """An absolute local path to write to. `what` and `instead` as in `refuse_url`."""
    refuse_url(path, what, instead=instead)
    try:
        found = Path(path).absolute()
        found.resolve().exists()  # raises for names that no file can have, and for loops of links
        return found
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise OptionError(f"{str(path)!r:.300}: no path to write to: {words}") from error


def path_to_read(path: str | Path, what: str = "path") -> Path:
    """A local path to read from; a URL is refused."""
    refuse_url(path, what, instead="copy the folder with shardmill.remote.pull, or the file, first")
    return Path(path)
