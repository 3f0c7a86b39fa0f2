"""Read shard by shard: the portable reader.

In: `ShardFiles`; then starts.  Out: filled rows.
Promise: the same rows as the ranged reader, with nothing but Python's own `mmap`. At most
`max_maps` shards are mapped, and at most 256: here each holds a file descriptor too.
Not here: arguments (space), the fast way (ranged).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.mapped.files import DTYPES, ShardFiles
from shardmill.mapped.layout import part_of, pieces, running_edges
from shardmill.records import OffsetArray

_MAX_DESCRIPTORS = 256


class GroupedReader:
    """One map a shard. A map that is dropped lives on until the last read of it has ended."""

    def __init__(self, files: ShardFiles, *, max_maps: int) -> None:
        self._files = files
        self._edges = running_edges(files.counts)
        self._max_maps = min(max_maps, _MAX_DESCRIPTORS)
        self._lock = threading.Lock()
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()  # least recently used first

    def fill(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        """`out[i]` becomes the `out.shape[1]` tokens from `starts[i]` on. Starts were checked."""
        length, edges = out.shape[1], self._edges
        shard = part_of(edges, starts)
        whole = starts + length <= edges[shard + 1]
        inside = starts - edges[shard]
        held, tokens = -1, np.empty(0, np.uint16)
        for row in np.argsort(shard, kind="stable").tolist():  # a shard is mapped once a call
            if not whole[row]:
                self._copy_pieces(int(starts[row]), out[row])
                continue
            if shard[row] != held:
                held = int(shard[row])
                tokens = self._tokens(held)
            out[row] = tokens[inside[row] : inside[row] + length]

    def prefetch(self, starts: OffsetArray, length: int) -> None:
        """Ask the kernel to read these windows ahead; where it cannot be asked, do nothing."""
        if not hasattr(mmap.mmap, "madvise"):
            return
        for start in starts.tolist():
            for part, begin, end in pieces(self._edges, start, start + length):
                width, first = int(self._files.widths[part]), int(self._edges[part])
                place = int(self._files.offsets[part]) + (begin - first) * width
                before = place % mmap.PAGESIZE
                num_bytes = (end - begin) * width + before
                self._map(part).madvise(mmap.MADV_WILLNEED, place - before, num_bytes)

    def _copy_pieces(self, start: int, row: npt.NDArray[Any]) -> None:
        for part, begin, end in pieces(self._edges, start, start + len(row)):
            first = int(self._edges[part])
            row[begin - start : end - start] = self._tokens(part)[begin - first : end - first]

    def _tokens(self, shard: int) -> npt.NDArray[Any]:
        dtype = DTYPES[int(self._files.widths[shard])]
        return np.frombuffer(self._map(shard), dtype, offset=int(self._files.offsets[shard]))

    def _map(self, shard: int) -> mmap.mmap:
        with self._lock:
            if shard not in self._maps:
                while len(self._maps) >= self._max_maps:
                    self._maps.popitem(last=False)
                descriptor = self._files.open(shard)
                try:
                    size = self._files.file_bytes(shard)
                    self._maps[shard] = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
                finally:
                    os.close(descriptor)
            self._maps.move_to_end(shard)
            return self._maps[shard]
