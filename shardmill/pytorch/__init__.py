"""What a PyTorch user expects: datasets, and masks for attention.

In: stores and token folders.  Out: tensors.
Promise: a batch is one gather; every sample equals slicing the files.
Not here: bytes (shards), maps and documents (mapped).
"""

from __future__ import annotations

from shardmill.pytorch._torch import torch as _torch  # noqa: F401 - first: it says what is missing
from shardmill.pytorch.block_mask import document_mask, flex_block_mask
from shardmill.pytorch.memory_mapped import MemoryMappedDataset
from shardmill.pytorch.samples import Samples, collate

__all__ = ["MemoryMappedDataset", "Samples", "collate", "document_mask", "flex_block_mask"]
