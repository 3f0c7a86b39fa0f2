"""A bounded folder of fetched files that several processes share.

In: a name, a size, a way to fetch it.  Out: a `Lease`: the file, which stays while it is held.
Promise: a file is seen whole or not at all; files and those being fetched never take more than
`max_bytes`; the least recently used goes first, and none that is held; a process that dies holds
nothing. Each file is fetched by one thread of one process at a time; the others wait and use it.
Not here: checksums (the fetcher has checked what it leaves); network disks without `flock`.

The protocol, in locks of the kernel (locks.py):
1. Names change only under `.lock`: a part appears, becomes the file, goes; a file goes. So what
   stands under a name stays there while `.lock` is held.
2. A part is locked exclusively while it is fetched, from its claim on. A part that nobody has
   exclusively is a dead fetcher's: the next one claims it, and goes on where that one stopped.
3. A file is locked shared by everyone who holds it. Only who has it exclusively removes it.
4. A finished part keeps its locks under its new name: the fetcher's becomes shared under `.lock`,
   so no other removes it in between, and whoever waited shared for the part then holds the file.
5. Nobody waits for `.lock` with a lock that its holder waits for: under `.lock` only claiming a
   dead part waits, for those who waited for the dead one and let go of it at once.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, ShardmillError, StoreError
from shardmill.storage.locks import LockedFile

Fetch = Callable[[Path], None]
"""Writes the whole file into the part at this path; what lies there is its beginning."""

_LOCK = ".lock"
_PART = re.compile(r"\..+\.([0-9]+)\.part")


class Lease:
    """A file of the cache that nobody removes until `close`. A forked process has it too."""

    def __init__(self, path: Path, file: LockedFile) -> None:
        self.path = path
        self._file = file
        file.set_time(time.time_ns())  # the kernel's own clock for files has steps of some ms
        file.inherit()

    def descriptor(self) -> int:
        """The file, open; the caller closes it, and the file stays until then too."""
        return self._file.duplicate()

    def close(self) -> None:
        """Let go; may be called again."""
        self._file.close()

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Entry:
    used: int  # when last, in ns
    path: Path
    size: int  # a part that is being fetched counts in full


class FileCache:
    """Files under `folder`, at most `max_bytes` of them."""

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self.folder = Path(folder).absolute()
        self.max_bytes = whole_number(max_bytes, "max_bytes")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(self.folder, error) from error

    def hold(self, name: str, size: int, fetch: Fetch) -> Lease:
        """The file `name` of `size` bytes, here already or brought by `fetch`."""
        path = self.folder / name
        try:
            while True:  # another turn means that another fetched it, or failed to, meanwhile
                lease = _here(path, size) or self._brought(path, size, fetch)
                if lease is not None:
                    return lease
        except OSError as error:
            if isinstance(error, ShardmillError):
                raise
            raise _unusable(path, error) from error

    def _brought(self, path: Path, size: int, fetch: Fetch) -> Lease | None:
        """Fetched by us, or by another whom we waited for; None if we must look again."""
        part = path.with_name(f".{path.name}.{size}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._changing_names():
            if path.exists():
                if path.lstat().st_size == size:
                    return None  # another was quicker
                path.unlink()  # somebody cut it: fetched again
            file = LockedFile(part, create=True)
            try:
                is_ours = _claimed(file)
                if is_ours:
                    self._make_room(part, size)
            except (OSError, StoreError):
                file.close()
                raise
        lease = None
        try:
            if is_ours:
                lease = self._fetched(file, path, part, size, fetch)
            else:
                file.shared()  # until the other is done, or dead
                lease = _lease(file, path, size)
            return lease
        finally:
            if lease is None:
                file.close()

    def _fetched(self, file: LockedFile, path: Path, part: Path, size: int, fetch: Fetch) -> Lease:
        """Our part, filled and given its name."""
        try:
            fetch(part)
            if file.size != size:
                raise DamagedStoreError(
                    f"{path}: {file.size:,} bytes were fetched, wanted {size:,}; fetch it again"
                )
        except DamagedStoreError:
            with self._changing_names():
                part.unlink(missing_ok=True)
            raise
        with self._changing_names():
            if not file.is_at(part):
                raise StoreError(
                    f"{part}: was removed or replaced while it was fetched; leave the files of a "
                    "cache to shardmill, and read again"
                )
            part.rename(path)
            file.shared()
        return Lease(path, file)

    def _make_room(self, part: Path, size: int) -> None:
        """Remove what was used longest ago until `size` more bytes fit, or give the part up."""
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        others = [entry for entry in entries if entry.path != part]
        total = size + sum(entry.size for entry in others)
        for entry in others if size <= self.max_bytes else ():
            if total <= self.max_bytes:
                return
            if _removed(entry.path):
                total -= entry.size
        if total <= self.max_bytes:
            return
        part.unlink()
        if size > self.max_bytes:
            raise StoreError(
                f"{self.folder}: a file of {size:,} bytes is wanted, but max_bytes is "
                f"{self.max_bytes:,}; allow more"
            )
        raise StoreError(
            f"{self.folder}: {total - size:,} bytes are in use and {size:,} more are wanted, "
            f"but max_bytes is {self.max_bytes:,}; release shards, or allow more"
        )

    def _entries(self) -> Iterator[_Entry]:
        for top, _, names in os.walk(self.folder):
            for name in names:
                path = Path(top, name)
                if path == self.folder / _LOCK:
                    continue
                with suppress(FileNotFoundError):  # not one of ours: ours stay while we look
                    found = path.lstat()
                    part = _PART.fullmatch(name)
                    if stat.S_ISREG(found.st_mode):
                        size = max(found.st_size, int(part[1]) if part else 0)
                        yield _Entry(found.st_mtime_ns, path, size)

    @contextmanager
    def _changing_names(self) -> Iterator[None]:
        lock = LockedFile(self.folder / _LOCK, create=True)
        try:
            lock.exclusive()
            yield
        finally:
            lock.close()


def _here(path: Path, size: int) -> Lease | None:
    """The file, if it is there and whole."""
    try:
        file = LockedFile(path)
    except FileNotFoundError:
        return None
    lease = None
    try:
        file.shared()  # waits for one who removes it or has just fetched it: a moment
        lease = _lease(file, path, size)
    finally:
        if lease is None:
            file.close()
    return lease


def _lease(file: LockedFile, path: Path, size: int) -> Lease | None:
    """A lease on what we have shared, if it is the whole file and still has its name."""
    return Lease(path, file) if file.is_at(path) and file.size == size else None


def _claimed(part: LockedFile) -> bool:
    """Whether the part is ours to fetch; False if another fetches it. Under `.lock`."""
    if part.try_exclusive():
        return True
    if not part.try_shared():
        return False
    # Nobody fetches it, and under .lock nobody begins to. Who has it shared waited for a fetcher
    # that died, and lets go at once: trying again and again instead, many could fail for ever.
    part.exclusive()
    return True


def _removed(path: Path) -> bool:
    """Whether the file is gone: nobody held it. Under `.lock`."""
    try:
        file = LockedFile(path)
    except FileNotFoundError:
        return True
    try:
        if not file.try_exclusive():
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        file.close()


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: the cache cannot be used: {error.strerror}; make room, or choose a folder on a "
        "local disk that you may write to"
    )
