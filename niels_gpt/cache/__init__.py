"""The recipe's token cache: built once, mapped while training."""

from __future__ import annotations

from niels_gpt.cache.build_cache import Message, build_pretrain_cache, build_sft_cache
from niels_gpt.cache.meta import read_meta, sha256_file, write_meta
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset

__all__ = [
    "Message",
    "PretrainTokenStreamDataset",
    "SFTExampleDataset",
    "build_pretrain_cache",
    "build_sft_cache",
    "read_meta",
    "sha256_file",
    "write_meta",
]
