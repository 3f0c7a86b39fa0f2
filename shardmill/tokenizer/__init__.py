"""Text to ids: byte, SentencePiece and Hugging Face tokenizers behind one protocol.

In: texts.  Out: Ragged ids, the same whichever engine made them.
Importing this room needs numpy only; each kind imports its library when it is opened.
"""

from __future__ import annotations

from shardmill.tokenizer.adapt import adapt_tokenizer, model_sha256_of, probe, vocab_size_of
from shardmill.tokenizer.byte import ByteTokenizer
from shardmill.tokenizer.choose import ChosenEncoder, EngineCheck, EngineChoice, choose_encoder
from shardmill.tokenizer.open import open_tokenizer
from shardmill.tokenizer.reopen import reopen_encoder, thread_limits
from shardmill.tokenizer.specials import DEFAULT_SPECIALS
from shardmill.tokenizer.train import TrainReport, TrainSpec, train_tokenizer

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
