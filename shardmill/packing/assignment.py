"""Which items lie in which row, as two flat arrays (CSR).

Every item is in one row. Ours are in rising order within a row; those of a caller, which are
checked, in the caller's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.records import IntArray, OffsetArray


@dataclass(frozen=True, slots=True, eq=False)
class BinAssignment:
    """Bin `i` holds the items `indices[offsets[i]:offsets[i + 1]]`. A bin is a row's content."""

    offsets: OffsetArray  # (num_bins + 1,) int64, from 0
    indices: IntArray  # (num_items,) int32 when that is enough, else int64

    @property
    def num_bins(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_items(self) -> int:
        return len(self.indices)

    def bin_indices(self, bin_id: int) -> IntArray:
        """The items of one bin, as a view."""
        if not 0 <= bin_id < self.num_bins:
            raise IndexError(f"bin_id out of range: {bin_id} of {self.num_bins:,} bins")
        return self.indices[self.offsets[bin_id] : self.offsets[bin_id + 1]]

    def __len__(self) -> int:
        return self.num_bins

    @classmethod
    def from_bins(
        cls, bins: Iterable[Sequence[int]], num_items: int | None = None
    ) -> BinAssignment:
        """Lists of items, each item 0..num_items - 1 once, in the order given.

        Without `num_items` there are as many as the lists hold.
        """
        lists = [_items(items, number) for number, items in enumerate(bins)]
        offsets = np.concatenate(([0], np.cumsum([len(items) for items in lists]))).astype(np.int64)
        indices = np.concatenate(lists) if lists else np.empty(0, dtype=np.int64)
        _check_partition(indices, len(indices) if num_items is None else num_items)
        return cls(offsets, indices.astype(index_dtype(len(indices))))

    @classmethod
    def from_rows(cls, row_of: IntArray) -> BinAssignment:
        """(n,) the row of each item, numbered from 0 without gaps."""
        num_rows = int(row_of.max()) + 1 if len(row_of) else 0
        offsets = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row_of, minlength=num_rows), out=offsets[1:])
        # sorted by 16 bits at a time, the low ones first: such keys are sorted by radix
        indices = _order(row_of.astype(np.uint16))
        for shift in range(16, (num_rows - 1).bit_length(), 16):
            indices = indices[_order((row_of >> shift).astype(np.uint16)[indices])]
        return cls(offsets, indices)


def _order(keys: npt.NDArray[np.uint16]) -> IntArray:
    """What sorts them, equals in the order they are in."""
    return np.argsort(keys, kind="stable").astype(index_dtype(len(keys)), copy=False)


def index_dtype(count: int) -> type[np.int32 | np.int64]:
    """The smaller integer that counts so far."""
    return np.int32 if count <= 2**31 else np.int64


def _items(items: Sequence[int], number: int) -> OffsetArray:
    """The items of bin `number`, as they were given: nothing is rounded."""
    try:
        found = np.asarray(items)
    except ValueError:  # lists of several lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise OptionError(f"bin {number:,}: {items!r:.100}, wanted the numbers of its items")
    return found.astype(np.int64, copy=False)


def _check_partition(indices: OffsetArray, num_items: int) -> None:
    outside = (indices < 0) | (indices >= num_items)
    if outside.any():
        raise OptionError(
            f"Sequence index out of range: {int(indices[outside][0])}, wanted 0..{num_items - 1}"
        )
    counts = np.bincount(indices, minlength=num_items)
    if (counts != 1).any():
        item = int(np.flatnonzero(counts != 1)[0])
        raise OptionError(f"item {item} is in {counts[item]} bins: wanted each item once")
