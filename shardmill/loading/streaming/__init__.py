"""Text straight to batches of one shape, with a state that loses nothing.

In: a config that names a source, a tokenizer and a shape.  Out: `Batch`es, and a state after each.
Promise: a state is a few KB of JSON whatever is buffered or shuffled, and goes on with the very
next batch, in any later process; every token of every document is given once in an epoch.
Not here: stores (build, loading), tensors (pytorch), other files' formats (sources).
"""

from __future__ import annotations

from shardmill.loading.streaming.config import StreamConfig, config_dict, read_config
from shardmill.loading.streaming.iterator import BatchIterator
from shardmill.loading.streaming.open import build_eval_iterator, build_train_iterator, open_stream
from shardmill.loading.streaming.records import Counts, StreamStats
from shardmill.loading.streaming.state import join_states
from shardmill.loading.streaming.tokenizer_snapshot import load_tokenizer, save_tokenizer
from shardmill.records import Batch

__all__ = [
    "Batch",
    "BatchIterator",
    "Counts",
    "StreamConfig",
    "StreamStats",
    "build_eval_iterator",
    "build_train_iterator",
    "config_dict",
    "join_states",
    "load_tokenizer",
    "open_stream",
    "read_config",
    "save_tokenizer",
]
