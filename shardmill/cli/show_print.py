"""Headings and spans on stdout: colours on a terminal that has them, else brackets."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.text import Text

from shardmill.cli.show_text import Heading, Span, bracketed
from shardmill.cli.stdout import SafeConsole


def print_pieces(pieces: Sequence[Heading | Span]) -> None:
    """Trained green, the rest grey, markers bold; without colours trained stands in [[ ]]."""
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
