"""A folder somewhere: object storage, another disk, memory.

In: a URL.  Out: a `Place`: list, read, write, remove, each tried again when that may help.
Promise: names are joined to the folder and never leave it; nothing here creates a bucket; a
listing is never an old one.
Not here: what the files are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from shardmill.errors import DamagedStoreError, OptionError, missing_extra
from shardmill.remote.retry import attempt

BLOCK = 8 * 2**20
"""Bytes asked for at a time."""

_EXTRAS = {"s3": "s3", "s3a": "s3"}
_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"}
_PART = 16 * 2**20
_MOST_PARTS = 9_000
# the tries are ours to count (retry.py), not those of the client below the client
_S3_DEFAULTS = {"config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 1}}}


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of a file system; made by `open_place`."""

    fs: Any  # fsspec's AbstractFileSystem
    root: str  # as `fs` names it, without a "/" at the end
    url: str  # for messages

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def listing(self) -> dict[str, dict[str, Any]]:
        """Every file below: relative name -> what the file system knows of it ("size", ...)."""

        def find() -> dict[str, dict[str, Any]]:
            self.fs.invalidate_cache()
            try:
                found: dict[str, dict[str, Any]] = self.fs.find(self.root, detail=True)
            except FileNotFoundError:
                return {}
            return found

        start = len(self.root) + 1
        return {path[start:]: info for path, info in attempt(self.url, find).items()}

    def info(self, name: str) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            self.fs.invalidate_cache()
            found: dict[str, Any] = self.fs.info(self.path(name))
            return found

        return attempt(f"{self.url}/{name}", ask)

    def read(self, name: str, num_bytes: int) -> bytes:
        """A small file of known size, whole."""
        return b"".join(self.block(name, at, num_bytes) for at in range(0, num_bytes, BLOCK))

    def block(self, name: str, start: int, size: int) -> bytes:
        """The bytes from `start` on: `BLOCK` of them, or up to `size`, the end of the file."""
        stop = min(start + BLOCK, size)

        def get() -> bytes:
            data: bytes = self.fs.cat_file(self.path(name), start=start, end=stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data):,} bytes came, wanted {stop - start:,}")
            return data

        return attempt(f"{self.url}/{name}", get)

    def sha256(self, name: str, size: int) -> str:
        """Of the whole file, read back."""
        digest = hashlib.sha256()
        for start in range(0, size, BLOCK):
            digest.update(self.block(name, start, size))
        return digest.hexdigest()

    def write(self, name: str, data: bytes) -> None:
        """A small file; it is read back, and must be the same."""
        self._make_parent(name)
        attempt(f"{self.url}/{name}", lambda: self.fs.pipe_file(self.path(name), data))
        if self.info(name)["size"] != len(data) or self.read(name, len(data)) != data:
            raise DamagedStoreError(
                f"{self.url}/{name}: other bytes came back than were written; does another "
                "process write there? Look, then push again"
            )

    def put(self, source: Path, name: str, on_bytes: Callable[[int], None]) -> None:
        """A local file, large ones in parts; `on_bytes` hears how many bytes are sent."""
        self._make_parent(name)
        size = source.stat().st_size
        options = {"chunksize": part_bytes(size), "max_concurrency": 2} if self.is_s3 else {}
        meter = _Callback(on_bytes)
        attempt(
            f"{self.url}/{name}",
            lambda: self.fs.put_file(str(source), self.path(name), callback=meter, **options),
        )

    def remove(self, name: str) -> None:
        """Gone, or it was not there."""

        def rm() -> None:
            try:
                self.fs.rm_file(self.path(name))
            except FileNotFoundError:
                return

        attempt(f"{self.url}/{name}", rm)

    @property
    def protocols(self) -> tuple[str, ...]:
        found = self.fs.protocol
        return (found,) if isinstance(found, str) else tuple(found)

    @property
    def is_s3(self) -> bool:
        return bool({"s3", "s3a"} & set(self.protocols))

    def _make_parent(self, name: str) -> None:
        if not _BUCKETS & set(self.protocols):  # there, this would make a bucket
            parent = self.path(name).rpartition("/")[0]
            attempt(self.url, lambda: self.fs.makedirs(parent, exist_ok=True))


def part_bytes(size: int) -> int:
    """How large the parts of a file of `size` bytes are: whole MiB, never too many of them."""
    mib = 2**20
    return max(_PART, -(-size // (_MOST_PARTS * mib)) * mib)


def open_place(url: str, options: Mapping[str, Any] | None = None) -> Place:
    """The folder at `url`; `options` go to the file system. Asks nobody anything yet."""
    if not url.strip():
        raise OptionError("the URL is empty; wanted s3://bucket/path, say: is a variable not set?")
    protocol = url.partition("://")[0] if "://" in url else "file"
    defaults = _S3_DEFAULTS if protocol in _EXTRAS else {}
    try:
        fs, root = fsspec.core.url_to_fs(url, **{**defaults, **(options or {})})
    except ImportError as missing:
        if protocol in _EXTRAS:
            raise missing_extra("s3fs", _EXTRAS[protocol]) from missing
        raise OptionError(f"{shown(url)}: {missing}") from missing
    except (ValueError, TypeError, OSError) as error:
        raise OptionError(f"{shown(url)}: {error}; wanted s3://bucket/path, say") from error
    return place_of(fs, root, shown(url))


def place_of(fs: Any, root: str, url: str) -> Place:
    """A folder of an open file system."""
    root = root.rstrip("/")
    if not root:
        raise OptionError(f"{url}: names no folder; wanted something like {url}/name")
    return Place(fs, root, url.rstrip("/"))


def shown(url: str) -> str:
    """A URL that may be printed: no user, no password."""
    return re.sub(r"(?<=://)[^/@]*@", "", url)


class _Callback(fsspec.Callback):  # type: ignore[misc]
    """fsspec counts in steps; a meter wants the sum of one try."""

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        super().__init__()
        self._on_bytes = on_bytes

    def set_size(self, size: int) -> None:
        super().set_size(size)
        self.absolute_update(0)  # a new try

    def call(self, *_: object, **__: object) -> None:
        self._on_bytes(self.value)
