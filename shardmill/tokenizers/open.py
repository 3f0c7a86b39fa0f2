"""Get a Tokenizer from a name, or from any object with `encode(text) -> ids`.

A name is a file or folder on disk first, then a hub id. To add a kind of tokenizer, write a module
with `open_file(path, *, specials)` and add a line to `FILE_KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardmill.errors import OptionError, TokenizerError
from shardmill.protocols import Texts, Tokenizer
from shardmill.records import IntArray, Ragged
from shardmill.tokenizers.base import (
    ByteTokenizer,
    EngineSource,
    as_list,
    engine_source_of,
    fingerprint_of,
    sha256_hex,
)
from shardmill.tokenizers.battery import short_texts

# The ending of a tokenizer's file -> the module that opens it, imported on first use.
FILE_KINDS = {
    ".json": "shardmill.tokenizers.huggingface",
    ".model": "shardmill.tokenizers.sentencepiece",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def open_tokenizer(
    spec: str | Path,
    *,
    specials: Mapping[str, str] | None = None,
    revision: str | None = None,
) -> Tokenizer:
    """Open a tokenizer by name.

    `specials` maps names to literal strings, e.g. {"eot": "<|endoftext|>"}, and replaces the names
    in the model's own files. `revision` is for hub ids.
    """
    path = Path(spec)
    if path.is_dir():
        return _open_folder(path, specials, revision)
    if path.is_file():
        return _open_file(path, specials)
    name = str(spec)
    byte = re.fullmatch(r"byte(?::(\d+))?", name)
    if byte:
        return ByteTokenizer(byte_offset=int(byte[1] or 0), specials=specials)
    # What looks like a file is not sought on the hub, whose client would try for a minute.
    if isinstance(spec, Path) or path.suffix in FILE_KINDS or not _HUB_ID.fullmatch(name):
        raise TokenizerError(
            f"{name!r}: no such file or folder; wanted 'byte', 'byte:<offset>', a .model file, a "
            "tokenizer.json, a folder with one of them, or a hub id like 'owner/name'"
        )
    from shardmill.tokenizers.huggingface import open_pretrained

    return open_pretrained(name, specials=specials, revision=revision)


def _open_file(path: Path, specials: Mapping[str, str] | None) -> Tokenizer:
    if path.suffix not in FILE_KINDS:
        raise TokenizerError(f"{path}: wanted a .model file (SentencePiece) or a tokenizer.json")
    kind = import_module(FILE_KINDS[path.suffix])
    return cast(Tokenizer, kind.open_file(path, specials=specials))


def _open_folder(
    folder: Path, specials: Mapping[str, str] | None, revision: str | None
) -> Tokenizer:
    if revision is not None:
        raise OptionError(f"{{revision}} is for hub ids; {folder} is a folder", revision=revision)
    config = folder / "tokenizer.json"
    if config.is_file():
        return _open_file(config, specials)
    models = sorted(
        path for path in folder.iterdir() if path.suffix in FILE_KINDS and path.suffix != ".json"
    )
    if len(models) == 1 and not (folder / "tokenizer_config.json").is_file():
        return _open_file(models[0], specials)
    if not any(folder.glob("*.json")):
        raise TokenizerError(
            f"{folder}: found {len(models)} .model files and no tokenizer.json; wanted one of "
            "them; name the file itself"
        )
    from shardmill.tokenizers.huggingface import open_pretrained

    return open_pretrained(str(folder), specials=specials, revision=None)


def adapt_tokenizer(obj: Any) -> Tokenizer:
    """A Tokenizer for any object with `encode`; one of ours is returned as it is.

    A library's own tokenizer object is opened by its model, so that text cannot become structure.
    Any other object must keep that guarantee itself.
    """
    if any(kind.__module__.startswith("shardmill.tokenizers.") for kind in type(obj).__mro__):
        return cast(Tokenizer, obj)
    if hasattr(obj, "serialized_model_proto"):
        from shardmill.tokenizers.sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer(obj.serialized_model_proto())
    if type(obj).__module__.partition(".")[0] in ("tokenizers", "transformers"):
        from shardmill.tokenizers.huggingface import from_library

        return from_library(obj, "this object", specials=None)
    if not callable(getattr(obj, "encode", None)):
        raise TokenizerError(
            f"{type(obj).__name__} has no encode(text) method; wanted an object with "
            "encode(text) -> ids, or open_tokenizer(...) for a file, folder or hub id"
        )
    return AdaptedTokenizer(obj)


def vocab_size_of(obj: object) -> int | None:
    """The size of the vocabulary, from an attribute or a method; None if there is neither."""
    found = getattr(obj, "vocab_size", None)
    found = found() if callable(found) else found
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


class UnknownVocabularyError(TokenizerError, AttributeError):
    """The adapted object does not say how many ids it has; `vocab_size_of` is then None."""


class AdaptedTokenizer:
    """A user's object as a Tokenizer. Its ids are checked to be whole numbers >= 0."""

    unknown_id: int | None = None

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        self.known_vocab_size = vocab_size_of(obj)
        self.model_sha256 = model_sha256_of(obj)

    @property
    def vocab_size(self) -> int:
        if self.known_vocab_size is None:
            raise UnknownVocabularyError(
                f"{type(self._obj).__name__} has no vocab_size; give it one, or pass {{dtype}} "
                "(or uint32)",
                dtype="uint16",
            )
        return self.known_vocab_size

    @cached_property
    def fingerprint(self) -> str:
        """The object's own; else a hash of its model file; else of its ids for fixed texts."""
        own = getattr(self._obj, "fingerprint", None)
        own = own() if callable(own) else own
        if isinstance(own, str) and own:
            return own if re.fullmatch("[0-9a-f]{64}", own) else sha256_hex(own.encode())
        kind = f"{type(self._obj).__module__}.{type(self._obj).__qualname__}"
        if self.model_sha256 is not None:
            return fingerprint_of({"kind": kind, "model": self.model_sha256})
        ids = [probe(self.encode, text) for text in short_texts() if text]
        return fingerprint_of({"kind": kind, "ids": cast("list[Any]", ids)})

    @property
    def engine_source(self) -> EngineSource | None:
        return engine_source_of(self._obj)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = _whole_numbers(self._obj.encode(text), text).tolist()
        return ids

    def encode_batch(self, texts: Texts) -> Ragged:
        listed = as_list(texts)
        batch: Callable[[list[str]], Any] | None = getattr(self._obj, "encode_batch", None)
        found = map(self._obj.encode, listed) if batch is None else batch(listed)
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

    def __repr__(self) -> str:
        return f"AdaptedTokenizer({type(self._obj).__name__}, vocab_size={self.known_vocab_size})"


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
