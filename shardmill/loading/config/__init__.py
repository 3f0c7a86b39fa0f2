"""The `[data]` table of a training config: read, checked, opened, written.

In: a TOML file.  Out: a `DataConfig`; from it a `SampleStream`, or TOML and flags again.
"""

from __future__ import annotations

from shardmill.loading.config.open import eos_token_id, meant_split, open_stream
from shardmill.loading.config.read import config_flags, config_toml, parse_config, read_config
from shardmill.loading.config.records import DataConfig, DatasetConfig, PhaseConfig

__all__ = [
    "DataConfig",
    "DatasetConfig",
    "PhaseConfig",
    "config_flags",
    "config_toml",
    "eos_token_id",
    "meant_split",
    "open_stream",
    "parse_config",
    "read_config",
]
