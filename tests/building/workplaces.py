"""What is unfinished of a build: its receipts and shards, beside its store."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def receipts(store: Path) -> list[Path]:
    """In the order of the plan."""
    return sorted(_work(store).glob("run-*/receipts/*.receipt"))


def shards(store: Path) -> list[Path]:
    return sorted(_work(store).glob("run-*/store/*/*.bin"))


def size(store: Path) -> int:
    """Bytes of all files of its workplace; workers may rename some meanwhile."""
    total = 0
    for path in _work(store).rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _work(store: Path) -> Path:
    return store.parent / f".{store.name}.building"
