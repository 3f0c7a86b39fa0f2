"""Is what lies there what lies here?

In: a local file, and what a place says of its copy.  Out: yes or no, by checksum.
Promise: yes only when a checksum over every byte says so: the store's own ETag where it is an MD5
of the bytes, else a sha256 of the copy read back. Size alone never suffices.
Not here: sending it again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardmill.errors import DamagedStoreError
from shardmill.remote.place import Place, part_bytes
from shardmill.remote.records import FileFact

_ETAG = re.compile(r"[0-9a-f]{32}(?:-([0-9]+))?")
_BUFFER = 2**20


def is_same(place: Place, fact: FileFact, path: Path, info: dict[str, Any]) -> bool:
    """Whether the copy that `info` tells of holds the bytes of `path`, which has `fact.sha256`."""
    size = path.stat().st_size
    if info.get("size") != size:
        return False
    etag = _ETAG.fullmatch(str(info.get("ETag", "")).strip('"'))
    if etag and etag[0] == local_etag(path, size, in_parts=etag[1] is not None):
        return True
    return place.sha256(fact.name, size) == fact.sha256  # an encrypting store has other ETags


def local_etag(path: Path, size: int, *, in_parts: bool) -> str:
    """What S3 calls these bytes: their MD5; in parts, the MD5 of the parts' MD5s and how many."""
    if not in_parts:
        return _digest(path, hashlib.md5(usedforsecurity=False), 0, size)
    step = part_bytes(size)
    starts = range(0, size, step)
    parts = [_digest(path, hashlib.md5(usedforsecurity=False), at, at + step) for at in starts]
    whole = hashlib.md5(bytes.fromhex("".join(parts)), usedforsecurity=False)
    return f"{whole.hexdigest()}-{len(parts)}"


def check_local(path: Path, fact: FileFact) -> int:
    """The size of a local file that is as its manifest says; anything else is damage."""
    try:
        size = path.stat().st_size
        if fact.size is not None and size != fact.size:
            raise _damaged(path, f"{size:,} bytes, wanted {fact.size:,}")
        found = file_sha256(path)
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from error
    if found != fact.sha256:
        raise _damaged(path, f"its sha256 is {found}, wanted {fact.sha256}")
    return size


def file_sha256(path: Path) -> str:
    return _digest(path, hashlib.sha256(), 0, path.stat().st_size)


def _digest(path: Path, digest: Any, start: int, stop: int) -> str:
    for piece in _pieces(path, start, stop):
        digest.update(piece)
    text: str = digest.hexdigest()
    return text


def _pieces(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (piece := file.read(min(_BUFFER, stop - start))):
            start += len(piece)
            yield piece


def _damaged(path: Path, problem: str) -> DamagedStoreError:
    return DamagedStoreError(f"{path}: {problem}; it is not as it was written: make it again")
