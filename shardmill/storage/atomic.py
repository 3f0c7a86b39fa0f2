"""Files that several processes share: written atomically, and locked.

A reader sees all of a file or none of it, also after a crash. A failure leaves no temporary file. A
kill may leave one: its name starts with a dot, ends in `.tmp`, is unique, and is never read. A
`HashedFile` is for folders that are published as a whole later: it has its final name from the
start and is durable when it is finished.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import io
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shardmill.errors import BuildError

_BUFFER = 2**18
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}

_guard = threading.RLock()  # held while files are opened and closed, and over every fork
_private: set[int] = set()  # descriptors that a forked process must not keep


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at `path` when the block succeeds, and not at all otherwise."""
    path = Path(path)
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process uses: `.meta.json.<16 hex digits>.tmp`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def is_temporary(name: str) -> bool:
    """Whether a file name is one that `temporary_name` makes."""
    return name.startswith(".") and name.endswith(".tmp")


def sync_folder(path: Path) -> None:
    """Make new and renamed files in this folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def exchange(first: Path, second: Path) -> bool:
    """Swap two existing paths atomically; False where the system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def cannot_write(path: Path, error: OSError) -> BuildError:
    """The error for a disk that refuses our bytes."""
    return BuildError(
        f"{path}: cannot write: {error.strerror}; nothing was published: free some space and pass "
        "{resume}, or build on another disk",
        resume=True,
    )


class HashedFile:
    """A new file, written front to back; `finish` syncs it and returns its sha256."""

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        self.path = path
        self._sha256 = hashlib.sha256()
        self._file = io.BufferedWriter(io.FileIO(path, "wb" if replace else "xb"), _BUFFER)

    def write(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def finish(self) -> str:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise cannot_write(self.path, error) from error
        return self._sha256.hexdigest()

    def abort(self) -> None:
        """Close the file, whatever of it is on disk. Never raises."""
        with suppress(OSError):  # its content is given up anyway
            self._file.close()


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/shardmill/<name>`, or `~/.cache/shardmill/<name>`. Not created here."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shardmill" / name


class LockedFile:
    """An open file for a lock of the kernel (flock), not locked at first. Links are refused.

    A lock belongs to one opening of the file, so threads exclude each other as processes do. It
    ends with `close` and with the process. A forked process has no part in an exclusive lock:
    otherwise its parent's death or `close` would not end it. It does share a shared lock. Network
    disks without `flock` are not supported.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        flags = os.O_NOFOLLOW | ((os.O_CREAT | os.O_RDWR) if create else os.O_RDONLY)
        with _guard:
            self._descriptor: int | None = os.open(path, flags, 0o644)
            _private.add(self._descriptor)

    def lock(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Lock exclusively or shared, in place of our own lock if we have one. Whether that
        succeeded; with `wait` it does, when the locks that exclude ours have ended."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self.fileno(), kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def inherit(self) -> None:
        """Let forked processes share this lock from now on; for shared locks only."""
        with _guard:
            _private.discard(self.fileno())

    def is_at(self, path: Path) -> bool:
        """Whether the open file still has this name."""
        try:
            return os.path.samestat(os.fstat(self.fileno()), path.lstat())
        except FileNotFoundError:
            return False

    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def close(self) -> None:
        """End the lock; may be called again, and by two threads."""
        with _guard:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                _private.discard(descriptor)
                os.close(descriptor)

    def fileno(self) -> int:
        if self._descriptor is None:
            raise ValueError("this file was closed")
        return self._descriptor


def _forked() -> None:
    """Close what belongs to the parent alone. Its locks stay, since it has the files open too."""
    for descriptor in _private:
        os.close(descriptor)
    _private.clear()
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forked)
