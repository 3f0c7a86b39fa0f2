"""Packed shards of fine-tuning sequences: made from spools, written and read in every format.

Write then read is identity. The trained labels of a bin are those of its sequences. A shard that is
unfinished or damaged is refused, and no pickle runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.formats.packed.memmap import MemmapShard, open_memmap_shard, verify_memmap_shard
from shardmill.formats.packed.memmap_writer import MemmapShardWriter
from shardmill.formats.packed.open import PlanShard, open_packed
from shardmill.formats.packed.pack import pack_from_spool
from shardmill.formats.packed.records import PackedBin, PackedShard, PackedShardWriter
from shardmill.formats.packed.spool import (
    ChatStoreSpool,
    SequenceSpoolReader,
    SequenceSpoolWriter,
    materialize_bin_arrays,
)
from shardmill.lazy import lazy_getattr

if TYPE_CHECKING:
    from shardmill.formats.packed.convert import convert_legacy_to_memmap
    from shardmill.formats.packed.legacy import LegacyPickleWriter, iter_legacy_bins
    from shardmill.formats.packed.parquet import ParquetShard, ParquetShardWriter

__all__ = [
    "ChatStoreSpool",
    "LegacyPickleWriter",
    "MemmapShard",
    "MemmapShardWriter",
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

__getattr__ = lazy_getattr(
    __name__,
    {  # pyarrow's parquet and the pickle reader take a while to import
        "shardmill.formats.packed.convert": ("convert_legacy_to_memmap",),
        "shardmill.formats.packed.legacy": ("LegacyPickleWriter", "iter_legacy_bins"),
        "shardmill.formats.packed.parquet": ("ParquetShard", "ParquetShardWriter"),
    },
)
