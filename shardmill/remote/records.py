"""What the rooms of a transfer hand to one another.

In: nothing.  Out: the files of a finished folder, a receipt, a count of bytes in flight.
Promise: small and frozen, but for the meter, which threads share.
Not here: reading a manifest (contents.py), moving bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from shardmill.records import JSON
from shardmill.shards import Exclusions

OnProgress = Callable[[int, int], None]
"""Called with bytes done and bytes in all; from any thread, one call at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    """One file that a manifest lists."""

    name: str  # relative, with "/", checked to stay inside the folder
    size: int | None  # bytes; None where the manifest does not fix them
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A finished folder: its manifest, to the byte, and everything that lists."""

    kind: str  # "store" or "packed folder"
    manifest_name: str  # the file that makes the folder finished
    manifest: bytes
    manifest_sha256: str  # of those bytes
    files: tuple[FileFact, ...]  # all others, exclusions included
    exclusions: Exclusions | None = None  # of a store that has them; the manifest knows nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a push or a pull did. Files and bytes count the manifest too."""

    folder: Path
    url: str  # without secrets
    kind: str
    manifest_sha256: str
    files: int
    bytes: int
    moved_files: int  # sent or fetched now
    moved_bytes: int
    kept_files: int  # there already, with the right sha256
    seconds: float

    def to_json(self) -> dict[str, JSON]:
        return {**asdict(self), "folder": str(self.folder), "seconds": round(self.seconds, 3)}


class Meter:
    """Bytes of many files, counted by many threads; a file that is begun again counts once."""

    def __init__(self, total: int, progress: OnProgress | None) -> None:
        self._total, self._progress = total, progress
        self._done: dict[str, int] = {}
        self._sum = 0
        self._lock = threading.Lock()

    def set(self, name: str, num_bytes: int) -> None:
        """So many bytes of this file are done."""
        with self._lock:
            self._sum += num_bytes - self._done.get(name, 0)
            self._done[name] = num_bytes
            if self._progress is not None:
                self._progress(self._sum, self._total)
