"""KempnerForge's datasets, samplers and loaders, under their prescribed names.

Every sample equals slicing the files. Order is a pure function of (seed, epoch, position), and a
state resumes it on any number of ranks.
"""

from __future__ import annotations

import shardmill.trainers.torch  # noqa: F401 - first: it says what to install if torch is missing
from shardmill.compat.kempnerforge.datasets import (
    MemoryMappedDataset,
    MixtureDataset,
    Samples,
    collate,
)
from shardmill.compat.kempnerforge.loader import LoaderConfig, StatefulDataLoader
from shardmill.compat.kempnerforge.samplers import DistributedSampler, MixtureSampler

__all__ = [
    "DistributedSampler",
    "LoaderConfig",
    "MemoryMappedDataset",
    "MixtureDataset",
    "MixtureSampler",
    "Samples",
    "StatefulDataLoader",
    "collate",
]
