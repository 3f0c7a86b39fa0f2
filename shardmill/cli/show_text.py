"""An example as something to look at: turns, runs of tokens, what is trained.

In: ids, mask, turns of one example, and a decoder.  Out: headings and spans, in order.
Promise: every token is in one span, or counted in a heading as left out; no character of the data
reaches a terminal that is not visible: controls, escapes and invisible ones are written as \\x1b,
\\u200b; a line break is written \\n and broken there. A joiner inside an emoji or a word that needs
it stays.
Not here: colours, printing (show.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardmill.cli.stdout import JOINED
from shardmill.records import ROLES, BoolArray, ChatExamples, IntArray

Decode = Callable[[IntArray], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Some neighbouring tokens of one kind."""

    text: str  # visible characters and line breaks only
    trained: bool
    marker: bool  # structure: one token of the template


@dataclass(frozen=True, slots=True)
class Heading:
    """A line between spans."""

    text: str


def visible(text: str) -> str:
    """The text with everything that cannot be seen written out; line breaks stay, marked."""
    if text.isprintable():
        return text
    joined = {found.start() for found in JOINED.finditer(text)}
    return "".join(
        character if place in joined else _shown(character) for place, character in enumerate(text)
    )


def _shown(character: str) -> str:
    if character == "\n":
        return "\\n\n"
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def chat_pieces(
    example: ChatExamples, kept: BoolArray, markers: IntArray, decode: Decode
) -> Iterator[Heading | Span]:
    """Turn by turn. `kept` marks the tokens that are shown; the others are counted."""
    ids, mask, total = example.ids.values, example.mask, len(example.mask)
    starts = example.turn_starts.tolist()
    edges = sorted({0, *starts, total})
    names = {start: (turn, ROLES[role]) for turn, (start, role) in enumerate(_turns(example))}
    for start, stop in pairwise(edges):
        trained = int((mask & kept)[start:stop].sum())
        if start in names:
            turn, role = names[start]
            yield Heading(f"turn {turn}: {role}, tokens {start:,}..{stop:,}, {trained:,} trained")
        else:
            yield Heading(f"before the first turn, tokens {start:,}..{stop:,}, {trained:,} trained")
        part = slice(start, stop)
        yield from spans(ids[part], mask[part], kept[part], markers, decode)


def _turns(example: ChatExamples) -> Iterator[tuple[int, int]]:
    return zip(example.turn_starts.tolist(), example.turn_roles.tolist(), strict=True)


def spans(
    ids: IntArray, mask: BoolArray, kept: BoolArray, markers: IntArray, decode: Decode
) -> Iterator[Heading | Span]:
    """Runs of tokens of one kind; every marker is a run of its own."""
    if not len(ids):
        return
    is_marker = np.isin(ids, markers)
    kind = np.where(kept, 1 + mask * 2 + is_marker, 0)
    borders = np.flatnonzero((kind[1:] != kind[:-1]) | (is_marker & kept)[1:]) + 1
    edges = [0, *borders.tolist(), len(ids)]
    for start, stop in pairwise(edges):
        if not kept[start]:
            yield Heading(f"... {stop - start:,} tokens left out")
            continue
        text = visible(decode(ids[start:stop]))
        yield Span(text=text, trained=bool(mask[start]), marker=bool(is_marker[start]))


def bracketed(pieces: Iterable[Heading | Span]) -> Iterator[Heading | Span]:
    """For a place without colours: what is trained stands in [[ ]], and such brackets of the data
    are written [\\[ and ]\\]."""
    inside = False
    for piece in pieces:
        trained = isinstance(piece, Span) and piece.trained
        if trained != inside:
            yield Span(text="[[" if trained else "]]", trained=False, marker=False)
        inside = trained
        if isinstance(piece, Span):
            piece = replace(piece, text=piece.text.replace("[[", "[\\[").replace("]]", "]\\]"))
        yield piece
    if inside:
        yield Span(text="]]", trained=False, marker=False)
