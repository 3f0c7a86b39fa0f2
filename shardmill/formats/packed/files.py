"""A folder that appears at its place when it is finished, as a whole or not at all.

In: the place it shall have.  Out: a folder beside it to write into; later, the place.
Promise: until `publish` nothing is at the place; a folder that holds anything is never written
into or replaced; of two writers of one place the second is refused, never mixed with the first;
a failure removes what was staged. A kill leaves it: its name starts with a dot, ends in `.tmp`,
and nobody reads it.
Not here: what is in the folder.

Manifests that know whether they were changed.

In: the keys of a manifest, or the folder of one.  Out: the same with a seal, or checked.
Promise: the seal is the sha256 over all other keys; a file that is no JSON object is one error.
Not here: what the keys mean.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import msgspec

from shardmill.errors import (
    BuildError,
    DamagedStoreError,
    ManifestError,
    StoreExistsError,
    StoreNotFoundError,
)
from shardmill.records import JSON
from shardmill.storage.atomic import atomic_write, sync_folder, temporary_name

MANIFEST = "manifest.json"


class StagedFolder:
    """One folder on its way to `target`."""

    def __init__(self, target: Path, what: str) -> None:
        """`target` was checked by `given_path`; `what` it will be, for messages: "packed shard"."""
        self.target = target.resolve()
        self._what = what
        self._check_free()
        self.folder = temporary_name(self.target)
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir()
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        self._remove = weakref.finalize(self, _remove, self.folder, os.getpid())

    def publish(self) -> None:
        """Make the folder durable and give it its name. Everything in it was synced before."""
        sync_folder(self.folder)
        self._check_free()
        try:
            self.folder.rename(self.target)  # replaces an empty folder, and nothing else
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise StoreExistsError(
                    f"{self.target}: another process put files there meanwhile; look, then write "
                    "again to another folder"
                ) from error
            raise cannot_write(self.target, error) from error
        self._remove.detach()
        sync_folder(self.target.parent)

    def abort(self) -> None:
        """Remove what was staged; may be called again, and after `publish` does nothing."""
        self._remove()

    def _check_free(self) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise StoreExistsError(f"{self.target}: a file is in the way; move it away first")
        names = sorted(entry.name for entry in self.target.iterdir())
        if MANIFEST in names:
            raise StoreExistsError(
                f"{self.target}: a finished {self._what} stands here and is never overwritten; "
                "remove it or choose another folder"
            )
        if names:
            raise StoreExistsError(
                f"{self.target}: holds {names[0]!r} and no {MANIFEST}, so it is no finished "
                f"{self._what}; move it away or choose another folder"
            )


def check_room(target: Path, num_bytes: int, what: str) -> None:
    """Refuse what the disk of `target` cannot hold, before anything is written."""
    path = target.resolve()
    standing = next(place for place in (path, *path.parents) if place.is_dir())
    free = shutil.disk_usage(standing).free
    if num_bytes > free:
        raise BuildError(
            f"{path}: {what} take {num_bytes:,} bytes there, but {free:,} are free; nothing was "
            "written: make room, write to another disk, or check the numbers"
        )


def cannot_write(path: Path, error: OSError) -> BuildError:
    """The one wording for a disk that does not take our bytes."""
    return BuildError(
        f"{path}: cannot write: {error.strerror}; nothing was published: make room, or write to "
        "another disk"
    )


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked copy must not take the folder of its parent away
        shutil.rmtree(folder, ignore_errors=True)


SEAL = "manifest_sha256"
_MAX_MANIFEST = 2**24


def sealed(fields: dict[str, JSON]) -> dict[str, JSON]:
    """A manifest with its seal."""
    rest = {name: value for name, value in fields.items() if name != SEAL}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return {**rest, SEAL: digest}


def is_sealed(fields: dict[str, JSON]) -> bool:
    """Whether these are the keys that were sealed."""
    return fields.get(SEAL) == sealed(fields)[SEAL]


def check_plain(path: Path) -> None:
    """Refuse what is there and is no plain file: reading a pipe might never end."""
    if path.exists() and not path.is_file():
        raise DamagedStoreError(f"{path}: not a plain file; copy the data again")


def write_manifest(folder: Path, manifest: dict[str, JSON]) -> None:
    with atomic_write(folder / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=2).encode() + b"\n")


def read_json(folder: Path, what: str) -> tuple[dict[str, JSON], bytes]:
    """The keys of the manifest at `folder`, and its bytes. `what` should be there, for messages."""
    path = folder / MANIFEST
    check_plain(path)
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_MANIFEST else b"(too large)"
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreNotFoundError(f"{folder}: no {MANIFEST} here, so no finished {what}") from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        fields: dict[str, JSON] = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: no manifest of a {what}: {error}") from error
    return fields, data
