"""Text to ids: byte, SentencePiece and Hugging Face tokenizers with one protocol.

The ids are the same whichever engine encodes. Importing this package needs numpy only; each kind
imports its library when it is opened.
"""

from __future__ import annotations

from shardmill.tokenizers.base import DEFAULT_SPECIALS, ByteTokenizer
from shardmill.tokenizers.engines import (
    ChosenEncoder,
    EngineCheck,
    EngineChoice,
    choose_encoder,
    reopen_encoder,
    thread_limits,
)
from shardmill.tokenizers.open import (
    adapt_tokenizer,
    model_sha256_of,
    open_tokenizer,
    probe,
    vocab_size_of,
)
from shardmill.tokenizers.train import TrainReport, TrainSpec, train_tokenizer

__all__ = [
    "ByteTokenizer",
    "ChosenEncoder",
    "DEFAULT_SPECIALS",
    "EngineCheck",
    "EngineChoice",
    "TrainReport",
    "TrainSpec",
    "adapt_tokenizer",
    "choose_encoder",
    "model_sha256_of",
    "open_tokenizer",
    "probe",
    "reopen_encoder",
    "thread_limits",
    "train_tokenizer",
    "vocab_size_of",
]
