"""What all tokenizers share: texts as engines take them, special tokens, and decoding; and bytes.

An engine takes a list of str, or one UTF-8 buffer with offsets; the buffer of an Arrow array is
used without a copy. Nulls and lone surrogates are refused by number, never replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError, TokenizerError
from shardmill.protocols import Texts
from shardmill.records import JSON, IntArray, OffsetArray, Ragged

_log = logging.getLogger(__name__)

DEFAULT_SPECIALS: Mapping[str, str] = {
    "sys": "<|sys|>",
    "usr": "<|usr|>",
    "asst": "<|asst|>",
    "eot": "<|eot|>",
}

USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "bos": ("bos", "<s>", "begin_of_text"),
    "eos": ("eos", "</s>", "eot", "endoftext", "end_of_text"),
    "pad": ("pad", "<pad>", "[PAD]"),
}
"""What the start and the end of a document and padding may be called, the best name first."""


def usual_id(role: str, named: Mapping[str, int]) -> int | None:
    """The id for "bos", "eos" or "pad" among named special tokens; another name is logged."""
    found = next((name for name in USUAL_NAMES[role] if name in named), None)
    if found is None:
        return None
    if found != role:
        _log.info("no special token is called %s; using %s (%d)", role, found, named[found])
    return named[found]


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
    added_tokens: tuple[str, ...] = ()  # that are matched in text
    library: str  # the reference engine, for produced_by
    library_version: str


def engine_source_of(tokenizer: object) -> EngineSource | None:
    """What fast engines are made from; None for a tokenizer that has none, as a user's own."""
    return cast("EngineSource | None", getattr(tokenizer, "engine_source", None))


class TokenizerWithSpecials(ABC):
    """What the tokenizers of this package share: text and special tokens are kept apart.

    `special_names` maps names to ids, `special_strings` maps every special id, also one without a
    name, to its literal string.
    """

    special_names: dict[str, int]
    special_strings: dict[int, str]

    @abstractmethod
    def encode_batch(self, texts: Texts) -> Ragged: ...

    @abstractmethod
    def _decode_text(self, ids: IntArray) -> str:
        """Decode ids of which none is special."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_batch([text]).values.tolist()
        return ids

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text, with each special as its literal string; no token is lost.

        Every run between two specials is decoded separately, as it was encoded: a tokenizer that
        marks the start of a text marks it once per run.
        """
        array: IntArray = np.asarray(ids, np.int64)
        if array.ndim != 1:
            raise TokenizerError(f"decode takes one sequence of ids, not an array {array.shape}")
        parts: list[str] = []
        start = 0
        for at in np.flatnonzero(np.isin(array, sorted(self.special_strings))).tolist():
            if at > start:
                parts.append(self._decode_text(array[start:at]))
            parts.append(self.special_strings[int(array[at])])
            start = at + 1
        if start < len(array):
            parts.append(self._decode_text(array[start:]))
        return "".join(parts)

    def special_token_ids(self) -> dict[str, int]:
        return dict(self.special_names)

    def marker_id(self, text: str) -> int | None:
        """The id of the special token with this literal string, named or not; of several, the
        last one that was named."""
        return {literal: number for number, literal in self.special_strings.items()}.get(text)

    def _refuse_unknown(self, ids: IntArray, is_unknown: npt.NDArray[np.bool_]) -> None:
        if is_unknown.any():
            raise TokenizerError(
                f"{self!r}: id {int(ids[is_unknown][0]):,} is not in the vocabulary; these tokens "
                "come from another tokenizer"
            )


def short_name(literal: str) -> str:
    """The name of a special: eot for `<|eot|>`, the string itself for anything else."""
    if len(literal) > 4 and literal.startswith("<|") and literal.endswith("|>"):
        return literal[2:-2]
    return literal


def read_meta(model: Path, model_sha256: str) -> tuple[dict[str, int], dict[str, str]]:
    """The special tokens in the `meta.json` beside a model: name to id, and name to string.

    Both are empty if there is no such file. One that describes another model is an error.
    """
    path = model.parent / "meta.json"
    if not path.is_file():
        return {}, {}
    meta = read_json(path)
    if not isinstance(meta, dict):
        raise TokenizerError(f"{path}: found {type(meta).__name__}, wanted a JSON object")
    named = meta.get("model_sha256")
    if named is not None and named != model_sha256:
        raise TokenizerError(
            f"{path} describes a model with sha256 {named}, but {model.name} has {model_sha256}; "
            "put the right meta.json beside it, or train again"
        )
    ids, strings = meta.get("special_token_ids"), meta.get("special_tokens")
    ids = {} if ids is None else ids
    if not isinstance(ids, dict) or not all(type(number) is int for number in ids.values()):
        raise TokenizerError(f"{path}: special_token_ids is {ids!r}, wanted name to id")
    texts = strings.items() if isinstance(strings, dict) else ()
    return ids, {name: str(text) for name, text in texts}


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise TokenizerError(f"{path}: not JSON ({problem}); remove or repair it") from problem


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


def slices(texts: Sequence[str], num_characters: int) -> Iterator[list[str]]:
    """The texts in lists of up to `num_characters` together, at least one text each."""
    start = size = 0
    for stop, text in enumerate(texts):
        if size and size + len(text) > num_characters:
            yield list(texts[start:stop])
            start, size = stop, 0
        size += len(text)
    if start < len(texts):
        yield list(texts[start:])


def parts_of(texts: Texts, num_bytes: int) -> Iterator[list[str]]:
    """Python strings, in lists of about `num_bytes` of text; without texts one empty list.

    Of an Arrow array each list is made when it is needed, so that it is still in a cache then.
    """
    if not len(texts):
        yield []
    elif is_arrow(texts):
        array = cast(Any, texts)
        offsets = _arrow_buffer(array)[1]
        edges = np.searchsorted(offsets, np.arange(num_bytes, offsets[-1], num_bytes))
        for start, stop in pairwise(np.unique([0, *edges, len(array)]).tolist()):
            yield as_list(array.slice(start, stop - start))
    else:
        yield from slices(as_list(texts), num_bytes)


MAX_OFFSET = 2**31 - 257


class ByteTokenizer(TokenizerWithSpecials):
    """256 ids for the bytes, after `byte_offset` ids that text cannot reach.

    `specials` maps a name to its literal string; they take the ids 0, 1, ... in order, so there
    may be at most `byte_offset` of them.
    """

    unknown_id: int | None = None
    engine_source: EngineSource | None = None

    def __init__(self, *, byte_offset: int = 0, specials: Mapping[str, str] | None = None) -> None:
        if not 0 <= byte_offset <= MAX_OFFSET:
            raise OptionError(
                f"{{byte_offset}}: wanted 0 to {MAX_OFFSET:,}", byte_offset=byte_offset
            )
        strings = dict(specials or {})
        if len(strings) > byte_offset:
            raise OptionError(
                f"{{byte_offset}}: {len(strings)} specials need at least {len(strings)}: open "
                f"'byte:{len(strings)}'",
                byte_offset=byte_offset,
            )
        self.byte_offset = byte_offset
        self._specials = strings
        self._dtype = np.min_scalar_type(self.vocab_size - 1)
        self.special_names = {name: number for number, name in enumerate(strings)}
        self.special_strings = dict(enumerate(strings.values()))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles as its options."""
        return partial(type(self), byte_offset=self.byte_offset, specials=self._specials), ()

    @property
    def vocab_size(self) -> int:
        return 256 + self.byte_offset

    @property
    def fingerprint(self) -> str:
        return fingerprint_of({"kind": "byte", "byte_offset": self.byte_offset})

    def encode_batch(self, texts: Texts) -> Ragged:
        buffer, offsets = utf8_buffer(texts)
        return Ragged(buffer.astype(self._dtype) + self._dtype.type(self.byte_offset), offsets)

    def spans(self, text: str) -> OffsetArray:
        """(n, 2) the characters start..stop of each token; a byte gets its whole character."""
        return character_spans(text, np.ones(len(text.encode()), np.int64))

    def round_trips(self, text: str) -> bool:  # noqa: ARG002 - other kinds look at the text
        return True

    def _decode_text(self, ids: IntArray) -> str:
        """Invalid UTF-8 (a window cut inside a character) shows as U+FFFD."""
        self._refuse_unknown(ids, (ids < self.byte_offset) | (ids >= self.vocab_size))
        return (ids - self.byte_offset).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"ByteTokenizer(byte_offset={self.byte_offset}, vocab_size={self.vocab_size})"
