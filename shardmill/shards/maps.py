"""Map the small files of a store: indexes, masks, roles.

In: a path and how many entries it must have.  Out: a read-only array on disk.
Promise: a file of another size or header is refused with the way out; nothing is read but headers.
Not here: tokens (the mapped room), contents (verify.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError
from shardmill.records import OffsetArray
from shardmill.shards.layout import INDEX_HEADER_BYTES, index_header

NEXT_STEP = "copy the store again or build it again; `shardmill verify` lists all damage"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatArrays:
    """The chat files of a split, mapped and read-only."""

    mask_bits: npt.NDArray[np.uint8]  # (ceil(tokens / 8),) token p is bit p % 8 of byte p // 8
    turn_starts: OffsetArray  # (turns,) in the token space of the split, never decreasing
    turn_roles: npt.NDArray[np.uint8]  # (turns,) places in ROLES


def map_index(path: Path, entries: int) -> OffsetArray:
    """The int64 of an index file; its header must be exactly the one we write."""
    try:
        with path.open("rb") as file:
            header = file.read(INDEX_HEADER_BYTES)
        if header != index_header(entries):
            raise DamagedStoreError(
                f"{path}: its .npy header is not that of {entries:,} int64; {NEXT_STEP}"
            )
        if entries == 0:  # an empty file part cannot be mapped
            starts = np.empty(0, np.int64)
            starts.flags.writeable = False
            return starts
        mapped = np.memmap(path, "<i8", mode="r", offset=INDEX_HEADER_BYTES, shape=(entries,))
    except (OSError, ValueError) as error:
        if isinstance(error, DamagedStoreError):
            raise
        raise DamagedStoreError(f"{path}: cannot be mapped ({error}); {NEXT_STEP}") from error
    return np.asarray(mapped)


def map_bytes(path: Path, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a file that must have exactly this size."""
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedStoreError(f"{path}: {found:,} bytes, wanted {size:,}; {NEXT_STEP}")
        if size == 0:
            return np.frombuffer(b"", np.uint8)
        mapped = np.memmap(path, np.uint8, mode="r", shape=(size,))
    except (OSError, ValueError) as error:
        if isinstance(error, DamagedStoreError):
            raise
        raise DamagedStoreError(f"{path}: cannot be mapped ({error}); {NEXT_STEP}") from error
    return np.asarray(mapped)
