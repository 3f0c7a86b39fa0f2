"""A finished store that another one begins with.

In: the folder of a store.  Out: its bytes for the new one, checked.
Promise: files that never change are shared by hard links, and copied where the disk cannot link;
what is copied is compared with the hash of the old manifest. The old store is only read.
Not here: writing behind it (sinks.py, writer.py), replacing it (publish.py).
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardmill.atomic import HashedFile, cannot_write
from shardmill.errors import DamagedStoreError
from shardmill.records import Drop
from shardmill.shards.contents import chunks
from shardmill.shards.entries import Manifest
from shardmill.shards.layout import META
from shardmill.shards.maps import NEXT_STEP
from shardmill.shards.store import open_store

log = logging.getLogger(__name__)

_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}


@dataclass(frozen=True, slots=True, kw_only=True)
class OldStore:
    """A finished store that is to be continued."""

    folder: Path
    manifest: Manifest
    sha256: str  # of its meta.json, to the byte

    def is_still_there(self) -> bool:
        """Whether nobody replaced it meanwhile."""
        return _meta_sha256(self.folder) == self.sha256

    def drops(self) -> Iterator[Drop]:
        """Its dropped rows, in order."""
        entry = self.manifest.dropped
        if entry is None:
            return
        with (self.folder / entry.file).open("rb") as lines:
            for line in lines:
                try:
                    row = msgspec.json.decode(line, type=_Row)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise damaged(self.folder / entry.file, f"a line is no row: {error}") from error
                yield Drop(id=row.id, reason=row.reason)


class _Row(msgspec.Struct, frozen=True):
    id: str
    reason: str


def open_old(folder: Path) -> OldStore:
    """The store at `folder`, after the checks of `open_store`."""
    sha256 = _meta_sha256(folder)
    store = open_store(folder)
    return OldStore(folder=store.folder, manifest=store.manifest, sha256=sha256)


def share_file(old: Path, new: Path, sha256: str) -> bool:
    """Put a file that never changes into another folder; False when it had to be copied."""
    try:
        os.link(os.path.realpath(old), new)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise cannot_write(new, error) from error
    else:
        return True
    file = HashedFile(new)
    try:
        for chunk in checked_chunks(old, sha256):
            file.write(chunk)
        file.finish()
    finally:
        file.abort()
    return False


def checked_chunks(path: Path, sha256: str) -> Iterator[memoryview]:
    """The bytes of a file, in a buffer that is used again; behind the last, their hash is right."""
    digest = hashlib.sha256()
    try:
        for chunk in chunks(path, lambda _: None):
            digest.update(chunk)
            yield chunk
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error
    if digest.hexdigest() != sha256:
        raise damaged(path, f"its sha256 is {digest.hexdigest()}, wanted {sha256}")


def damaged(path: Path, what: str) -> DamagedStoreError:
    return DamagedStoreError(f"{path}: {what}; {NEXT_STEP}")


def _meta_sha256(folder: Path) -> str:
    """Empty when there is none."""
    try:
        with (folder / META).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
