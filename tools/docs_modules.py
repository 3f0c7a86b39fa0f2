"""What the reference takes from sources beside docstrings: fields and heads.

In: modules as griffe read them.  Out: the same; the comment of a field is its docstring, and of a
module's docstring all but the first sentence is a block of plain text, as it is written.
Promise: nothing is made up: a field without a comment stays without a sentence.
"""

from __future__ import annotations

import io
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

import griffe


class ShardmillHouse(griffe.Extension):
    """Loaded by mkdocstrings; see mkdocs.yml."""

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        if mod.docstring is not None:
            first, _, rest = mod.docstring.value.partition("\n\n")
            fenced = f"\n\n```text\n{rest.strip()}\n```" if rest.strip() else ""
            mod.docstring.value = first + fenced

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        is_field = isinstance(attr.parent, griffe.Class) and attr.docstring is None
        if is_field and attr.lineno is not None and isinstance(attr.filepath, Path):
            text = _sentence(attr.filepath, attr.lineno, attr.endlineno or attr.lineno)
            if text:
                attr.docstring = griffe.Docstring(text, parent=attr)


@cache
def _comments(path: Path) -> dict[int, tuple[str, bool]]:
    """Line -> its comment, and whether it has the line to itself."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    return {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def _sentence(path: Path, first: int, last: int) -> str:
    """The comment after a field, and the lines of comment below it."""
    comments = _comments(path)
    parts = [comments[line][0] for line in range(first, last + 1) if line in comments]
    below = last + 1
    while below in comments and comments[below][1]:
        parts.append(comments[below][0])
        below += 1
    return " ".join(parts)
