"""A lock of the kernel on an open file: shared or exclusive, with or without waiting.

A lock belongs to one opening of the file, so threads exclude each other as processes do. It ends
with `close` and with the process. A forked process has no part in an exclusive lock: otherwise its
parent's death or `close` would not end it. It does share a shared lock. Network disks without
`flock` are not supported.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

_guard = threading.RLock()  # held while files are opened and closed, and over every fork
_private: set[int] = set()  # descriptors that a forked process must not keep


class LockedFile:
    """An open file, not locked at first. Links are refused."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        flags = os.O_NOFOLLOW | ((os.O_CREAT | os.O_RDWR) if create else os.O_RDONLY)
        with _guard:
            self._descriptor: int | None = os.open(path, flags, 0o644)
            _private.add(self._descriptor)

    def try_exclusive(self) -> bool:
        """Lock exclusively, unless there is another lock."""
        return self._try(fcntl.LOCK_EX)

    def exclusive(self) -> None:
        """Lock exclusively; wait for all other locks to end."""
        fcntl.flock(self.fileno(), fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        """Lock shared, unless there is an exclusive lock."""
        return self._try(fcntl.LOCK_SH)

    def shared(self) -> None:
        """Lock shared; wait for an exclusive lock to end. Our own is dropped a moment before."""
        fcntl.flock(self.fileno(), fcntl.LOCK_SH)

    def inherit(self) -> None:
        """Let forked processes share this lock from now on; for shared locks only."""
        with _guard:
            _private.discard(self.fileno())

    def duplicate(self) -> int:
        """Another descriptor of this opening, for the caller to close.

        A shared lock lasts until both are closed.
        """
        return os.dup(self.fileno())

    def is_at(self, path: Path) -> bool:
        """Whether the open file still has this name."""
        try:
            return os.path.samestat(os.fstat(self.fileno()), path.lstat())
        except FileNotFoundError:
            return False

    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def set_time(self, ns: int) -> None:
        os.utime(self.fileno(), ns=(ns, ns))

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

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self.fileno(), kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _forked() -> None:
    """Close what belongs to the parent alone. Its locks stay, since it has the files open too."""
    for descriptor in _private:
        os.close(descriptor)
    _private.clear()
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forked)
