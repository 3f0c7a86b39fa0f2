"""SentencePiece tokenizers from a `.model` file, and their training.

Encoding is one library call per batch and returns arrays, no Python ints.
"""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from shardmill.errors import TokenizerError, missing_extra
from shardmill.protocols import Texts
from shardmill.records import IntArray, OffsetArray, Ragged
from shardmill.tokenizers.base import (
    EngineSource,
    TokenizerWithSpecials,
    as_list,
    fingerprint_of,
    read_meta,
    sha256_hex,
    short_name,
    surrogate_error,
)

try:
    import sentencepiece as library
except ImportError as missing:
    raise missing_extra("sentencepiece", "sentencepiece") from missing

SPACE_PIECE = "\u2581"
_Kind = TypeVar("_Kind", int, bytes)
_USUAL_NAMES = {"<s>": "bos", "</s>": "eos", "<pad>": "pad"}

# The layout of a model file is the public sentencepiece_model.proto, read here without a protobuf
# library: field 1 = piece (1 text, 2 score, 3 type), 2 = trainer, 3 = normaliser, 4 = self test.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_PIECES, _TRAINER, _NORMALIZER, _SELF_TEST = 1, 2, 3, 4
_TEXT, _TYPE = 1, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_CHARSMAP, _EXTRA_WHITESPACE, _ESCAPE = 2, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model file says about itself."""

    pieces: tuple[str, ...]  # by id
    types: tuple[int, ...]  # by id: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE
    model_type: str  # "unigram", "bpe", "word" or "char"
    byte_fallback: bool  # characters outside the vocabulary become bytes, not unknown
    identity: bool  # the normaliser changes no character
    keeps_whitespace: bool  # runs, leading and trailing whitespace stay
    escapes_whitespace: bool  # a space is stored as U+2581


def read_facts(data: bytes) -> ModelFacts:
    pieces: list[str] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value, _ in _fields(data):
        if field == _PIECES:
            parts = _message(value)
            text: bytes = _checked(parts.get(_TEXT, b""), bytes)
            pieces.append(text.decode("utf-8", "surrogateescape"))
            types.append(_checked(parts.get(_TYPE, NORMAL), int))
        elif field == _TRAINER:
            trainer = _message(value)
        elif field == _NORMALIZER:
            normalizer = _message(value)
    if not pieces:
        raise TokenizerError("not a SentencePiece model: it holds no pieces")
    return ModelFacts(
        pieces=tuple(pieces),
        types=tuple(types),
        model_type=_MODEL_TYPES.get(_checked(trainer.get(_MODEL_TYPE, 1), int), "unknown"),
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
        identity=not normalizer.get(_CHARSMAP, b""),
        keeps_whitespace=not normalizer.get(_EXTRA_WHITESPACE, 1),
        escapes_whitespace=bool(normalizer.get(_ESCAPE, 1)),
    )


def hide_pieces(data: bytes, hidden: Mapping[int, str]) -> bytes:
    """The model with each piece `id` of `hidden` turned into a control piece of that name.

    A control piece keeps its id and is never matched in text. The self test is left out, since it
    may hold hidden pieces. Everything else is copied.
    """
    out: list[bytes] = []
    number = 0
    for field, value, raw in _fields(data):
        if field == _PIECES:
            if number in hidden:
                raw = _field(_PIECES, _renamed(value, hidden[number]))
            number += 1
        if field != _SELF_TEST:
            out.append(raw)
    return b"".join(out)


def _renamed(piece: int | bytes, name: str) -> bytes:
    kept = b"".join(
        raw for field, _, raw in _fields(_checked(piece, bytes)) if field not in (_TEXT, _TYPE)
    )
    return _field(_TEXT, name.encode()) + kept + _varint(_TYPE << 3 | _VARINT) + _varint(CONTROL)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Each field of a message: its number, its value, and its own bytes."""
    at = 0
    while at < len(data):
        start = at
        key, at = _read_varint(data, at)
        kind = key & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        elif kind in (_BYTES, _FIXED32, _FIXED64):
            size = {_FIXED32: 4, _FIXED64: 8}.get(kind)
            if size is None:
                size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            raise TokenizerError(f"not a SentencePiece model: wire type {kind} at byte {start:,}")
        if at > len(data):
            raise TokenizerError(
                f"the SentencePiece model is cut short: a field at byte {start:,} ends at "
                f"{at:,}, the data at {len(data):,}; copy the file again"
            )
        yield key >> 3, value, data[start:at]


def _message(value: int | bytes) -> dict[int, int | bytes]:
    return {field: part for field, part, _ in _fields(_checked(value, bytes))}


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and the offset after it."""
    result = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        result |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return result, at
    raise TokenizerError(f"not a SentencePiece model: a number does not end at byte {at:,}")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _checked(value: int | bytes, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind):
        found = type(value).__name__
        raise TokenizerError(f"not a SentencePiece model: {found} where {kind.__name__} belongs")
    return value


class SentencePieceTokenizer(TokenizerWithSpecials):
    """A `.model` file.

    The specials are the first of these: `specials` (name to piece); `special_token_ids` of a
    meta.json beside the model; the pieces written `<|...|>` and the control pieces. Text never
    becomes a special id; all other ids are SentencePiece's own. Decoding shows a special as its
    literal string and drops no token. `num_threads` changes speed, never ids.
    """

    def __init__(
        self,
        model: str | Path | bytes,
        *,
        specials: Mapping[str, str] | None = None,
        num_threads: int = 1,
    ) -> None:
        path = None if isinstance(model, bytes) else Path(model)
        try:
            data = model if isinstance(model, bytes) else Path(model).read_bytes()
        except OSError as problem:
            raise TokenizerError(f"{path}: cannot be read: {problem.strerror}") from problem
        self.model_path = path
        self.model_bytes = data
        self.model_sha256 = sha256_hex(data)
        try:
            self._facts = read_facts(data)
        except TokenizerError as problem:
            raise TokenizerError(f"{path or 'model'}: {problem}") from problem
        self.special_names = _find_specials(self._facts, path, self.model_sha256, specials)
        control = {n for n, kind in enumerate(self._facts.types) if kind == CONTROL}
        self._hidden = sorted(control | set(self.special_names.values()))
        # Names that no text can hold, for engines that match the pieces of a model by name.
        nonce = secrets.token_hex(16)
        self._patched = hide_pieces(
            data, {number: f"<{nonce}-{number}>" for number in self._hidden}
        )
        self._num_threads = num_threads
        try:
            self._processor = library.SentencePieceProcessor(model_proto=self._patched)
        except (RuntimeError, OSError, ValueError) as problem:
            raise TokenizerError(
                f"{path or 'model'}: SentencePiece refuses it: {problem}"
            ) from problem
        self.special_strings = {number: self._facts.pieces[number] for number in self._hidden}

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles as the model's bytes; the path is only a name, and no file is read again."""
        specials = {name: self._facts.pieces[number] for name, number in self.special_names.items()}
        make = partial(type(self), specials=specials, num_threads=self._num_threads)
        return make, (self.model_bytes,), {"model_path": self.model_path}

    @property
    def vocab_size(self) -> int:
        return len(self._facts.pieces)

    @property
    def fingerprint(self) -> str:
        """Covers the library's version: releases give other ids for the same unigram model."""
        return fingerprint_of(
            {
                "kind": "sentencepiece",
                "model_sha256": self.model_sha256,
                "hidden": list(self._hidden),
                "sentencepiece": library.__version__,
            }
        )

    @property
    def unknown_id(self) -> int | None:
        return self._facts.types.index(UNKNOWN) if UNKNOWN in self._facts.types else None

    @property
    def engine_source(self) -> EngineSource:
        facts = self._facts
        return EngineSource(
            kind="sentencepiece",
            model=self._patched,
            facts={
                "model_type": facts.model_type,
                "byte_fallback": facts.byte_fallback,
                "identity": facts.identity and facts.keeps_whitespace,
            },
            library="sentencepiece",
            library_version=library.__version__,
        )

    def encode_batch(self, texts: Texts) -> Ragged:
        listed = as_list(texts)
        if not listed:
            return Ragged(np.empty(0, np.int32), np.zeros(1, np.int64))
        try:
            parts = self._processor.encode(
                listed, return_type="numpy", num_threads=self._num_threads
            )
        except (TypeError, UnicodeError) as problem:
            raise surrogate_error(listed) from problem
        return Ragged.from_lengths(np.concatenate(parts), [len(part) for part in parts])

    def spans(self, text: str) -> OffsetArray:
        """(n, 2) the characters start..stop of each token; a space put in front has none."""
        found = self._processor.encode(text, return_type="offset_mapping")
        spans = np.array(found["offsets"], np.int64).reshape(-1, 2)
        kinds = np.array(self._facts.types, np.int64)[found["ids"]]
        # Only the last byte of a character has its span; the other bytes get the same one.
        empty = (spans[:, 0] == spans[:, 1]) & (kinds == BYTE)
        for number in np.flatnonzero(empty)[::-1].tolist():
            spans[number, 1] = spans[min(number + 1, len(spans) - 1), 1]
        return spans

    def round_trips(self, text: str) -> bool:
        """Whether decode(encode(text)) == text for sure; U+2581 is decoded as a space."""
        facts = self._facts
        exact = facts.byte_fallback and facts.identity and facts.keeps_whitespace
        return exact and facts.escapes_whitespace and SPACE_PIECE not in text

    def _decode_text(self, ids: IntArray) -> str:
        self._refuse_unknown(ids, (ids < 0) | (ids >= self.vocab_size))
        text: str = self._processor.decode(ids.tolist())
        return text

    def __repr__(self) -> str:
        name = self.model_path.name if self.model_path else "model"
        kind = self._facts.model_type
        return f"SentencePieceTokenizer({name!r}, {kind}, vocab_size={self.vocab_size})"


def open_file(path: Path, *, specials: Mapping[str, str] | None) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(path, specials=specials)


def _find_specials(
    facts: ModelFacts, path: Path | None, sha256: str, specials: Mapping[str, str] | None
) -> dict[str, int]:
    if specials is not None:
        return {name: _piece_id(facts, name, text) for name, text in specials.items()}
    named, _ = read_meta(path, sha256) if path else ({}, {})
    for name, number in named.items():
        if not 0 <= number < len(facts.pieces) or facts.types[number] == UNKNOWN:
            raise TokenizerError(
                f"meta.json beside {path}: special {name!r} has id {number}, which cannot be "
                f"special (the model has {len(facts.pieces):,} pieces); remove or repair it"
            )
    if named:
        return dict(sorted(named.items(), key=lambda item: item[1]))
    return {
        _USUAL_NAMES.get(text, short_name(text)): number
        for number, (text, kind) in enumerate(zip(facts.pieces, facts.types, strict=True))
        if kind == CONTROL
        or (kind == USER_DEFINED and text.startswith("<|") and text.endswith("|>"))
    }


def _piece_id(facts: ModelFacts, name: str, text: str) -> int:
    if text not in facts.pieces:
        known = [
            p
            for p, k in zip(facts.pieces, facts.types, strict=True)
            if k in (CONTROL, USER_DEFINED)
        ]
        raise TokenizerError(
            f"special {name!r}: {text!r} is not one piece of this model; its control and "
            f"user-defined pieces are {known[:20]}"
        )
    return facts.pieces.index(text)


_QUIET = 2  # errors only
_THREADS = 8
"""Fixed, because the bytes of the model depend on it: thread n sums the lines n, n + 8, ... and the
sums are added in order. So they do not depend on the machine's cores."""


def train_sentencepiece(
    chunks: Sequence[str], vocab_size: int, specials: Mapping[str, str], *, model_type: str
) -> bytes:
    """The bytes of a `.model`.

    Id 0 is unknown (never used: bytes are), then the specials as control pieces, then the 256
    bytes. No character is changed, no whitespace removed, no space put before a text. So the ids of
    two texts, concatenated, decode to the two texts. The bytes do not depend on the machine.
    """
    writer = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=_lines(chunks),
            model_writer=writer,
            model_type=model_type,
            vocab_size=vocab_size,
            control_symbols=list(specials.values()),
            bos_id=-1,
            eos_id=-1,
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=2**20,
            num_threads=_THREADS,
            minloglevel=_QUIET,
        )
    except RuntimeError as problem:
        raise _explain(str(problem), vocab_size) from problem
    return writer.getvalue()


def _lines(chunks: Sequence[str]) -> Iterator[str]:
    """Non-empty lines without their end: a newline is its own byte id."""
    for chunk in chunks:
        for line in chunk.split("\n"):
            if line:
                yield line


def _explain(message: str, vocab_size: int) -> TokenizerError:
    high = re.search(r"Vocabulary size too high .*?<= (\d+)", message)
    if high:
        return TokenizerError(
            "{vocab_size} is more than this text can fill; the largest possible is "
            f"{int(high[1]):,}: give that, or more text",
            vocab_size=vocab_size,
        )
    low = re.search(r"smaller than required_chars\. \d+ vs (\d+)", message)
    if low:
        return TokenizerError(
            "{vocab_size} is less than the specials, bytes and characters of this text need; the "
            f"smallest possible is {int(low[1]):,}",
            vocab_size=vocab_size,
        )
    return TokenizerError(f"SentencePiece could not train: {message}")
