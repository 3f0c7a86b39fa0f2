"""Packed SFT shards under the names that NeMo and Megatron users know.

The work is done in `shardmill.formats.packed`. Only the datasets and `collate_packed` need torch,
which is imported when one of them is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.formats.packed import (
    LegacyPickleWriter,
    MemmapShardWriter,
    PackedShardWriter,
    SequenceSpoolReader,
    SequenceSpoolWriter,
    convert_legacy_to_memmap,
    materialize_bin_arrays,
)
from shardmill.lazy import lazy_getattr
from shardmill.packing import BinAssignment

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

__all__ = [
    "BinAssignment",
    "ChatSftOutputConfig",
    "GPTSFTPackedDataset",
    "GPTSFTPackedMemmapDataset",
    "GPTSFTPackedMultiShardDataset",
    "LegacyPickleWriter",
    "MemmapShardWriter",
    "PackedDataset",
    "PackedShardWriter",
    "SequenceSpoolReader",
    "SequenceSpoolWriter",
    "collate_packed",
    "convert_legacy_to_memmap",
    "create_sft_dataset",
    "materialize_bin_arrays",
    "process_chat_sft_pack_from_spool_core",
    "write_memmap_to_cloud",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "shardmill.compat.nemotron.datasets": (
            *("GPTSFTPackedDataset", "GPTSFTPackedMemmapDataset", "GPTSFTPackedMultiShardDataset"),
            *("PackedDataset", "collate_packed", "create_sft_dataset"),
        ),
        "shardmill.compat.nemotron.pack": (
            *("ChatSftOutputConfig", "process_chat_sft_pack_from_spool_core"),
            "write_memmap_to_cloud",
        ),
    },
)
