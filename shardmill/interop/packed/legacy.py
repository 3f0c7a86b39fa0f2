"""Legacy packed shards: a pickle of dicts in a `.npy`, read without unpickling.

In: a path, or bins.  Out: bins, a file, or a memmap shard.
Promise: that of the parts, whose names these are.
Not here: the parts: legacy_reader, legacy_writer, legacy_convert, unpickle.
"""

from __future__ import annotations

from shardmill.interop.packed.legacy_convert import convert_legacy_to_memmap
from shardmill.interop.packed.legacy_reader import (
    iter_legacy_bins,
    num_legacy_bins,
    read_record,
    record_path,
)
from shardmill.interop.packed.legacy_writer import LegacyPickleWriter

__all__ = [
    "LegacyPickleWriter",
    "convert_legacy_to_memmap",
    "iter_legacy_bins",
    "num_legacy_bins",
    "read_record",
    "record_path",
]
