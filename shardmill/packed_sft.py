"""The names of the packed fine-tuning format in one place; no torch needed.

Datasets and collate are in `shardmill.pytorch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.interop.late import later
from shardmill.interop.packed import (
    ChatStoreSpool,
    MemmapShard,
    MemmapShardWriter,
    PackedBin,
    PackedShard,
    PackedShardWriter,
    SequenceSpoolReader,
    SequenceSpoolWriter,
    materialize_bin_arrays,
    open_memmap_shard,
    open_packed,
    pack_from_spool,
    verify_memmap_shard,
)
from shardmill.packing import (
    BinAssignment,
    best_fit_decreasing,
    concatenate,
    first_fit_decreasing,
    first_fit_shuffle,
)

if TYPE_CHECKING:
    from shardmill.interop.packed import (
        LegacyPickleWriter,
        ParquetShard,
        ParquetShardWriter,
        convert_legacy_to_memmap,
    )
    from shardmill.remote import (
        ChatSftOutputConfig,
        process_chat_sft_pack_from_spool_core,
        write_memmap_to_cloud,
    )

__all__ = [
    "BinAssignment",
    "ChatSftOutputConfig",
    "ChatStoreSpool",
    "LegacyPickleWriter",
    "MemmapShard",
    "MemmapShardWriter",
    "PackedBin",
    "PackedShard",
    "PackedShardWriter",
    "ParquetShard",
    "ParquetShardWriter",
    "SequenceSpoolReader",
    "SequenceSpoolWriter",
    "best_fit_decreasing",
    "concatenate",
    "convert_legacy_to_memmap",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "materialize_bin_arrays",
    "open_memmap_shard",
    "open_packed",
    "pack_from_spool",
    "process_chat_sft_pack_from_spool_core",
    "verify_memmap_shard",
    "write_memmap_to_cloud",
]

_LATER = {
    "shardmill.interop.packed": (
        *("LegacyPickleWriter", "ParquetShard", "ParquetShardWriter", "convert_legacy_to_memmap"),
    ),
    "shardmill.remote": (
        *("ChatSftOutputConfig", "process_chat_sft_pack_from_spool_core", "write_memmap_to_cloud"),
    ),
}

__getattr__ = later(__name__, {name: module for module, names in _LATER.items() for name in names})
