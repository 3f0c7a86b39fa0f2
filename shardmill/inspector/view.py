"""Some tokens as a page shows them.

In: ids and what is known of each.  Out: the VIEW of the JSON contract.
Promise: every list has one entry a token; texts are cut to MOST_TEXT characters and the cut ones
are named; without a tokenizer, or with ids that it does not have, the ids themselves are the texts,
and a note says why.
Not here: texts (words), where tokens come from (documents, plans, steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from shardmill.errors import TokenizerError
from shardmill.inspector.words import LEAD, TAIL, Words, unreadable
from shardmill.records import JSON, BoolArray, IntArray

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
