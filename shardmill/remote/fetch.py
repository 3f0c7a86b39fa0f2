"""Bring one file here, every byte checked.

In: a place, a listed file, a path.  Out: the file at the path, durable, with the right sha256.
Promise: goes on where an earlier try stopped; a file with another sha256 is fetched once more from
the beginning, then it is damage, by name, and what stays at the path is empty.
Not here: names that appear when all is well (receive.py, cache.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.remote.place import BLOCK, Place
from shardmill.remote.records import FileFact

OnBytes = Callable[[int], None]


def fetch(place: Place, fact: FileFact, size: int, path: Path, on_bytes: OnBytes) -> None:
    """The file of `size` bytes at `path`; what lies there is taken for its beginning."""
    for _ in range(2):
        found = _fetch_once(place, fact.name, size, path, on_bytes)
        if found == fact.sha256:
            return
        os.truncate(path, 0)
    raise DamagedStoreError(
        f"{place.url}/{fact.name}: its sha256 is {found}, wanted {fact.sha256}; the copy there is "
        "damaged, or was replaced meanwhile: push it again"
    )


def check_size(place: Place, fact: FileFact, size: int | None) -> int:
    """What the place says of a file, against its manifest."""
    if size is None:
        raise DamagedStoreError(f"{place.url}/{fact.name}: missing; push the folder again")
    if fact.size is not None and size != fact.size:
        raise DamagedStoreError(
            f"{place.url}/{fact.name}: {size:,} bytes, wanted {fact.size:,}; push it again"
        )
    return size


def _fetch_once(place: Place, name: str, size: int, path: Path, on_bytes: OnBytes) -> str:
    digest, done = hashlib.sha256(), 0
    try:
        with path.open("a+b") as file:
            if os.fstat(file.fileno()).st_size > size:
                file.truncate(0)
            file.seek(0)
            while piece := file.read(BLOCK):
                digest.update(piece)
                done += len(piece)
            on_bytes(done)
            while done < size:
                data = place.block(name, done, size)
                file.write(data)
                digest.update(data)
                done += len(data)
                on_bytes(done)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"{path}: cannot write: {error.strerror}; make room, then do the same again: what has "
            "arrived is kept"
        ) from error
    return digest.hexdigest()
