"""Some tokens as a page shows them.

In: ids and what is known of each.  Out: the VIEW of the JSON contract.
Promise: every list has one entry a token; texts are cut to MOST_TEXT characters and the cut ones
are named; without a tokenizer, or with ids that it does not have, the ids themselves are the texts,
and a note says why.
Not here: texts (words), where tokens come from (documents, plans, steps).

What each token adds to the text.

In: a tokenizer, ids.  Out: one text for each id.
Promise: the texts joined are the decoded text of all ids, whatever the tokenizer does; a character
that is spread over tokens comes with the last of them; memory and work are bounded by the ids given
and by MOST_CHARACTERS. Nothing is decoded from the start again and again.
Not here: which ids (documents, plans, steps), cutting long texts (view).

A text is decoded once, whole; then borders are found in it. What a token adds behind another one is
remembered by its id, and is right nearly always, so the borders are one walk along the text:
    ids 12 7 7      " the" "a" "a"      the text " theaa": borders 0 4 5 6
Where it is not (pieces of a character, a space that is dropped at a beginning), a few tokens around
are decoded one more at a time and compared with the text.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from shardmill.errors import TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.records import JSON, BoolArray, IntArray, OffsetArray

MOST_CHARACTERS = 2**22
"""Of a text that is decoded at a time: a token may be megabytes long."""

LEAD, TAIL = 32, 8
"""Tokens before and behind the wanted ones that are decoded with them: a character has at most four
bytes, and a tokenizer may look at what is before a token."""

_BEFORE, _RUN = 8, 16  # tokens around a place that the walk could not pass
_MOST_PREFIXES = 64  # whole prefixes decoded in a call, when nothing else helps
_LONG = 4096  # characters of a token that is not remembered
_BROKEN = "\ufffd"


class Words:
    """The texts of tokens of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[int, str | None]] = {}  # id: length, and what it adds
        self._lock = threading.Lock()
        anchor = tokenizer.encode("a")[-1:]
        self._anchor = anchor, self.decode(np.array(anchor, np.int64))

    def decode(self, ids: IntArray) -> str:
        return self.tokenizer.decode(ids)

    def fitting(self, ids: IntArray) -> int:
        """How many of the ids may be decoded at a time; at least one, if there is one."""
        unique, place = np.unique(ids, return_inverse=True)
        lengths = np.array([self._of(number)[0] for number in unique.tolist()], np.int64)
        total = np.cumsum(lengths[place])
        return min(len(ids), max(1, int(np.searchsorted(total, MOST_CHARACTERS))))

    def texts(self, ids: IntArray, start: int = 0, stop: int | None = None) -> list[str]:
        """The texts of the tokens start..stop of `ids`, seen among the others."""
        stop = len(ids) if stop is None else stop
        if not len(ids):
            return []
        text = self.decode(ids)
        borders = self.borders(ids, text).tolist()
        return [text[borders[at] : borders[at + 1]] for at in range(start, stop)]

    def borders(self, ids: IntArray, text: str) -> OffsetArray:
        """(len(ids) + 1,) where in their text each token begins, and the end."""
        listed = ids.tolist()
        borders = [0]
        prefixes = _MOST_PREFIXES
        while len(borders) <= len(listed):
            at, place = len(borders) - 1, borders[-1]
            piece = self._of(listed[at])[1]
            if piece is not None and text.startswith(piece, place):
                borders.append(place + len(piece))
                continue
            near = self._near(ids, at, place, text)
            if near is None:
                prefix = self.decode(ids[: at + 1]) if prefixes else ""
                prefixes = max(0, prefixes - 1)
                near = [max(place, common(prefix, text))]
            borders += near
        borders[-1] = len(text)
        return np.minimum(np.maximum.accumulate(np.array(borders, np.int64)), len(text))

    def _near(self, ids: IntArray, at: int, place: int, text: str) -> list[int] | None:
        """The borders behind the tokens from `at` on, if what is decoded around them is the text
        that stands at `place`."""
        first, last = max(0, at - _BEFORE), min(len(ids), at + _RUN)
        around = self.decode(ids[first : min(len(ids), last + TAIL)])
        known = [
            common(self.decode(ids[first:stop]) if stop > first else "", around)
            for stop in range(at, last + 1)
        ]
        found = around[known[0] : max(known)]
        if not text.startswith(found, place):
            return None
        return [place + max(0, one - known[0]) for one in known[1:]]

    def _of(self, number: int) -> tuple[int, str | None]:
        """Characters of a token, and what it adds behind another one; None: nobody can say."""
        found = self._known.get(number)
        if found is None:
            anchor, before = self._anchor
            both = self.decode(np.array([*anchor, number], np.int64))
            piece = both[len(before) :]
            sound = both.startswith(before) and _BROKEN not in piece and len(piece) <= _LONG
            found = max(1, len(piece)), piece if sound and anchor else None
            with self._lock:
                self._known[number] = found
        return found


def common(prefix: str, text: str) -> int:
    """How many characters at the front of both are the same."""
    if text.startswith(prefix):
        return len(prefix)
    sound = len(prefix.rstrip(_BROKEN))  # what a cut character looks like
    if not text.startswith(prefix[:sound]):
        differs = range(sound + 1)
        return bisect_left(differs, 1, key=lambda n: prefix[:n] != text[:n]) - 1
    while sound < len(prefix) and text[sound : sound + 1] == _BROKEN:
        sound += 1
    return sound


def unreadable(error: TokenizerError) -> str:
    """The note of a view that shows ids in place of texts."""
    return f"ids are shown: {error}"


MOST_TEXT = 300
"""Characters of one token that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How ids of a store become text."""

    words: Words | None  # None: there is no tokenizer
    why: str | None  # then: why, and what to do
    markers: IntArray  # ids that are structure


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """Tokens to show, with some around them."""

    ids: IntArray  # (n,)
    start: int  # the shown ones are ids[start:stop]
    stop: int
    at: int  # the offset of ids[start] in the document or row
    edges: Sequence[int] = ()  # where in ids another text begins: each is decoded alone


def some_of(ids: IntArray, start: int, stop: int, edges: IntArray) -> Tokens:
    """The tokens start..stop of a row, in which other texts begin at `edges`; of what stands around
    them no more than decoding needs."""
    first, last = max(0, start - LEAD), min(len(ids), stop + TAIL)
    inner = edges[(edges > first) & (edges < last)] - first
    return Tokens(
        ids=ids[first:last],
        start=start - first,
        stop=stop - first,
        at=start,
        edges=inner.tolist(),
    )


def shown(
    tokens: Tokens,
    reading: Reading,
    *,
    trained: BoolArray | None = None,
    piece: IntArray | None = None,
    turn: IntArray | None = None,
) -> dict[str, JSON]:
    """The VIEW; the arrays are those of the tokens that are shown."""
    ids = tokens.ids[tokens.start : tokens.stop]
    texts, note = _texts(tokens, reading)
    ids = ids[: len(texts)]
    return {
        "start": tokens.at,
        "stop": tokens.at + len(ids),
        "ids": ids.tolist(),
        "texts": [text[:MOST_TEXT] for text in texts],
        "cut": [place for place, text in enumerate(texts) if len(text) > MOST_TEXT],
        "trained": _listed(trained, len(ids)),
        "marker": np.isin(ids, reading.markers).astype(int).tolist(),
        "piece": _listed(piece, len(ids)),
        "turn": _listed(turn, len(ids)),
        "note": note,
    }


def preview(ids: IntArray, reading: Reading, most: int) -> str:
    """The beginning of a text."""
    if reading.words is not None:
        try:
            return reading.words.decode(ids[: reading.words.fitting(ids)])[:most]
        except TokenizerError:  # the document itself says why
            pass
    return " ".join(map(str, ids.tolist()))[:most]


def _texts(tokens: Tokens, reading: Reading) -> tuple[list[str], str | None]:
    """Of the tokens to show, less of them when they are too long; and a note."""
    ids, start, stop = tokens.ids, tokens.start, tokens.stop
    if reading.words is None:
        return _numbers(ids[start:stop]), reading.why
    try:
        most, edges = reading.words.fitting(ids), [*tokens.edges]
        if start and most <= start:  # what stands before is too long to be decoded with it
            ids, edges = ids[start:], [edge - start for edge in edges]
            start, stop, most = 0, stop - start, reading.words.fitting(ids)
        if most < len(ids):
            ids, stop = ids[:most], min(stop, most)
        inner = [edge for edge in sorted({*edges}) if 0 < edge < len(ids)]
        texts: list[str] = []
        for first, last in pairwise([0, *inner, len(ids)]):
            if last > start and first < stop:
                part = max(start, first) - first, min(stop, last) - first
                texts += reading.words.texts(ids[first:last], *part)
    except TokenizerError as error:
        return _numbers(tokens.ids[start : tokens.stop]), unreadable(error)
    return texts, None


def _numbers(ids: IntArray) -> list[str]:
    return [str(number) for number in ids.tolist()]


def _listed(values: Any, count: int) -> JSON:
    if values is None:
        return None
    listed: JSON = np.asarray(values[:count]).astype(np.int64).tolist()
    return listed
