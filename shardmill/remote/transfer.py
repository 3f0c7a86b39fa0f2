"""Bring one file here, every byte checked.

In: a place, a listed file, a path.  Out: the file at the path, durable, with the right sha256.
Promise: goes on where an earlier try stopped; a file with another sha256 is fetched once more from
the beginning, then it is damage, by name, and what stays at the path is empty.
Not here: names that appear when all is well (receive.py, cache.py).

Is what lies there what lies here?

In: a local file, and what a place says of its copy.  Out: yes or no, by checksum.
Promise: yes only when a checksum over every byte says so: the store's own ETag where it is an MD5
of the bytes, else a sha256 of the copy read back. Size alone never suffices.
Not here: sending it again.

Many files at a time, and an end at the first error.

In: a function and its items.  Out: the results, in order.
Promise: at most `workers` at once; after an error nothing new is begun.
Not here: trying again.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, TypeVar

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.remote.contents import FileFact
from shardmill.storage.object_store import BLOCK, RemoteFolder, part_bytes
from shardmill.storage.retry import RetryPolicy

_ETAG = re.compile(r"[0-9a-f]{32}(?:-([0-9]+))?")
_BUFFER = 2**20


def is_same(place: RemoteFolder, fact: FileFact, path: Path, info: dict[str, Any]) -> bool:
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


OnBytes = Callable[[int], None]


def fetch(place: RemoteFolder, fact: FileFact, size: int, path: Path, on_bytes: OnBytes) -> None:
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


def check_size(place: RemoteFolder, fact: FileFact, size: int | None) -> int:
    """What the place says of a file, against its manifest."""
    if size is None:
        raise DamagedStoreError(f"{place.url}/{fact.name}: missing; push the folder again")
    if fact.size is not None and size != fact.size:
        raise DamagedStoreError(
            f"{place.url}/{fact.name}: {size:,} bytes, wanted {fact.size:,}; push it again"
        )
    return size


def _fetch_once(place: RemoteFolder, name: str, size: int, path: Path, on_bytes: OnBytes) -> str:
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


def _fetch_web(place: RemoteFolder, name: str, size: int, path: Path, on_bytes: OnBytes) -> str:
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

    RetryPolicy().call(get, f"{place.url}/{name}", raises=StoreError)
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


Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    workers: int, function: Callable[[Item], Result], items: Iterable[Item]
) -> list[Result]:
    """`function` of every item; the first error, in the order of the items, ends it."""
    stop = threading.Event()

    def guarded(item: Item) -> Result:
        if stop.is_set():
            raise CancelledError
        is_done = False
        try:
            result = function(item)
            is_done = True
            return result
        finally:
            if not is_done:
                stop.set()

    with ThreadPoolExecutor(workers, thread_name_prefix="shardmill-remote") as pool:
        futures = [pool.submit(guarded, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    for future in futures:
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, CancelledError):
            raise error
    return [future.result() for future in futures]
