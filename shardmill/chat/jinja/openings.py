"""Ids of texts that begin with a known opening, such as "user\\n", which is encoded once.

Every turn of a template begins with one, and a reference engine takes a quarter of its time for
them. An opening is split off only where the ids are those of the whole text, whatever follows:

- the tokenizer is byte-level BPE without a normaliser, the opening ends in a newline, and an ASCII
  letter or digit follows;
- no token of the vocabulary holds a newline and then a letter or digit. Merges join neighbours, so
  without such a token neither side changes the other;
- the tokenizer splits the two sides apart as it splits the whole, which is tried on each letter and
  digit with what may follow it.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.records import IntArray, Ragged

_FIRST = string.ascii_letters + string.digits
_REST = ("", "b", "'s", " b", "1", "\n", ".", "\u0301", "\u4e00")
_NONE: npt.NDArray[np.int64] = np.empty(0, np.int64)
_SPANS = re.compile("\u010a[A-Za-z0-9]")  # byte-level BPE writes a newline as U+010A


class Openings:
    """The openings that were found so far, and an encoder."""

    def __init__(self, encode: Callable[[Sequence[str]], Ragged], tokenizer: object) -> None:
        self._encode = encode
        self._tokenizer = tokenizer
        self._is_apart: bool | None = None  # whether no token spans the end of an opening
        self._known: dict[str, IntArray | None] = {"": None}  # None: it cannot be split off
        self._ids = Ragged.from_sequences(
            [_NONE]
        )  # of the openings of `_pattern`; none is number 0
        self._pattern: re.Pattern[str] | None = None

    def add(self, opening: str) -> None:
        """Split this opening off from now on, if its ids are then the same."""
        if opening in self._known:
            return
        self._known[opening] = self._ids_of(opening)
        found = [(text, ids) for text, ids in self._known.items() if ids is not None]
        if found:
            # Where a text begins with several, each gives the same ids.
            names = "|".join(f"({re.escape(text)})" for text, _ in found)
            self._pattern = re.compile(f"(?:{names})(?=[A-Za-z0-9])")
            self._ids = Ragged.from_sequences([_NONE, *(ids for _, ids in found)])

    def _ids_of(self, opening: str) -> IntArray | None:
        if not opening.endswith("\n"):
            return None
        if self._is_apart is None:
            self._is_apart = _is_apart(self._tokenizer)
        if not self._is_apart:
            return None
        rests = [first + rest for first in _FIRST for rest in _REST]
        encoded = self._encode([opening, *rests, *(opening + rest for rest in rests)])
        ids = encoded[0]
        for number, alone in enumerate(encoded.slice(1, 1 + len(rests))):
            if not np.array_equal(encoded[1 + len(rests) + number], [*ids, *alone]):
                return None
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Ragged:
        """The ids of each text."""
        if self._pattern is None:
            return self._encode(texts)
        match, rests, numbers = self._pattern.match, list[str](), list[int]()
        for text in texts:
            found = match(text)
            rests.append(text[found.end() :] if found else text)
            numbers.append((found.lastindex or 0) if found else 0)
        encoded, which = self._encode(rests), np.array(numbers, np.int64)
        # Openings and rests by turns; the ids of the openings are looked up in `_ids`.
        sizes = self._ids.lengths[which]
        runs = np.stack((sizes, encoded.lengths), axis=1).reshape(-1)
        is_rest = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        dtype = np.result_type(encoded.values.dtype, np.min_scalar_type(self._ids.values.max()))
        values: IntArray = np.empty(len(is_rest), dtype)
        values[is_rest] = encoded.values
        starts = self._ids.offsets[which] - (np.cumsum(sizes) - sizes)
        values[~is_rest] = self._ids.values[np.repeat(starts, sizes) + np.arange(sizes.sum())]
        return Ragged.from_lengths(values, sizes + encoded.lengths)


def _is_apart(tokenizer: Any) -> bool:
    """Whether a tokenizer is byte-level BPE in which no token spans the end of a line."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    model: Any = getattr(backend, "model", None)
    if type(model).__name__ != "BPE" or backend.normalizer is not None:
        return False
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if backend.pre_tokenizer is None:
        return False
    before: dict[str, Any] = json.loads(backend.pre_tokenizer.__getstate__())
    kinds = [part["type"] for part in before.get("pretokenizers", [before])]
    if "ByteLevel" not in kinds or not {"ByteLevel", "Split", "Digits"} >= set(kinds):
        return False
    for token in backend.get_added_tokens_decoder().values():
        text = token.content
        if token.lstrip or token.rstrip or token.single_word or "\n" in text or text[0] in _FIRST:
            return False
    return not any(map(_SPANS.search, backend.get_vocab(with_added_tokens=False)))
