"""Use any object with `encode(text) -> ids` as a Tokenizer.

`vocab_size`, `special_token_ids()`, `decode`, `encode_batch`, `fingerprint` and `model_path` are
used if the object has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardmill.errors import TokenizerError
from shardmill.protocols import Texts, Tokenizer
from shardmill.records import IntArray, Ragged
from shardmill.tokenizers.battery import short_texts
from shardmill.tokenizers.texts import EngineSource, as_list, fingerprint_of, sha256_hex


class UnknownVocabularyError(TokenizerError, AttributeError):
    """The adapted object does not say how many ids it has."""


def adapt_tokenizer(obj: Any) -> Tokenizer:
    """A Tokenizer for any object with `encode`; one of ours is returned as it is.

    A library's own tokenizer object is opened by its model, so that text cannot become structure.
    Any other object must keep that guarantee itself.
    """
    if _is_ours(obj):
        return cast(Tokenizer, obj)
    if hasattr(obj, "serialized_model_proto"):
        from shardmill.tokenizers.sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer(obj.serialized_model_proto())
    backend = getattr(obj, "backend_tokenizer", obj)
    if type(obj).__module__.partition(".")[0] in ("tokenizers", "transformers"):
        return _from_library(obj, backend)
    if not callable(getattr(obj, "encode", None)):
        raise TokenizerError(
            f"{type(obj).__name__} has no encode(text) method; wanted an object with "
            "encode(text) -> ids, or open_tokenizer(...) for a file, folder or hub id"
        )
    return AdaptedTokenizer(obj)


def vocab_size_of(obj: object) -> int | None:
    """The size of the vocabulary, from an attribute or a method; None if there is neither."""
    known = getattr(obj, "known_vocab_size", None)
    found = known if known is not None else getattr(obj, "vocab_size", None)
    if callable(found):
        found = found()
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | np.integer) or found < 1:
        raise TokenizerError(
            f"{type(obj).__name__}.vocab_size is {found!r}, wanted a whole number above 0"
        )
    return int(found)


def probe(encode: Callable[[str], Sequence[int]], text: str) -> list[int] | None:
    """The ids of a text that the caller never gave; None if their tokenizer refuses it."""
    try:
        return list(encode(text))
    except Exception:  # noqa: BLE001 - not our code, and any refusal is an answer
        return None


def model_sha256_of(obj: object) -> str | None:
    """sha256 of the model's file; None if the tokenizer is not made from one."""
    known = getattr(obj, "model_sha256", None)
    if isinstance(known, str):
        return known
    path = getattr(obj, "model_path", None)
    if path is None or not Path(path).is_file():
        return None
    return sha256_hex(Path(path).read_bytes())


class AdaptedTokenizer:
    """A user's object as a Tokenizer. Its ids are checked to be whole numbers >= 0."""

    unknown_id: int | None = None

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        self.known_vocab_size = vocab_size_of(obj)
        self.model_sha256 = model_sha256_of(obj)
        self._fingerprint: str | None = None

    @property
    def vocab_size(self) -> int:
        if self.known_vocab_size is None:
            raise UnknownVocabularyError(
                f"{type(self._obj).__name__} has no vocab_size; give it one, or pass {{dtype}} "
                "(or uint32)",
                dtype="uint16",
            )
        return self.known_vocab_size

    @property
    def fingerprint(self) -> str:
        """The object's own; else a hash of its model file; else of its ids for fixed texts."""
        if self._fingerprint is None:
            self._fingerprint = _own_fingerprint(self._obj) or self._derived_fingerprint()
        return self._fingerprint

    @property
    def engine_source(self) -> EngineSource | None:
        return cast("EngineSource | None", getattr(self._obj, "engine_source", None))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._ids(text).tolist()
        return ids

    def encode_batch(self, texts: Texts) -> Ragged:
        listed = as_list(texts)
        batch: Callable[[list[str]], Any] | None = getattr(self._obj, "encode_batch", None)
        if batch is None:
            parts = [self._ids(text) for text in listed]
        else:
            found = batch(listed)
            if isinstance(found, Ragged):
                return found
            parts = [_whole_numbers(ids, text) for ids, text in zip(found, listed, strict=True)]
        values = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return Ragged.from_lengths(values, [len(part) for part in parts])

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        decode = getattr(self._obj, "decode", None)
        if decode is None:
            raise TokenizerError(f"{type(self._obj).__name__} has no decode(ids) method")
        return str(decode(np.asarray(ids).tolist()))

    def special_token_ids(self) -> dict[str, int]:
        find = getattr(self._obj, "special_token_ids", None)
        found = find() if callable(find) else find
        return {} if found is None else {str(name): int(number) for name, number in found.items()}

    def marker_id(self, text: str) -> int | None:
        """The id of the special token with this literal string, if the object can tell."""
        find = getattr(self._obj, "marker_id", None)
        return cast("int | None", find(text)) if callable(find) else None

    def _ids(self, text: str) -> IntArray:
        return _whole_numbers(self._obj.encode(text), text)

    def _derived_fingerprint(self) -> str:
        kind = f"{type(self._obj).__module__}.{type(self._obj).__qualname__}"
        if self.model_sha256 is not None:
            return fingerprint_of({"kind": kind, "model": self.model_sha256})
        ids = [probe(self.encode, text) for text in short_texts() if text]
        return fingerprint_of({"kind": kind, "ids": cast("list[Any]", ids)})

    def __repr__(self) -> str:
        return f"AdaptedTokenizer({type(self._obj).__name__}, vocab_size={self.known_vocab_size})"


def _is_ours(obj: object) -> bool:
    """Whether this is a class of this package, or a subclass of one."""
    return any(kind.__module__.startswith("shardmill.tokenizers.") for kind in type(obj).__mro__)


def _from_library(obj: Any, backend: Any) -> Tokenizer:
    if not hasattr(backend, "to_str"):
        raise TokenizerError(
            f"{type(obj).__name__} has no tokenizer.json form; use its files with "
            "open_tokenizer(...)"
        )
    from shardmill.tokenizers.huggingface import HuggingFaceTokenizer, names_in_library

    return HuggingFaceTokenizer(backend.to_str(), names=names_in_library(obj))


def _own_fingerprint(obj: object) -> str | None:
    found = getattr(obj, "fingerprint", None)
    found = found() if callable(found) else found
    if not isinstance(found, str) or not found:
        return None
    return found if re.fullmatch("[0-9a-f]{64}", found) else sha256_hex(found.encode())


def _whole_numbers(ids: Any, text: str) -> IntArray:
    array: IntArray = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or int(array.min()) < 0:
        raise TokenizerError(
            f"encode({text[:40]!r}) gave {str(ids)[:60]}, wanted a flat sequence of whole numbers "
            ">= 0"
        )
    return array
