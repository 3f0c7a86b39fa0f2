"""The settings of a stream: every knob with its default, read from TOML, YAML, JSON or a mapping.

In: a file, a mapping, overrides.  Out: a frozen `StreamConfig`.
Promise: what is returned makes sense as a whole; every refusal names the key.
"""

from shardmill.loading.streaming.config.models import (
    DataSection,
    ModelSection,
    StreamConfig,
    TokenizerSection,
    TrainSection,
)
from shardmill.loading.streaming.config.read import config_dict, read_config

__all__ = [
    "DataSection",
    "ModelSection",
    "StreamConfig",
    "TokenizerSection",
    "TrainSection",
    "config_dict",
    "read_config",
]
