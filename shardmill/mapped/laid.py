"""Which shards lie in the address range now.

In: shards about to be read.  Out: the same shards, laid.
Promise: never more than the limit; least recently used first out; a shard is checked on disk
right before it is laid.
Not here: locks. The caller lets nobody read while shards are laid or lifted.
"""

from __future__ import annotations

import errno
import os

import numpy as np

from shardmill.errors import StoreError
from shardmill.mapped.files import ShardFiles
from shardmill.mapped.layout import Layout
from shardmill.mapped.memory import AddressRange
from shardmill.records import OffsetArray


class LaidShards:
    """The table of shards laid into one range."""

    def __init__(
        self, files: ShardFiles, layout: Layout, addresses: AddressRange, limit: int
    ) -> None:
        self._files = files
        self._layout = layout
        self._addresses = addresses
        self._limit = limit
        self._laid = np.zeros(len(files), np.bool_)
        self._used = np.zeros(len(files), np.int64)  # the call that asked for a shard last
        self._clock = 0
        self._num_laid = 0

    @property
    def complete(self) -> bool:
        """Every shard is laid; from now on nothing changes."""
        return self._num_laid == len(self._laid)

    def hold(self, touched: OffsetArray) -> bool:
        """Lay the touched shards (repeats allowed). False, and nothing done, if too many."""
        if not self._laid[touched].all():
            shards = np.unique(touched)
            if len(shards) > self._limit:
                return False
            missing = shards[~self._laid[shards]]
            self._lift_oldest(self._num_laid + len(missing) - self._limit, keep=shards)
            for shard in missing.tolist():
                self._lay(shard)
        self._clock += 1
        self._used[touched] = self._clock
        return True

    def _lay(self, shard: int) -> None:
        place, num_bytes = self._place(shard)
        skip = self._files.file_bytes(shard) - num_bytes
        descriptor = self._files.open(shard)
        try:
            self._addresses.lay(descriptor, place, num_bytes, skip)
        except OSError as error:
            out_of_maps = error.errno == errno.ENOMEM
            advice = (
                "lower max_maps, close other spaces, or raise vm.max_map_count or the limit of "
                "addresses (ulimit -v)"
                if out_of_maps
                else f"{os.strerror(error.errno or 0)}: some file systems allow few maps or none"
            )
            raise StoreError(
                f"{self._files.paths[shard]}: the kernel refused another map; this space holds "
                f"{self._num_laid:,}; {advice}; reader='pread' needs no map"
            ) from error
        finally:
            os.close(descriptor)
        self._laid[shard] = True
        self._num_laid += 1

    def _lift_oldest(self, num_shards: int, *, keep: OffsetArray) -> None:
        """Lift the least recently used shards, at most `num_shards`, none of `keep`."""
        if num_shards <= 0:
            return
        loose = self._laid.copy()
        loose[keep] = False
        candidates = np.flatnonzero(loose)
        oldest = candidates[np.argsort(self._used[candidates], kind="stable")[:num_shards]]
        for shard in oldest.tolist():
            self._laid[shard] = False
            self._num_laid -= 1
            self._addresses.lift(*self._place(shard))

    def _place(self, shard: int) -> tuple[int, int]:
        """Where its map begins, and its bytes: the tokens and the end of a header before them."""
        lead = int(self._layout.leads[shard])
        return int(self._layout.addresses[shard]), lead + self._files.num_bytes(shard)
