"""memmap_padded_v1: fixed rows on disk, read without a byte of pickle.

In: bins, one by one.  Out: a folder of five `.npy` arrays and a manifest, and its reader.
Promise: what was written is read; what does not match its manifest is refused.
Not here: anything but the names of the parts: layout, memmap_writer, memmap_reader, memmap_verify.
"""

from __future__ import annotations

from shardmill.interop.packed.memmap_reader import MemmapShard, open_memmap_shard
from shardmill.interop.packed.memmap_verify import verify_memmap_shard
from shardmill.interop.packed.memmap_writer import MemmapShardWriter

__all__ = ["MemmapShard", "MemmapShardWriter", "open_memmap_shard", "verify_memmap_shard"]
