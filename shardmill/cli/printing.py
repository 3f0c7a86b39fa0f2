"""What a command answers, as text or as JSON; tokens are coloured on a terminal, else in brackets.

Every token is in one span, or counted in a heading as left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from rich.table import Table
from rich.text import Text

from shardmill.cli.terminal import SafeConsole, visible
from shardmill.records import BoolArray, IntArray

Decode = Callable[[IntArray], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Some neighbouring tokens of one kind."""

    text: str  # visible characters and line breaks only
    trained: bool
    marker: bool  # one token of the template


@dataclass(frozen=True, slots=True)
class Heading:
    """A line between spans."""

    text: str


Line = str | Table | Heading | Span
"""A whole line of text, a table, or what an example consists of."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found, printed as text or, with --json, as JSON."""

    facts: object  # for JSON, or a function that gives them
    lines: Iterable[Line]
    problems: Sequence[str] = ()  # on stderr, after the lines
    found: bool = False  # damage, a problem or a difference, which the exit code tells
    indent: int | None = None  # of the JSON

    def print(self, *, as_json: bool) -> None:
        if as_json:
            facts = self.facts() if callable(self.facts) else self.facts
            print(json.dumps(facts, indent=self.indent))
            return
        print_lines(list(self.lines))  # all or none: a token may have no text
        for problem in self.problems:
            print(f"  {problem}", file=sys.stderr)


def num_problems(problems: Sequence[str]) -> str:
    return f"{len(problems):,} {'problem' if len(problems) == 1 else 'problems'}"


def print_lines(lines: Iterable[Line]) -> None:
    """Trained green, the rest grey, markers bold; without colours trained is in [[ ]]."""
    console = SafeConsole(
        file=sys.stdout, highlight=False, soft_wrap=True, emoji=False, markup=False
    )
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    line_open = False
    for one in lines if coloured else bracketed(lines):
        if isinstance(one, Span):
            line_open = not one.text.endswith("\n") if one.text else line_open
        elif line_open:
            print()
            line_open = False
        if isinstance(one, str):
            print(one)
        elif isinstance(one, Table):
            console.print(one)
        else:
            text = f"-- {one.text}\n" if isinstance(one, Heading) else one.text
            safe = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
            console.print(Text(safe, style=_style(one) if coloured else ""), end="")
    if line_open:
        print()


def _style(piece: Heading | Span) -> str:
    if isinstance(piece, Heading):
        return "cyan"
    return ("green" if piece.trained else "bright_black") + (" bold" if piece.marker else "")


def bracketed(pieces: Iterable[Line]) -> Iterator[Line]:
    """For output without colours: what is trained is in [[ ]]; such brackets of the data are
    written [\\[ and ]\\]."""
    inside = False
    for piece in pieces:
        trained = isinstance(piece, Span) and piece.trained
        if trained != inside:
            yield Span(text="[[" if trained else "]]", trained=False, marker=False)
        inside = trained
        if isinstance(piece, Span):
            piece = replace(piece, text=escape_brackets(piece.text))
        yield piece
    if inside:
        yield Span(text="]]", trained=False, marker=False)


def escape_brackets(text: str) -> str:
    """The text of the data, in which [[ and ]] cannot be mistaken for ours."""
    return text.replace("[[", "[\\[").replace("]]", "]\\]")


@dataclass(frozen=True, slots=True, eq=False)
class ShownTokens:
    """The tokens of an example or a row, and how they are shown."""

    ids: IntArray
    trained: BoolArray
    kept: BoolArray  # the others are counted
    markers: IntArray  # ids that are structure
    decode: Decode

    def spans(self, start: int, stop: int) -> Iterator[Heading | Span]:
        """Runs of tokens of one kind; every marker is a separate run."""
        if start == stop:
            return
        ids, kept = self.ids[start:stop], self.kept[start:stop]
        trained = self.trained[start:stop]
        is_marker = np.isin(ids, self.markers)
        kind = np.where(kept, 1 + trained * 2 + is_marker, 0)
        starts = np.flatnonzero((kind[1:] != kind[:-1]) | (is_marker & kept)[1:]) + 1
        for first, last in pairwise([0, *starts.tolist(), len(ids)]):
            if not kept[first]:
                yield Heading(f"... {last - first:,} tokens left out")
                continue
            text = visible(self.decode(ids[first:last]))
            yield Span(text=text, trained=bool(trained[first]), marker=bool(is_marker[first]))

    def sections(self, parts: Iterable[tuple[str, int, int]]) -> Iterator[Heading | Span]:
        """Parts of the tokens, each after its heading."""
        for heading, start, stop in parts:
            yield Heading(heading)
            yield from self.spans(start, stop)

    def num_trained(self, start: int, stop: int) -> int:
        return int(self.trained[start:stop].sum())
