"""Texts in the forms that engines take: a list of str, or one UTF-8 buffer with offsets.

The buffer of an Arrow array is used without a copy. Nulls and lone surrogates are refused by
number, never replaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from shardmill.errors import TokenizerError
from shardmill.records import JSON, OffsetArray

if TYPE_CHECKING:
    from shardmill.protocols import Texts


def as_list(texts: Texts) -> list[str]:
    """Python strings, one per text."""
    if isinstance(texts, list):
        return texts
    if is_arrow(texts):
        _refuse_nulls(texts)
        return cast("list[str]", cast(Any, texts).to_pylist())
    return list(cast("Sequence[str]", texts))


def character_spans(text: str, sizes: OffsetArray) -> OffsetArray:
    """(n, 2) the characters start..stop of consecutive pieces of `sizes` bytes each.

    A piece of a character gets all of it: sizes [1 1 2] of "\u00e9ab" -> [0 1] [0 1] [1 3].
    """
    data = np.frombuffer(text.encode(), np.uint8)
    begun = np.zeros(len(data) + 1, np.int64)  # characters that begin before each byte
    np.cumsum((data & 0xC0) != 0x80, out=begun[1:])  # any but the first is 10xxxxxx
    stops = np.cumsum(sizes)
    starts = begun[np.minimum(stops - sizes + 1, len(data))] - 1
    return np.stack((np.where(sizes > 0, starts, begun[stops]), begun[stops]), axis=1)


def utf8_buffer(texts: Texts) -> tuple[npt.NDArray[np.uint8], OffsetArray]:
    """The bytes of all texts, concatenated, and the offset of each.

    An Arrow array is not copied; a list is encoded once.
    """
    if is_arrow(texts):
        return _arrow_buffer(cast(Any, texts))
    listed = as_list(texts)
    offsets = np.zeros(len(listed) + 1, np.int64)
    try:
        encoded = [text.encode() for text in listed]
    except UnicodeEncodeError as problem:
        raise surrogate_error(listed) from problem
    np.cumsum([len(part) for part in encoded], out=offsets[1:])
    return np.frombuffer(b"".join(encoded), np.uint8), offsets


def num_bytes(texts: Texts) -> OffsetArray:
    """UTF-8 bytes of each text."""
    if is_arrow(texts):
        return np.diff(_arrow_buffer(cast(Any, texts))[1])
    # An ASCII str knows its size; only the others are encoded to be measured.
    return np.array(
        [
            len(text) if text.isascii() else len(text.encode(errors="replace"))
            for text in as_list(texts)
        ],
        np.int64,
    )


def surrogate_error(texts: Sequence[object]) -> TokenizerError:
    """Which text an engine refused, and why. Call it after an engine refused a batch."""
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            return TokenizerError(
                f"text {index} of {len(texts)} is {type(text).__name__}, wanted str; "
                "a source gives documents as str"
            )
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            return TokenizerError(
                f"text {index} of {len(texts)}: character {problem.start} is the lone surrogate "
                f"{text[problem.start]!r}, which is not valid Unicode; replace it before encoding "
                "(text.encode('utf-8', 'replace').decode())"
            )
    return TokenizerError(f"an engine refused {len(texts)} texts that are all valid Unicode")


def is_arrow(texts: object) -> bool:
    """Whether this is an Arrow array, without importing pyarrow."""
    return type(texts).__module__.startswith("pyarrow")


def _arrow_buffer(array: Any) -> tuple[npt.NDArray[np.uint8], OffsetArray]:
    _refuse_nulls(array)
    if str(array.type) not in ("string", "large_string"):
        raise TokenizerError(f"texts are an Arrow array of {array.type}, wanted strings")
    _, offset_buffer, data = array.buffers()
    if len(array) == 0 or offset_buffer is None:
        return np.empty(0, np.uint8), np.zeros(len(array) + 1, np.int64)
    width = np.dtype(np.int64 if str(array.type) == "large_string" else np.int32)
    offsets = np.frombuffer(offset_buffer, width, len(array) + 1, array.offset * width.itemsize)
    offsets = offsets.astype(np.int64)
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return values[offsets[0] : offsets[-1]], offsets - offsets[0]


def _refuse_nulls(array: Any) -> None:
    if array.null_count:
        raise TokenizerError(
            f"{array.null_count:,} of {len(array):,} texts are null; a source counts a missing "
            "text as empty and leaves it out"
        )


def fingerprint_of(facts: Mapping[str, JSON]) -> str:
    """sha256 of the facts as canonical JSON; the facts must decide every id of a tokenizer."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource:
    """What a fast engine is made from: the reference's model, with its specials hidden."""

    kind: str  # "tokenizer.json" or "sentencepiece"
    model: bytes  # the file's contents; special strings replaced by names no text can hold
    facts: Mapping[str, JSON]  # model type, byte fallback, ...: what decides which engine fits
    library: str  # the reference engine, for produced_by
    library_version: str
