"""Move and compare single files, every byte checked, many at a time.

`fetch` continues where an earlier try stopped and ends with the right sha256 or an error. `is_same`
is true only when a checksum over every byte says so: the storage's ETag where it is an MD5 of the
bytes, else a sha256 of the copy read back. Size alone is never enough.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, TypeVar

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.remote.contents import FileFact
from shardmill.remote.folder import BLOCK, RemoteFolder, part_bytes

_ETAG = re.compile(r"[0-9a-f]{32}(?:-([0-9]+))?")
_BUFFER = 2**20

OnBytes = Callable[[int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


def is_same(remote: RemoteFolder, fact: FileFact, path: Path, info: dict[str, Any]) -> bool:
    """Whether the copy that `info` describes holds the bytes of `path`, which has `fact.sha256`."""
    size = path.stat().st_size
    if info.get("size") != size:
        return False
    etag = _ETAG.fullmatch(str(info.get("ETag", "")).strip('"'))
    if etag and etag[0] == _local_etag(path, size, in_parts=etag[1] is not None):
        return True
    return remote.sha256(fact.name, size) == fact.sha256  # encrypting storage has other ETags


def _local_etag(path: Path, size: int, *, in_parts: bool) -> str:
    """S3's ETag of these bytes: their MD5; in parts, the MD5 of the parts' MD5s and how many."""
    if not in_parts:
        return _digest(path, hashlib.md5(usedforsecurity=False), 0, size)
    step = part_bytes(size)
    starts = range(0, size, step)
    parts = [_digest(path, hashlib.md5(usedforsecurity=False), at, at + step) for at in starts]
    whole = hashlib.md5(bytes.fromhex("".join(parts)), usedforsecurity=False)
    return f"{whole.hexdigest()}-{len(parts)}"


def check_local(path: Path, fact: FileFact) -> int:
    """The size of a local file that matches its manifest; anything else is damage."""
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


def _damaged(path: Path, problem: str) -> DamagedStoreError:
    return DamagedStoreError(f"{path}: {problem}; it changed since it was written: build it again")


def file_sha256(path: Path) -> str:
    return _digest(path, hashlib.sha256(), 0, path.stat().st_size)


def _digest(path: Path, digest: Any, start: int, stop: int) -> str:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (piece := file.read(min(_BUFFER, stop - start))):
            start += len(piece)
            digest.update(piece)
    text: str = digest.hexdigest()
    return text


def check_size(remote: RemoteFolder, fact: FileFact, size: int | None) -> int:
    """The size of a remote file that matches its manifest; None: the file is missing."""
    if size is None:
        raise DamagedStoreError(f"{remote.url}/{fact.name}: missing; push the folder again")
    if fact.size is not None and size != fact.size:
        raise DamagedStoreError(
            f"{remote.url}/{fact.name}: {size:,} bytes, wanted {fact.size:,}; push it again"
        )
    return size


def fetch(remote: RemoteFolder, fact: FileFact, size: int, path: Path, on_bytes: OnBytes) -> None:
    """Bring the file of `size` bytes to `path`, durably; what is there is taken for its beginning.

    A file with another sha256 is fetched once more from the start. If that fails too it is damage,
    and an empty file is left at `path`.
    """
    for _ in range(2):
        fetch_once = _fetch_web if remote.is_web else _fetch_blocks
        found = fetch_once(remote, fact.name, size, path, on_bytes)
        if found == fact.sha256:
            return
        os.truncate(path, 0)
    raise DamagedStoreError(
        f"{remote.url}/{fact.name}: its sha256 is {found}, wanted {fact.sha256}; the copy there is "
        "damaged, or was replaced meanwhile: push it again"
    )


def _fetch_blocks(remote: RemoteFolder, name: str, size: int, path: Path, on_bytes: OnBytes) -> str:
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
                data = remote.block(name, done, size)
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


def _fetch_web(remote: RemoteFolder, name: str, size: int, path: Path, on_bytes: OnBytes) -> str:
    """As `_fetch_blocks`, in one request. After a lost connection another request continues, or
    starts again if the server does not serve ranges."""

    def get() -> None:
        with _open_part(path) as file:
            done = os.fstat(file.fileno()).st_size
            if done > size:
                done = file.truncate(0)
            on_bytes(done)
            for at, piece in remote.web_pieces(name, done) if done < size else ():
                try:
                    if at != done:
                        file.truncate(at)  # no ranges: from the start
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

    remote.call(get, name)
    return file_sha256(path)


def _open_part(path: Path) -> IO[bytes]:
    try:
        return path.open("a+b")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: cannot write: {error.strerror}; free some space, then do the same again: what "
        "arrived is kept"
    )


def in_parallel(
    workers: int, function: Callable[[Item], Result], items: Iterable[Item]
) -> list[Result]:
    """`function` of every item, in order, at most `workers` at once.

    After an error nothing new is started; the first error in the order of the items is raised.
    """
    stop = threading.Event()

    def guarded(item: Item) -> Result:
        if stop.is_set():
            raise CancelledError
        try:
            return function(item)
        except BaseException:
            stop.set()
            raise

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
