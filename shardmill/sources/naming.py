"""A short name for input the caller did not name.

In: a path, a glob, or a list of them.  Out: one word for reports; never an absolute path.
"""

from __future__ import annotations

from pathlib import Path

from shardmill.sources.files import Where


def name_of(where: Where) -> str:
    """The last part of the path: "books" for "data/books/", "a.jsonl" for "data/a.jsonl"."""
    if isinstance(where, str | Path):
        return Path(where).name or Path(where).resolve().name or "files"
    paths = [Path(path) for path in where]
    return paths[0].name if len(paths) == 1 else f"{len(paths)} files"
