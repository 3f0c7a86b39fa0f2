"""A caller's tokenizer as the cache needs it.

Any object with `encode(text)` becomes a shardmill `Tokenizer` with the recipe's special ids. The
ids are the object's own, a vocabulary that does not fit uint16 is refused at once, and
`model_sha256` is the hash of the model's file if the object names one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from niels_gpt.special_tokens import SPECIAL_TOKENS
from shardmill.errors import TokenizerError, TokenRangeError
from shardmill.protocols import Texts
from shardmill.records import IntArray, Ragged
from shardmill.tokenizers import adapt_tokenizer, model_sha256_of, probe, vocab_size_of
from shardmill.tokenizers.base import EngineSource

_UINT16_IDS = 2**16


class CacheTokenizer:
    """A caller's tokenizer as the builders need it.

    `vocab_size`, `special_token_ids()` and `model_path` are used when present. Without
    `special_token_ids()` a special token is known when its string encodes to one id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._inner = adapt_tokenizer(tokenizer)
        self.known_vocab_size = vocab_size_of(self._inner)
        if self.known_vocab_size is not None and self.known_vocab_size > _UINT16_IDS:
            raise TokenRangeError(
                f"{tokenizer!r} has {self.known_vocab_size:,} ids, but this cache stores uint16, "
                f"which holds {_UINT16_IDS:,}: use a smaller vocabulary, or `shardmill build`, "
                "which stores uint32 as well"
            )
        self.model_sha256 = model_sha256_of(tokenizer)
        self._specials = _special_ids(self._inner.special_token_ids(), self._inner.encode)

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def fingerprint(self) -> str:
        return self._inner.fingerprint

    @property
    def engine_source(self) -> EngineSource | None:
        return getattr(self._inner, "engine_source", None)

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text)

    def encode_batch(self, texts: Texts) -> Ragged:
        return self._inner.encode_batch(texts)

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        return self._inner.decode(ids)

    def special_token_ids(self) -> dict[str, int]:
        return dict(self._specials)

    def chat_ids(self) -> dict[str, int]:
        """The four ids, or an error that says which are missing."""
        missing = [name for name in SPECIAL_TOKENS if name not in self._specials]
        if missing:
            raise TokenizerError(
                f"{self._inner!r}: no id for {', '.join(missing)}; a chat cache needs all of "
                f"{', '.join(SPECIAL_TOKENS)}: give the tokenizer special_token_ids(), or train "
                "it with the strings of niels_gpt.special_tokens"
            )
        return {name: self._specials[name] for name in SPECIAL_TOKENS}

    def __repr__(self) -> str:
        return f"CacheTokenizer({self._inner!r})"


def _special_ids(named: dict[str, int], encode: Callable[[str], Sequence[int]]) -> dict[str, int]:
    if set(SPECIAL_TOKENS) <= named.keys():
        return named
    found = {name: probe(encode, text) or [] for name, text in SPECIAL_TOKENS.items()}
    single = {name: ids[0] for name, ids in found.items() if len(ids) == 1}
    distinct = len(set(single.values())) == len(SPECIAL_TOKENS)
    return {**named, **single} if distinct else named


__all__ = ["CacheTokenizer"]
