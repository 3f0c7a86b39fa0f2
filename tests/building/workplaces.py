"""What is unfinished of a build: its receipts and shards, beside its store. Its processes may be at
work, or remove it, at the same time."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path


def receipts(store: Path) -> list[Path]:
    """In the order of the plan."""
    return _found(store, "run-*/receipts/*.receipt")


def shards(store: Path) -> list[Path]:
    return _found(store, "run-*/store/*/*.bin")


def size(store: Path) -> int:
    """Bytes of all files of its workplace."""
    return sum(map(_bytes_of, _found(store, "*")))


def _found(store: Path, pattern: str) -> list[Path]:
    """Files below the workplace. `os.walk` passes over a folder that is gone; `Path.glob` fails."""
    work = store.parent / f".{store.name}.building"
    found = [Path(folder, name) for folder, _, names in os.walk(work) for name in names]
    return sorted(path for path in found if fnmatch(str(path.relative_to(work)), pattern))


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
