"""The shards of a remote split as files that come when they are read.

In: a remote store and a split.  Out: `ShardFiles` that fetch; the token space over them.
Promise: the same tokens as a local copy; a shard is fetched when a window in it is read, and stays
in the cache while it is mapped. At most half of the cache is mapped by one space, so that two
processes find room beside each other.
Not here: order. Windows in random order read all shards all the time: take `shuffle="block"`, or a
cache that holds the split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.mapped import TokenSpace
from shardmill.mapped.files import ShardFiles

if TYPE_CHECKING:
    from shardmill.remote.store import RemoteStore


class RemoteFiles(ShardFiles):
    """The shards of a split that hold tokens. Pickles as its store."""

    def __init__(self, store: RemoteStore, split: str) -> None:
        super().__init__(())
        shards = store.shards(split)
        counts = np.array([shard.tokens for shard in shards], np.int64)
        filled = np.flatnonzero(counts)
        self.width = np.dtype(store.dtype).itemsize
        self.paths = [f"{store.url}/{shards[place].file}" for place in filled.tolist()]
        self.counts = counts[filled]
        self.widths = np.full(len(filled), self.width, np.int64)
        self.offsets = np.zeros(len(filled), np.int64)
        self._numbers: list[int] = filled.tolist()
        self._store, self._split = store, split

    def open(self, shard: int) -> int:
        """A descriptor of the file in the cache, which stays there until the last copy of the
        descriptor is closed: a map keeps one of its own."""
        return self._store.open_shard(self._split, self._numbers[shard])

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFiles, (self._store, self._split)


def remote_tokens(store: RemoteStore, split: str, max_bytes: int) -> TokenSpace:
    """All tokens of a split, through a cache of `max_bytes`."""
    files = RemoteFiles(store, split)
    largest = max((files.file_bytes(shard) for shard in range(len(files))), default=1)
    room = max_bytes // largest // 2 - 1  # the one that is read lives a little longer
    return TokenSpace(files, max_maps=min(max(room, 1), 256), reader="grouped")
