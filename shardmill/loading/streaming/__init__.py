"""Streaming: text straight to batches, with a state that loses nothing.

`stream` opens a `TextStream`. On the way a batch passes `documents.py` (a source as blocks of
texts, and their ids), `rows.py` (rows) and `stream.py` (batches); `loading/state.py` is the
position.
"""

from __future__ import annotations

from shardmill.loading.state import Counts, StreamStats, join_states
from shardmill.loading.streaming.api import stream
from shardmill.loading.streaming.stream import TextStream
from shardmill.loading.streaming.tokenizer import StreamTokenizer, load_tokenizer, save_tokenizer

__all__ = [
    "Counts",
    "StreamStats",
    "StreamTokenizer",
    "TextStream",
    "join_states",
    "load_tokenizer",
    "save_tokenizer",
    "stream",
]
