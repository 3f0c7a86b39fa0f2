"""Packed shards of fine-tuning sequences: made from spools, written and read in every format.

In: tokenised sequences with masks.  Out: bins of whole sequences, on disk and back.
Promise: write then read is identity; trained labels of a bin are those of its sequences; a shard
that is not finished or not sound is refused; no pickle runs.
Not here: tensors and batches (pytorch), choosing bins (packing).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.interop.late import later
from shardmill.interop.packed.chat_spool import ChatStoreSpool
from shardmill.interop.packed.materialize import materialize_bin_arrays
from shardmill.interop.packed.memmap import (
    MemmapShard,
    MemmapShardWriter,
    open_memmap_shard,
    verify_memmap_shard,
)
from shardmill.interop.packed.open import open_packed
from shardmill.interop.packed.pack import pack_from_spool
from shardmill.interop.packed.planned import PlannedShard, PlanShard
from shardmill.interop.packed.records import (
    PackedBin,
    PackedShard,
    PackedShardWriter,
    check_bin,
)
from shardmill.interop.packed.spool import SequenceSpoolReader, SequenceSpoolWriter

if TYPE_CHECKING:
    from shardmill.interop.packed.legacy import (
        LegacyPickleWriter,
        convert_legacy_to_memmap,
        iter_legacy_bins,
    )
    from shardmill.interop.packed.parquet import ParquetShard, ParquetShardWriter

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
    "PlannedShard",
    "SequenceSpoolReader",
    "SequenceSpoolWriter",
    "check_bin",
    "convert_legacy_to_memmap",
    "iter_legacy_bins",
    "materialize_bin_arrays",
    "open_memmap_shard",
    "open_packed",
    "pack_from_spool",
    "verify_memmap_shard",
]

_LATER = {  # pyarrow's parquet and the pickle reader take a while
    "legacy": ("LegacyPickleWriter", "convert_legacy_to_memmap", "iter_legacy_bins"),
    "parquet": ("ParquetShard", "ParquetShardWriter"),
}

__getattr__ = later(
    __name__, {name: f"{__name__}.{room}" for room, names in _LATER.items() for name in names}
)
