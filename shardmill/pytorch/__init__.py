"""What a PyTorch user expects: datasets, samplers, loaders, and masks for attention.

In: stores and token folders.  Out: tensors.
Promise: a batch is one gather; every sample equals slicing the files; order is a pure function of
(seed, epoch, position), and a state resumes it on any number of ranks.
Not here: bytes (shards), maps and documents (mapped), orders (sampling).
"""

from __future__ import annotations

from shardmill.pytorch._torch import torch as _torch  # noqa: F401 - first: it says what is missing
from shardmill.pytorch.block_mask import document_mask, flex_block_mask
from shardmill.pytorch.distributed import DistributedSampler
from shardmill.pytorch.loader_config import LoaderConfig
from shardmill.pytorch.memory_mapped import MemoryMappedDataset
from shardmill.pytorch.mixture_dataset import MixtureDataset
from shardmill.pytorch.mixture_sampler import MixtureSampler
from shardmill.pytorch.packed import (
    GPTSFTPackedDataset,
    GPTSFTPackedMemmapDataset,
    GPTSFTPackedMultiShardDataset,
    PackedDataset,
    create_sft_dataset,
)
from shardmill.pytorch.packed_collate import collate_packed
from shardmill.pytorch.samples import Samples, collate
from shardmill.pytorch.stateful import StatefulDataLoader
from shardmill.pytorch.streaming import StreamingDataset
from shardmill.pytorch.token_loader import TokenLoader

__all__ = [
    "DistributedSampler",
    "GPTSFTPackedDataset",
    "GPTSFTPackedMemmapDataset",
    "GPTSFTPackedMultiShardDataset",
    "LoaderConfig",
    "MemoryMappedDataset",
    "MixtureDataset",
    "MixtureSampler",
    "PackedDataset",
    "Samples",
    "StatefulDataLoader",
    "StreamingDataset",
    "TokenLoader",
    "collate",
    "collate_packed",
    "create_sft_dataset",
    "document_mask",
    "flex_block_mask",
]
