"""SentencePiece models: a `.model` file becomes a tokenizer. The one importer of sentencepiece.

In: a path or the file's bytes.  Out: a Tokenizer.
Promise: text never becomes a special id (control pieces, and user-defined pieces that are named
special, are hidden from matching; all other ids are SentencePiece's own); decoding shows a special
as its literal string and drops no token.
Cost: one engine call per batch; arrays, no Python ints.
Not here: training, fast engines.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shardmill.errors import TokenizerError, missing_extra
from shardmill.protocols import Texts
from shardmill.records import IntArray, OffsetArray, Ragged
from shardmill.tokenizer.identity import EngineSource, fingerprint_of, sha256_hex
from shardmill.tokenizer.model_proto import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    ModelFacts,
    hide_pieces,
    read_facts,
)
from shardmill.tokenizer.specials import SpecialRuns, names_in_meta, read_meta, short_name
from shardmill.tokenizer.texts import as_list, surrogate_error

try:
    import sentencepiece as library
except ImportError as missing:
    raise missing_extra("sentencepiece", "sentencepiece") from missing

__all__ = ["SentencePieceTokenizer", "library"]

SPACE_PIECE = "\u2581"
_USUAL_NAMES = {"<s>": "bos", "</s>": "eos", "<pad>": "pad"}


class SentencePieceTokenizer:
    """A `.model` file.

    Specials are, in this order: `specials` (name to piece); `special_token_ids` of a meta.json
    beside the model; else the pieces written `<|...|>` and the control pieces.
    `num_threads` changes speed, never ids.
    """

    def __init__(
        self,
        model: str | Path | bytes,
        *,
        specials: Mapping[str, str] | None = None,
        num_threads: int = 1,
    ) -> None:
        path = None if isinstance(model, bytes) else Path(model)
        data = model if isinstance(model, bytes) else _read(Path(model))
        self.model_path = path
        self.model_bytes = data
        self.model_sha256 = sha256_hex(data)
        try:
            self._facts = read_facts(data)
        except TokenizerError as problem:
            raise TokenizerError(f"{path or 'model'}: {problem}") from problem
        self._special_ids = _find_specials(self._facts, path, self.model_sha256, specials)
        self._hidden = _hidden_pieces(self._facts, self._special_ids)
        # A name no text can hold, for engines that look for the pieces of a model by name.
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
        self._runs = SpecialRuns({number: self._facts.pieces[number] for number in self._hidden})

    def __reduce__(self) -> tuple[object, ...]:
        """By its model's bytes, what its specials are called, and its threads; the path only names
        it: no file is looked for."""
        specials = {name: self._facts.pieces[number] for name, number in self._special_ids.items()}
        return _reopened, (
            *(type(self), self.model_bytes, specials),
            *(self._num_threads, self.model_path),
        )

    @property
    def vocab_size(self) -> int:
        return len(self._facts.pieces)

    @property
    def fingerprint(self) -> str:
        """The library's version counts: releases give other ids for the same unigram model."""
        return fingerprint_of(
            {
                "kind": "sentencepiece",
                "model_sha256": self.model_sha256,
                "hidden": list(self._hidden),
                "sentencepiece": library.__version__,
            }
        )

    @property
    def model_type(self) -> str:
        return self._facts.model_type

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

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_batch([text]).values.tolist()
        return ids

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

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        return self._runs.decode(np.asarray(ids, np.int64), self._decode_text)

    def spans(self, text: str) -> OffsetArray:
        """(n, 2) the characters start..stop of each token; a space put in front has none."""
        found = self._processor.encode(text, return_type="offset_mapping")
        spans = np.array(found["offsets"], np.int64).reshape(-1, 2)
        kinds = np.array(self._facts.types, np.int64)[found["ids"]]
        # Of the bytes of a character the last one has it; it is that of the others too.
        empty = (spans[:, 0] == spans[:, 1]) & (kinds == BYTE)
        for place in np.flatnonzero(empty)[::-1].tolist():
            spans[place, 1] = spans[min(place + 1, len(spans) - 1), 1]
        return spans

    def special_token_ids(self) -> dict[str, int]:
        return dict(self._special_ids)

    def marker_id(self, text: str) -> int | None:
        """The special token that this literal string is, named or not; None when it is none."""
        return self._runs.id_of(text)

    def round_trips(self, text: str) -> bool:
        """Whether decode(encode(text)) == text is promised: U+2581 is SentencePiece's own space."""
        facts = self._facts
        exact = facts.byte_fallback and facts.identity and facts.keeps_whitespace
        return exact and facts.escapes_whitespace and SPACE_PIECE not in text

    def _decode_text(self, ids: IntArray) -> str:
        wrong = (ids < 0) | (ids >= self.vocab_size)
        if wrong.any():
            raise TokenizerError(
                f"{self!r}: id {int(ids[wrong][0]):,} is not in the vocabulary; these tokens come "
                "from another tokenizer"
            )
        text: str = self._processor.decode(ids.tolist())
        return text

    def __repr__(self) -> str:
        name = self.model_path.name if self.model_path else "model"
        return f"SentencePieceTokenizer({name!r}, {self.model_type}, vocab_size={self.vocab_size})"


def _reopened(
    kind: type[SentencePieceTokenizer],
    model: bytes,
    specials: dict[str, str],
    num_threads: int,
    path: Path | None,
) -> SentencePieceTokenizer:
    tokenizer = kind(model, specials=specials, num_threads=num_threads)
    tokenizer.model_path = path
    return tokenizer


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise TokenizerError(f"{path}: cannot be read: {problem.strerror}") from problem


def _hidden_pieces(facts: ModelFacts, names: Mapping[str, int]) -> tuple[int, ...]:
    control = {number for number, kind in enumerate(facts.types) if kind == CONTROL}
    return tuple(sorted(control | set(names.values())))


def _find_specials(
    facts: ModelFacts, path: Path | None, sha256: str, specials: Mapping[str, str] | None
) -> dict[str, int]:
    if specials is not None:
        return {name: _piece_id(facts, name, text) for name, text in specials.items()}
    meta = read_meta(path, sha256) if path else None
    named = names_in_meta(meta, path.parent / "meta.json") if meta and path else {}
    for name, number in named.items():
        if not 0 <= number < len(facts.pieces) or facts.types[number] == UNKNOWN:
            raise TokenizerError(
                f"meta.json beside {path}: special {name!r} has id {number}, but the model has "
                f"{len(facts.pieces):,} pieces and that is none it could be; remove or repair it"
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
