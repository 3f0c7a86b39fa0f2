"""Read and change a SentencePiece `.model` file without a protobuf library.

In: the file's bytes.  Out: its pieces and the few settings that decide ids; or the bytes with some
pieces hidden.
Promise: a hidden piece keeps its id and can no longer be matched in text; all else is copied.
Not here: encoding. The layout is the public `sentencepiece_model.proto`: message field 1 = piece
(1 text, 2 score, 3 type), 2 = trainer, 3 = normaliser, 4 = self test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardmill.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}

_PIECES, _TRAINER, _NORMALIZER, _SELF_TEST = 1, 2, 3, 4
_TEXT, _TYPE = 1, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_WHITESPACE, _ESCAPE = 2, 3, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model file says about itself."""

    pieces: tuple[str, ...]  # by id
    types: tuple[int, ...]  # by id: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE
    model_type: str  # "unigram", "bpe", "word" or "char"
    byte_fallback: bool  # characters outside the vocabulary become bytes, not unknown
    identity: bool  # the normaliser changes no character
    keeps_whitespace: bool  # runs, leading and trailing whitespace stay
    dummy_prefix: bool  # a space is put before every text
    escapes_whitespace: bool  # a space is stored as U+2581


def read_facts(data: bytes) -> ModelFacts:
    pieces: list[str] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value, _ in _fields(data):
        if field == _PIECES:
            parts = _message(value)
            pieces.append(_bytes(parts.get(_TEXT, b"")).decode("utf-8", "surrogateescape"))
            types.append(_int(parts.get(_TYPE, NORMAL)))
        elif field == _TRAINER:
            trainer = _message(value)
        elif field == _NORMALIZER:
            normalizer = _message(value)
    if not pieces:
        raise TokenizerError("not a SentencePiece model: it holds no pieces")
    return ModelFacts(
        pieces=tuple(pieces),
        types=tuple(types),
        model_type=_MODEL_TYPES.get(_int(trainer.get(_MODEL_TYPE, 1)), "unknown"),
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
        identity=not normalizer.get(_CHARSMAP, b""),
        keeps_whitespace=not normalizer.get(_EXTRA_WHITESPACE, 1),
        dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        escapes_whitespace=bool(normalizer.get(_ESCAPE, 1)),
    )


def hide_pieces(data: bytes, hidden: Mapping[int, str]) -> bytes:
    """The model with each piece `id` of `hidden` turned into a control piece of that name.

    Control pieces are never matched in text. The self test is left out: it may hold hidden pieces.
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
    kept = b"".join(raw for field, _, raw in _fields(_bytes(piece)) if field not in (_TEXT, _TYPE))
    return _field(_TEXT, name.encode()) + kept + _varint(_TYPE << 3 | _VARINT) + _varint(CONTROL)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Each field of a message: its number, its value, and its own bytes."""
    place = 0
    while place < len(data):
        start = place
        key, place = _read_varint(data, place)
        kind = key & 7
        value: int | bytes
        if kind == _VARINT:
            value, place = _read_varint(data, place)
        elif kind in (_BYTES, _FIXED32, _FIXED64):
            size = {_FIXED32: 4, _FIXED64: 8}.get(kind)
            if size is None:
                size, place = _read_varint(data, place)
            value, place = data[place : place + size], place + size
        else:
            raise TokenizerError(f"not a SentencePiece model: wire type {kind} at byte {start:,}")
        if place > len(data):
            raise TokenizerError(
                f"the SentencePiece model is cut short: a field at byte {start:,} ends at "
                f"{place:,}, the data at {len(data):,}; copy the file again"
            )
        yield key >> 3, value, data[start:place]


def _message(value: int | bytes) -> dict[int, int | bytes]:
    return {field: part for field, part, _ in _fields(_bytes(value))}


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    result = shift = 0
    while place < len(data) and shift < 70:
        byte = data[place]
        result |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return result, place
    raise TokenizerError(f"not a SentencePiece model: a number does not end at byte {place:,}")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TokenizerError("not a SentencePiece model: a number where text was expected")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TokenizerError("not a SentencePiece model: text where a number was expected")
    return value
