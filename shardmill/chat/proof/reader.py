"""Tokens as text, the way a proof reads them.

In: a tokenizer of ours, or one of transformers.  Out: what spans of ids say.
Promise: special tokens show as their strings, and nothing is tidied up.
A tokenizer that marks the start of a text says a span alone otherwise than inside; a proof tries
both readings, and each is honest: these are the tokens that are trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from shardmill.errors import TokenizerError
from shardmill.records import IntArray


class Reader:
    """Reads ids back."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = _decoder(tokenizer)
        self._encode = _encoder(tokenizer)
        self._spelt: dict[str, list[str]] = {}
        self.fingerprint = _fingerprint(tokenizer)

    def text(self, ids: IntArray) -> str:
        """What these ids say when they stand alone."""
        return self._decode(ids.tolist())

    def readings(self, ids: IntArray, start: int, stop: int) -> list[str]:
        """What ids start..stop say: alone, and behind what stands before them."""
        alone = self.text(ids[start:stop])
        before, with_it = self.text(ids[:start]), self.text(ids[:stop])
        return [alone, with_it[len(before) :]] if with_it.startswith(before) else [alone, alone]

    def spellings(self, text: str) -> list[str]:
        """The text, and what is left of it in a tokenizer that cannot hold it whole."""
        if text not in self._spelt:
            back = self._decode(self._encode(text))
            self._spelt[text] = [text] if back == text else [text, back]
        return self._spelt[text]


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    if hasattr(tokenizer, "apply_chat_template"):
        return lambda ids: str(
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
    return lambda ids: str(tokenizer.decode(ids))


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    if hasattr(tokenizer, "apply_chat_template"):
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    return lambda text: list(tokenizer.encode(text))


def _fingerprint(tokenizer: Any) -> str:
    own = getattr(tokenizer, "fingerprint", None)
    if isinstance(own, str):
        return own
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(str(backend.to_str()).encode()).hexdigest()
    raise TokenizerError(
        f"{type(tokenizer).__name__} has no fingerprint, so a certificate could not say what it is "
        "for; open it with shardmill.tokenizer.open_tokenizer"
    )
