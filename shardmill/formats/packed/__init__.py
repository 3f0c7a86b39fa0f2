"""Packed shards of fine-tuning sequences: made from spools, written and read in every format.

Write then read is identity. The trained labels of a bin are those of its sequences. A shard that is
unfinished or damaged is refused, and no pickle runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.formats.packed.formats import PlanShard, convert_legacy_to_memmap, open_packed
from shardmill.formats.packed.legacy import LegacyPickleWriter, iter_legacy_bins
from shardmill.formats.packed.memmap import (
    MemmapShard,
    MemmapShardWriter,
    open_memmap_shard,
    verify_memmap_shard,
)
from shardmill.formats.packed.pack import PackedOptions, pack_from_spool
from shardmill.formats.packed.records import PackedBin, PackedShard, PackedShardWriter
from shardmill.formats.packed.spool import (
    ChatStoreSpool,
    SequenceSpoolReader,
    SequenceSpoolWriter,
    materialize_bin_arrays,
)
from shardmill.lazy import lazy_getattr

if TYPE_CHECKING:
    from shardmill.formats.packed.parquet import ParquetShard, ParquetShardWriter

__all__ = [
    "ChatStoreSpool",
    "LegacyPickleWriter",
    "MemmapShard",
    "MemmapShardWriter",
    "PackedOptions",
    "PackedBin",
    "PackedShard",
    "PackedShardWriter",
    "ParquetShard",
    "ParquetShardWriter",
    "PlanShard",
    "SequenceSpoolReader",
    "SequenceSpoolWriter",
    "convert_legacy_to_memmap",
    "iter_legacy_bins",
    "materialize_bin_arrays",
    "open_memmap_shard",
    "open_packed",
    "pack_from_spool",
    "verify_memmap_shard",
]

__getattr__ = lazy_getattr(  # pyarrow takes a while to import
    __name__, {"shardmill.formats.packed.parquet": ("ParquetShard", "ParquetShardWriter")}
)
