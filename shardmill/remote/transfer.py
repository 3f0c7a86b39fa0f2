"""Move and compare single files, every byte checked, many at a time; and count them.

`fetch` continues where an earlier try stopped and ends with the right sha256 or an error. `is_same`
is true only when a checksum over every byte says so: the storage's ETag where it is an MD5 of the
bytes, else a sha256 of the copy read back. Size alone is never enough.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.formats.packed.files import file_sha256
from shardmill.records import JSON
from shardmill.remote.contents import Contents, FileFact
from shardmill.remote.folder import RemoteFolder, part_bytes

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
    step = part_bytes(size) if in_parts else max(size, 1)
    parts = []
    with path.open("rb", buffering=0) as file:
        for start in range(0, max(size, 1), step):
            digest, left = hashlib.md5(usedforsecurity=False), min(step, size - start)
            while left and (piece := file.read(min(_BUFFER, left))):
                left -= len(piece)
                digest.update(piece)
            parts.append(digest.digest())
    if not in_parts:
        return parts[0].hex()
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


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
        remote.call(lambda: _fetch_rest(remote, fact.name, size, path, on_bytes), fact.name)
        found = file_sha256(path)
        if found == fact.sha256:
            return
        os.truncate(path, 0)
    raise DamagedStoreError(
        f"{remote.url}/{fact.name}: its sha256 is {found}, wanted {fact.sha256}; the copy there is "
        "damaged, or was replaced meanwhile: push it again"
    )


def _fetch_rest(remote: RemoteFolder, name: str, size: int, path: Path, on_bytes: OnBytes) -> None:
    """Append what is missing. A web server without ranges sends the file from the start."""
    with _writing(path):
        file = path.open("a+b")
    with file:
        done = os.fstat(file.fileno()).st_size
        if done > size:
            done = file.truncate(0)
        on_bytes(done)
        for at, piece in remote.pieces(name, done, size) if done < size else ():
            with _writing(path):
                if at != done:
                    file.truncate(at)
                file.write(piece[: size - at])
                file.flush()
            done = at + len(piece)
            on_bytes(min(done, size))
        with _writing(path):
            os.fsync(file.fileno())
    if done != size:
        raise ConnectionError(f"{done:,} bytes came, wanted {size:,}")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise an error of the disk as one of ours, so that it is not retried."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: cannot write: {error.strerror}; free some space, then do the same again: "
            "what arrived is kept"
        ) from error


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
            wait(futures)
        finally:
            stop.set()  # also when this thread is interrupted
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, CancelledError):
            raise error
    return [future.result() for future in futures]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReceipt:
    """What a push or a pull did. Files and bytes include the manifest."""

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


OnProgress = Callable[[int, int], None]
"""Called with bytes done and bytes in all; from any thread, one call at a time."""


class TransferMeter:
    """Counts the bytes of many files, from many threads; a file that is restarted counts once."""

    def __init__(
        self, sizes: Mapping[str, int], progress: OnProgress | None, began: float = 0.0
    ) -> None:
        """`began`: the time of `time.monotonic()` when the transfer began."""
        self._sizes, self._total, self._progress = sizes, sum(sizes.values()), progress
        self._began = began
        self._done: dict[str, int] = {}
        self._sum = 0
        self._lock = threading.Lock()

    def set(self, name: str, num_bytes: int) -> None:
        """This file has `num_bytes` done."""
        with self._lock:
            self._sum += num_bytes - self._done.get(name, 0)
            self._done[name] = num_bytes
            if self._progress is not None:
                self._progress(self._sum, self._total)

    def receipt(
        self, folder: Path, url: str, contents: Contents, moved: Sequence[str]
    ) -> TransferReceipt:
        """The receipt of a transfer that moved the files `moved`."""
        return TransferReceipt(
            folder=folder,
            url=url,
            kind=contents.kind,
            manifest_sha256=contents.manifest_sha256,
            files=len(self._sizes),
            bytes=self._total,
            moved_files=len(moved),
            moved_bytes=sum(self._sizes[name] for name in moved),
            kept_files=len(self._sizes) - len(moved),
            seconds=time.monotonic() - self._began,
        )
