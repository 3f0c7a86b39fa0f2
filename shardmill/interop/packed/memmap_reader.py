"""Read a memmap_padded_v1 shard, bin by bin, in any order.

In: the folder of a finished shard.  Out: `PackedBin`s that are views of the mapped files.
Promise: opening reads the manifest and five headers, whatever the size; a bin costs what it holds;
every bin is checked against the invariant as it is read; a copy that was pickled opens its files
anew and refuses a shard that was written again.
Not here: hashes (memmap_verify), padding and batches (pytorch).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.closing import Closing
from shardmill.errors import DamagedStoreError, OptionError
from shardmill.interop.packed.given import path_to_read
from shardmill.interop.packed.layout import ArrayFile, check_array, read_manifest
from shardmill.interop.packed.records import (
    Alignment,
    LossMask,
    PackedBin,
    check_bin,
    checked_alignment,
)
from shardmill.records import IntArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Maps:
    """The five arrays of a shard, mapped."""

    input_ids: IntArray
    loss_mask: LossMask
    packed_len: npt.NDArray[np.uint32]
    seq_offsets: IntArray
    seq_starts: npt.NDArray[np.uint32]


class MemmapShard(Closing):
    """A read-only sequence of bins. Files are mapped at the first bin that is read.

    `loss_mask_alignment`: for an old shard, whose manifest does not say it.
    """

    def __init__(self, folder: str | Path, *, loss_mask_alignment: str | None = None) -> None:
        self.folder = path_to_read(folder).absolute()
        self.manifest, self.fingerprint = read_manifest(self.folder)
        self._files: dict[str, ArrayFile] = {
            name: check_array(self.folder, name, dtype, shape)
            for name, (dtype, shape) in self.manifest.arrays.items()
        }
        self.loss_mask_alignment: Alignment = self._alignment(loss_mask_alignment)
        self._maps: _Maps | None = None

    @property
    def pack_size(self) -> int:
        return self.manifest.pack_size

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.manifest.dtype)

    def __len__(self) -> int:
        return self.manifest.num_bins

    def read_bin(self, bin_id: SupportsIndex) -> PackedBin:
        """Bin `bin_id`, 0 to len - 1; its ids and mask are views of the files."""
        number = whole_number(bin_id, "bin_id", least=None)
        if not 0 <= number < len(self):
            raise IndexError(f"bin {number:,} of {len(self):,}")
        maps = self._opened()
        length = int(maps.packed_len[number])
        first, last = (int(place) for place in maps.seq_offsets[number : number + 2])
        if not first < last <= len(maps.seq_starts):
            raise DamagedStoreError(
                f"{self.folder}, bin {number:,}: its starts are {first:,}..{last:,} of "
                f"{len(maps.seq_starts):,}; copy the shard again or write it again"
            )
        found = PackedBin(
            input_ids=maps.input_ids[number, :length],
            loss_mask=maps.loss_mask[number, :length],
            seq_starts=maps.seq_starts[first:last].astype(np.int64),
        )
        if length > self.pack_size:  # a slice would hide it
            raise DamagedStoreError(
                f"{self.folder}, bin {number:,}: {length:,} tokens, wanted at most "
                f"pack_size={self.pack_size:,}; copy the shard again or write it again"
            )
        check_bin(found, self.pack_size, f"{self.folder}, bin {number:,}")
        return found

    def close(self) -> None:
        """Let go of the maps; bins that were read stay. May be called again."""
        self._maps = None

    def __repr__(self) -> str:
        return (
            f"MemmapShard({self.folder.name!r}, bins={len(self):,}, pack_size={self.pack_size:,})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.folder, self.loss_mask_alignment, self.fingerprint)

    def _opened(self) -> _Maps:
        if self._maps is None:
            self._maps = _Maps(**{name: file.map() for name, file in self._files.items()})
        return self._maps

    def _alignment(self, given: str | None) -> Alignment:
        stored = self.manifest.loss_mask_alignment
        chosen = None if given is None else checked_alignment(given)
        if stored is not None:
            if chosen not in (None, stored):
                raise OptionError(f"{self.folder}: its masks are aligned {stored!r}, not {given!r}")
            return stored
        if chosen is None:
            logger.warning(
                "%s: an old shard, without hashes, whose manifest does not say how its loss masks "
                "are aligned: taken as 'roll_right', which is what the code that writes such "
                "manifests does; give loss_mask_alignment='label' if you know better",
                self.folder,
            )
        return chosen or "roll_right"


def open_memmap_shard(folder: str | Path, *, loss_mask_alignment: str | None = None) -> MemmapShard:
    """The finished shard at `folder`, or an error that says what is wrong with it."""
    return MemmapShard(folder, loss_mask_alignment=loss_mask_alignment)


def _reopen(folder: Path, alignment: str, fingerprint: str) -> MemmapShard:
    shard = MemmapShard(folder, loss_mask_alignment=alignment)
    if shard.fingerprint != fingerprint:
        raise DamagedStoreError(
            f"{folder}: the shard was written again since it was opened; open it again"
        )
    return shard
