"""Packed SFT shards under the names that NeMo and Megatron users know.

The work is done in `shardmill.formats.packed`. Only the datasets and `collate_packed` need torch,
which is imported when one of them is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.formats.packed import (
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
from shardmill.lazy import lazy_getattr
from shardmill.packing import (
    BinAssignment,
    best_fit_decreasing,
    concatenate,
    first_fit_decreasing,
    first_fit_shuffle,
)

if TYPE_CHECKING:
    from shardmill.compat.nemotron.datasets import (
        GPTSFTPackedDataset,
        GPTSFTPackedMemmapDataset,
        GPTSFTPackedMultiShardDataset,
        PackedDataset,
        collate_packed,
        create_sft_dataset,
    )
    from shardmill.compat.nemotron.pack import (
        ChatSftOutputConfig,
        process_chat_sft_pack_from_spool_core,
        write_memmap_to_cloud,
    )
    from shardmill.formats.packed import (
        LegacyPickleWriter,
        ParquetShard,
        ParquetShardWriter,
        convert_legacy_to_memmap,
    )

__all__ = [
    "BinAssignment",
    "ChatSftOutputConfig",
    "ChatStoreSpool",
    "GPTSFTPackedDataset",
    "GPTSFTPackedMemmapDataset",
    "GPTSFTPackedMultiShardDataset",
    "LegacyPickleWriter",
    "MemmapShard",
    "MemmapShardWriter",
    "PackedBin",
    "PackedDataset",
    "PackedShard",
    "PackedShardWriter",
    "ParquetShard",
    "ParquetShardWriter",
    "SequenceSpoolReader",
    "SequenceSpoolWriter",
    "best_fit_decreasing",
    "collate_packed",
    "concatenate",
    "convert_legacy_to_memmap",
    "create_sft_dataset",
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
    "shardmill.formats.packed": (
        *("LegacyPickleWriter", "ParquetShard", "ParquetShardWriter", "convert_legacy_to_memmap"),
    ),
    "shardmill.compat.nemotron.datasets": (
        *("GPTSFTPackedDataset", "GPTSFTPackedMemmapDataset", "GPTSFTPackedMultiShardDataset"),
        *("PackedDataset", "collate_packed", "create_sft_dataset"),
    ),
    "shardmill.compat.nemotron.pack": (
        *("ChatSftOutputConfig", "process_chat_sft_pack_from_spool_core", "write_memmap_to_cloud"),
    ),
}

__getattr__ = lazy_getattr(__name__, _LATER)
