"""chomp's names: a training config with `data`, `train` and `model`, and iterators of [A, B, T].

A thin layer over `shardmill.loading.streaming`: `config.py` reads the file, `stream.py` opens what
it names.
"""

from __future__ import annotations

from shardmill.compat.chomp.config import StreamConfig, config_dict, read_config
from shardmill.compat.chomp.stream import build_eval_iterator, build_train_iterator, open_stream
from shardmill.loading.streaming import join_states, load_tokenizer, save_tokenizer

__all__ = [
    "StreamConfig",
    "build_eval_iterator",
    "build_train_iterator",
    "config_dict",
    "join_states",
    "load_tokenizer",
    "open_stream",
    "read_config",
    "save_tokenizer",
]
