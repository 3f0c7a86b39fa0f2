"""A packed shard whose bins lie in memory.

In: bins, one after another.  Out: a `PackedShard` over three flat arrays.
Promise: one dtype's width a token and one byte for its mask, not a Python object for each.
Not here: files. For formats that can only be read front to back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from shardmill.interop.packed.records import (
    Alignment,
    LossMask,
    PackedBin,
    check_bin,
    checked_alignment,
)
from shardmill.records import IntArray, OffsetArray, Ragged


class MemoryShard:
    """All bins of an iterator, read once. Without `pack_size` it is that of the longest bin."""

    def __init__(
        self,
        bins: Iterable[PackedBin],
        where: str,
        *,
        pack_size: int | None = None,
        loss_mask_alignment: str = "label",
    ) -> None:
        self.loss_mask_alignment: Alignment = checked_alignment(loss_mask_alignment)
        self._ids, self._masks, self._starts = _flat(bins)
        longest = int(self._ids.lengths.max(initial=1))
        self.pack_size = longest if pack_size is None else pack_size
        self._where = where

    def __len__(self) -> int:
        return len(self._ids)

    def read_bin(self, bin_id: int) -> PackedBin:
        """Bin `bin_id`, as views."""
        if not 0 <= bin_id < len(self):
            raise IndexError(f"bin {bin_id:,} of {len(self):,}")
        first, last = self._ids.offsets[bin_id : bin_id + 2]
        found = PackedBin(
            input_ids=self._ids.values[first:last],
            loss_mask=self._masks[first:last],
            seq_starts=self._starts[bin_id].astype(np.int64, copy=False),
        )
        check_bin(found, self.pack_size, f"{self._where}, bin {bin_id:,}")
        return found

    def close(self) -> None:
        """Nothing is open."""

    def __repr__(self) -> str:
        return f"MemoryShard({self._where!r}, bins={len(self):,})"


def _flat(bins: Iterable[PackedBin]) -> tuple[Ragged, LossMask, Ragged]:
    ids, masks, starts = _Growing(np.int32), _Growing(np.uint8), _Growing(np.int64)
    for found in bins:
        ids.add(found.input_ids)
        masks.add(found.loss_mask)
        starts.add(found.seq_starts)
    return ids.ragged(), masks.ragged().values, starts.ragged()  # type: ignore[return-value]


class _Growing:
    """Arrays behind one another in one that doubles when it is full."""

    def __init__(self, dtype: type[np.integer[Any]]) -> None:
        self._values: IntArray = np.empty(1024, dtype)
        self._lengths: list[int] = []
        self._used = 0

    def add(self, part: IntArray) -> None:
        stop = self._used + len(part)
        if part.dtype != self._values.dtype and not np.can_cast(part.dtype, self._values.dtype):
            most = np.iinfo(self._values.dtype).max
            if len(part) and part.max() > most:
                self._values = self._values.astype(np.int64)
        if stop > len(self._values):
            grown = np.empty(max(stop, 2 * len(self._values)), self._values.dtype)
            grown[: self._used] = self._values[: self._used]
            self._values = grown
        self._values[self._used : stop] = part
        self._lengths.append(len(part))
        self._used = stop

    def ragged(self) -> Ragged:
        lengths: OffsetArray = np.array(self._lengths, np.int64)
        return Ragged.from_lengths(self._values[: self._used], lengths)
