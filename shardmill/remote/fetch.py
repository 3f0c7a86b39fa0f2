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
from typing import IO

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.remote.hashing import file_sha256
from shardmill.remote.place import BLOCK, Place
from shardmill.remote.records import FileFact
from shardmill.remote.retry import attempt

OnBytes = Callable[[int], None]


def fetch(place: Place, fact: FileFact, size: int, path: Path, on_bytes: OnBytes) -> None:
    """The file of `size` bytes at `path`; what lies there is taken for its beginning."""
    for _ in range(2):
        once = _fetch_web if place.is_web else _fetch_once
        found = once(place, fact.name, size, path, on_bytes)
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
        raise _unwritable(path, error) from error
    return digest.hexdigest()


def _fetch_web(place: Place, name: str, size: int, path: Path, on_bytes: OnBytes) -> str:
    """As `_fetch_once`, in one request; a further one goes on where that was cut off, or begins
    again if the server does not serve ranges."""

    def get() -> None:
        with _opened(path) as file:
            done = os.fstat(file.fileno()).st_size
            if done > size:
                done = file.truncate(0)
            on_bytes(done)
            for at, piece in place.web_pieces(name, done) if done < size else ():
                try:
                    if at != done:
                        file.truncate(at)  # no ranges: from the beginning
                    file.write(piece[: size - at])
                    done = at + len(piece)
                    if done >= size:
                        file.flush()
                        os.fsync(file.fileno())
                except OSError as error:
                    raise _unwritable(path, error) from error
                on_bytes(min(done, size))
                if done > size:
                    break
        if done != size:
            raise ConnectionError(f"{done:,} bytes came, wanted {size:,}")

    attempt(f"{place.url}/{name}", get)
    return file_sha256(path)


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("a+b")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: cannot write: {error.strerror}; make room, then do the same again: what has "
        "arrived is kept"
    )
