"""Examples on stdout: headings and runs of tokens, coloured on a terminal, else with brackets.

Every token is in one span, or counted in a heading as left out. Text is shown only with the very
tokenizer of the stores; without a tokenizer, ids are shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from rich.text import Text

from shardmill.cli.options import parse_special
from shardmill.cli.terminal import SafeConsole, visible
from shardmill.errors import OptionError
from shardmill.inspect.stores import open_named
from shardmill.protocols import Tokenizer
from shardmill.records import BoolArray, IntArray
from shardmill.store import Store

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

    def num_trained(self, start: int, stop: int) -> int:
        return int(self.trained[start:stop].sum())


def bracketed(pieces: Iterable[Heading | Span]) -> Iterator[Heading | Span]:
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


def print_pieces(pieces: Sequence[Heading | Span]) -> None:
    """Trained green, the rest grey, markers bold; without colours trained is in [[ ]]."""
    console = SafeConsole(
        file=sys.stdout, highlight=False, soft_wrap=True, emoji=False, markup=False
    )
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    line_open = False
    for piece in pieces if coloured else bracketed(pieces):
        text = piece.text
        if isinstance(piece, Heading):
            text = ("\n" if line_open else "") + f"-- {text}\n"
        line_open = not text.endswith("\n") if text else line_open
        safe = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
        console.print(Text(safe, style=_style(piece) if coloured else ""), end="")
    if line_open:
        console.print()


def _style(piece: Heading | Span) -> str:
    if isinstance(piece, Heading):
        return "cyan"
    return ("green" if piece.trained else "bright_black") + (" bold" if piece.marker else "")


def named_tokenizer(name: str, special: list[str] | None, *stores: Store) -> Tokenizer:
    """The tokenizer of --tokenizer and --special, refused unless it is that of all these stores."""
    return open_named(name, parse_special(special), *stores)


def decoder(name: str | None, special: list[str] | None, *stores: Store) -> Decode:
    """Ids to text with the very tokenizer of the stores; without one, the ids themselves.

    A store that records no tokenizer, such as an imported one, is read with the one that is named,
    with a note; an id beyond its vocabulary is refused.
    """
    if name is None:
        print("shardmill: no --tokenizer, so ids are shown", file=sys.stderr)
        return lambda ids: " ".join(map(str, ids.tolist())) + " "
    unknown = [store for store in stores if store.manifest.tokenizer_fingerprint is None]
    opened = named_tokenizer(name, special, *(one for one in stores if one not in unknown))
    if not unknown:
        return lambda ids: opened.decode(ids)
    folder = unknown[0].folder
    print(
        f"shardmill: {folder} records no tokenizer, so nothing shows whether --tokenizer {name} "
        "made its tokens",
        file=sys.stderr,
    )

    def decode(ids: IntArray) -> str:
        largest = int(ids.max(initial=0))
        if largest >= opened.vocab_size:
            raise OptionError(
                f"--tokenizer {name}: has {opened.vocab_size:,} ids, but {folder} holds id "
                f"{largest:,}, so it did not make these tokens: name the one that did"
            )
        return opened.decode(ids)

    return decode
