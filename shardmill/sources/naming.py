"""A short name for input the caller did not name.

In: a path, a glob, a URL, or a list of them.  Out: one word for reports; never an absolute path,
never a secret.
"""

from __future__ import annotations

from pathlib import Path

from shardmill.sources.files import Where
from shardmill.urls import Url


def name_of(where: Where) -> str:
    """The last part of the path: "books" for "data/books/", "a.jsonl" for "data/a.jsonl"."""
    if isinstance(where, str | Path):
        path = Path(str(Url(str(where))))
        return path.name or path.resolve().name or "files"
    return name_of(where[0]) if len(where) == 1 else f"{len(where)} files"
