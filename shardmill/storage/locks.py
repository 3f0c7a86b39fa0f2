"""A lock of the kernel on an open file.

In: a path.  Out: a `LockedFile`: shared or exclusive, with or without waiting.
Promise: a lock belongs to one opening, so threads exclude each other as processes do; it ends with
`close` and with the process. A process made by `fork` gets no part in an exclusive lock: else its
parent's death, or its parent's `close`, would not end it. It does share what is shared.
Not here: what a lock is for (cache.py); network disks without `flock`.
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
        """Alone, if nobody else has a lock."""
        return self._try(fcntl.LOCK_EX)

    def exclusive(self) -> None:
        """Alone, when all others have let go."""
        fcntl.flock(self._fileno(), fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        """With others, if nobody is alone."""
        return self._try(fcntl.LOCK_SH)

    def shared(self) -> None:
        """With others, when nobody is alone. From exclusive, there is a moment without a lock."""
        fcntl.flock(self._fileno(), fcntl.LOCK_SH)

    def inherit(self) -> None:
        """From now on a forked process shares this lock: only for shared ones."""
        with _guard:
            _private.discard(self._fileno())

    def duplicate(self) -> int:
        """Another descriptor of this opening, for the caller to close. A shared lock lasts until
        both are closed."""
        return os.dup(self._fileno())

    def is_at(self, path: Path) -> bool:
        """Whether the open file has this name now."""
        try:
            return os.path.samestat(os.fstat(self._fileno()), path.lstat())
        except FileNotFoundError:
            return False

    @property
    def size(self) -> int:
        return os.fstat(self._fileno()).st_size

    def set_time(self, ns: int) -> None:
        os.utime(self._fileno(), ns=(ns, ns))

    def close(self) -> None:
        """Let go; may be called again, and by two threads."""
        with _guard:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                _private.discard(descriptor)
                os.close(descriptor)

    def _fileno(self) -> int:
        if self._descriptor is None:
            raise ValueError("this file was closed")
        return self._descriptor

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fileno(), kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _forked() -> None:
    """Drop what belongs to the parent alone; its locks stay, since it has them open too."""
    for descriptor in _private:
        os.close(descriptor)
    _private.clear()
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forked)
