"""The recipe's tokenizer: a SentencePiece model with its four special tokens.

The special strings in text are encoded as text, never as special ids, whether the model holds them
as control or as user-defined symbols. `num_threads` is for this process only: a copy that is
pickled to a worker uses one thread, since a worker is one of many.
"""

from __future__ import annotations

from pathlib import Path

import torch

from niels_gpt.special_tokens import SPECIAL_TOKENS
from shardmill.tokenizers.sentencepiece import SentencePieceTokenizer as _SentencePiece


class SentencePieceTokenizer(_SentencePiece):
    """A .model file whose four special tokens are those of the recipe."""

    def __init__(self, model_path: str | Path, *, num_threads: int = 1) -> None:
        super().__init__(Path(model_path), specials=SPECIAL_TOKENS, num_threads=num_threads)

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, (self.model_bytes, self.model_path)

    def encode_torch(self, text: str) -> torch.Tensor:
        """The ids of a text, (n,) int64."""
        return torch.tensor(self.encode(text), dtype=torch.int64)


def load_tokenizer(path: str | Path, *, num_threads: int = 1) -> SentencePieceTokenizer:
    """The tokenizer in a .model file, or in a folder that holds spm.model."""
    where = Path(path)
    model = where / "spm.model" if where.is_dir() else where
    return SentencePieceTokenizer(model, num_threads=num_threads)


def _reopened(model: bytes, path: Path | None) -> SentencePieceTokenizer:
    tokenizer = SentencePieceTokenizer.__new__(SentencePieceTokenizer)
    _SentencePiece.__init__(tokenizer, model, specials=SPECIAL_TOKENS)
    tokenizer.model_path = path
    return tokenizer


__all__ = ["SentencePieceTokenizer", "load_tokenizer"]
