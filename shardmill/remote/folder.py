"""A folder to push to and pull from: on object storage, a web server, a disk or in memory.

Every request is retried (`storage.retry`). Names are joined to the folder and never leave it, no
bucket is ever created, and a listing is always current. `create` and `put` never overwrite: in one
step where the service has a conditional create (S3, Google Cloud Storage, a local disk, memory),
elsewhere after a look.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec

from shardmill.arguments import is_url
from shardmill.errors import (
    DamagedStoreError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from shardmill.storage.object_store import connect, fetch_range, find_files
from shardmill.storage.retry import RetryPolicy
from shardmill.urls import Url

BLOCK = 8 * 2**20
"""Bytes per request."""

TEMPORARY = ".shardmill-part-"
"""How the names of unfinished files on a disk begin."""

T = TypeVar("T")

_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"}
_CREATES = {"s3", "s3a", "gs", "gcs"}  # clients whose mode="create" is a condition of the request
_UNSUPPORTED = {"NotImplemented", "ParamValidationError"}  # a service or client without conditions
_memory_lock = threading.Lock()  # fsspec's file system in memory looks and writes in two steps
_PART = 16 * 2**20
_MOST_PARTS = 9_000


def open_folder(url: str, options: Mapping[str, Any] | None = None) -> RemoteFolder:
    """The folder at `url`; `options` go to the file system. Sends no request yet."""
    if not url.strip():
        raise OptionError("the URL is empty; wanted s3://bucket/path, say: is a variable not set?")
    address = Url(url)
    if address.refusal is None and "://" not in url and (is_url(url) or url.startswith("hub:")):
        raise OptionError(f"{address}: found no '://' in it; wanted s3://bucket/path, or a folder")
    is_local = address.scheme in ("file", "local")
    if address.refusal is None and is_local and ":///" not in url:
        raise OptionError(f"{address}: its path is not absolute; wanted file:///folder/name")
    if address.refusal is None and address.is_web and urlsplit(url).query:
        raise OptionError(
            f"{address}: has a query (?...), which belongs to one file and not to a folder of files"
        )
    return folder_at(*connect(address, options), str(address))


def open_destination(url: str, options: Mapping[str, Any] | None = None) -> RemoteFolder:
    """The same, to write to. Chained file systems cannot guarantee what a push relies on."""
    if "::" in url.partition("://")[0]:
        raise OptionError(f"{Url(url)}: a chained URL is only read from; name its last part")
    return open_folder(url, options)


def folder_at(fs: Any, root: str, url: str) -> RemoteFolder:
    """A folder of an open file system."""
    root = root.rstrip("/")
    if not root:
        raise OptionError(f"{url}: names no folder; wanted something like {url}/name")
    return RemoteFolder(fs, root, url.rstrip("/"))


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A folder of a file system. Made by `open_folder`."""

    fs: Any = field(repr=False)  # fsspec's AbstractFileSystem
    # as `fs` names it, without a "/" at the end; it may hold a secret
    root: str = field(repr=False)
    url: str  # for messages: without secrets
    retry: RetryPolicy = field(default_factory=RetryPolicy, repr=False)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def call(self, action: Callable[[], T], name: str | None = None) -> T:
        """The result of a request, with retries; `name` is the file that it is about."""
        what = self.url if name is None else f"{self.url}/{name}"
        return self.retry.call(action, what, raises=StoreError)

    def listing(self) -> Listing:
        """Every file below."""
        if self.is_web:
            raise StoreError(
                f"{self.url}: a web server is only read from: it cannot be listed and cannot be "
                "written to; use object storage or a disk"
            )
        start = len(self.root) + 1
        found = self.call(lambda: find_files(self.fs, self.root))
        # A folder that was empty a moment ago is found itself; so is a file, under the name "".
        files = {path: info for path, info in found.items() if info.get("type") != "directory"}
        return Listing(self, {path[start:]: info for path, info in files.items()})

    def info(self, name: str) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            self.fs.invalidate_cache()
            found: dict[str, Any] = self.fs.info(self.path(name))
            return found

        return self.call(ask, name)

    def read(self, name: str, num_bytes: int) -> bytes:
        """A small file of known size."""

        def whole(pieces: Iterator[bytes]) -> bytes:
            data = b"".join(pieces)
            if len(data) != num_bytes:
                raise ConnectionError(f"{len(data):,} bytes came, wanted {num_bytes:,}")
            return data

        return self._use(name, num_bytes, whole)

    def read_if_there(self, name: str) -> bytes | None:
        """A small file of ours, not empty, whose size is not known; None if there is none."""
        # Asked for a range, the client for S3 does not ask for the size first.
        limits = {} if self.is_local else {"start": 0, "end": 2**40}
        try:
            data: bytes = self.call(lambda: self.fs.cat_file(self.path(name), **limits), name)
        except StoreNotFoundError:
            return None
        return data

    def sha256(self, name: str, size: int) -> str:
        """The hash of a whole file of `size` bytes, read back. Empty if it is gone."""
        try:
            return self._use(name, size, _sha256)
        except StoreNotFoundError:
            return ""

    def web_size(self, name: str, most: int) -> int | None:
        """Bytes of a file of a web server, or None if it does not exist.

        The server may not say, so the file is read, up to a little more than `most` bytes.
        """
        try:
            return self._use(name, most, lambda pieces: sum(map(len, pieces)))
        except StoreNotFoundError:
            return None

    def _use(self, name: str, size: int, use: Callable[[Iterator[bytes]], T]) -> T:
        """What `use` makes of the pieces of a file of `size` bytes."""
        return self.call(lambda: use(piece for _, piece in self.pieces(name, 0, size)), name)

    def pieces(self, name: str, start: int, size: int) -> Iterator[tuple[int, bytes]]:
        """A file of `size` bytes from `start` on, as (offset, bytes).

        A web server is asked once, without retries. It begins at 0 if it does not serve ranges, and
        may send without an end: no more is read than a little over `size` bytes.
        """
        if not self.is_web:
            fetch = partial(fetch_range, self.fs, self.path(name))
            for at in range(start, size, BLOCK):
                stop = min(at + BLOCK, size)
                yield at, self.call(partial(fetch, at, stop), name)
            return
        for at, piece in self._web_pieces(name, start):
            yield at, piece
            if at + len(piece) > size:
                return

    def _web_pieces(self, name: str, start: int) -> Iterator[tuple[int, bytes]]:
        headers = {**self.fs.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        import aiohttp  # comes with the client of fsspec that this folder uses

        # No limit on the whole, as long as something arrives.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=60)
        # block_size 0: as a stream; size: so that the client does not ask for it first
        answer = self.fs._open(
            self.path(name), block_size=0, size=1, headers=headers, timeout=timeout
        )
        try:
            at = start if answer.r.status == 206 else 0
            while piece := answer.read(BLOCK):
                yield at, piece
                at += len(piece)
        finally:
            answer.close()

    def pipe(self, name: str, data: bytes) -> None:
        """Write a small file, over an existing one; a reader sees one of them whole."""
        self._make_parent(name)
        if not self.is_local:
            self.call(lambda: self.fs.pipe_file(self.path(name), data), name)
            return
        part = self.path(f"{TEMPORARY}{secrets.token_hex(8)}")
        try:
            self.call(lambda: self.fs.pipe_file(part, data), name)
            self.call(lambda: Path(part).replace(self.path(name)), name)
        finally:
            Path(part).unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """As `pipe`, and check by reading it back."""
        self.pipe(name, data)
        self._read_back(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless another one exists: then False, and that one is unchanged."""
        if not self._create(name, lambda path, **how: self.fs.pipe_file(path, data, **how)):
            size = self.info(name)["size"]  # perhaps ours, and only the answer was lost
            return bool(size == len(data) and self.read(name, size) == data)
        self._read_back(name, data)
        return True

    def put(self, source: Path, name: str, on_bytes: Callable[[int], None]) -> bool:
        """Upload a local file, large ones in parts, unless a file exists: then False.

        `on_bytes` gets the number of bytes sent so far.
        """
        parts = {}
        if {"s3", "s3a"} & self.protocols:
            parts = {"chunksize": part_bytes(source.stat().st_size), "max_concurrency": 2}

        def put(path: str, **how: Any) -> None:
            meter = fsspec.Callback(hooks={"sent": lambda _, sent: on_bytes(sent)})  # of this try
            self.fs.put_file(str(source), path, callback=meter, **parts, **how)

        return self._create(name, put)

    def _create(self, name: str, send: Callable[..., None]) -> bool:
        """Whether the file that `send` writes to a path got this name."""
        self._make_parent(name)
        if self.is_local:
            return self.call(lambda: self._link(name, send), name)
        path, kinds = self.path(name), self.protocols

        def create() -> bool:
            try:
                if kinds & _CREATES:
                    send(path, mode="create")
                    return True
            except FileExistsError:
                return False
            except Exception as error:
                if _code(error) == "PreconditionFailed":
                    return False
                if not isinstance(error, TypeError) and _code(error) not in _UNSUPPORTED:
                    raise
            self.fs.invalidate_cache()
            if self.fs.exists(path):
                return False
            send(path)
            return True

        with _memory_lock if "memory" in kinds else nullcontext():
            return self.call(create, name)

    def _link(self, name: str, send: Callable[..., None]) -> bool:
        """On a disk: write the whole file under another name, then give it its own in one step."""
        part = self.path(f"{TEMPORARY}{secrets.token_hex(8)}")
        try:
            send(part)
            try:
                os.link(part, self.path(name))
            except OSError as error:
                if error.errno == errno.EEXIST:
                    return False
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                if Path(self.path(name)).exists():  # a disk without links
                    return False
                shutil.move(part, self.path(name))
            return True
        finally:
            Path(part).unlink(missing_ok=True)

    def _read_back(self, name: str, data: bytes) -> None:
        if self.info(name)["size"] != len(data) or self.read(name, len(data)) != data:
            raise DamagedStoreError(
                f"{self.url}/{name}: reading it back gave other bytes than were written; does "
                "another process write there? Look, then push again"
            )

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

        def remove() -> None:
            try:
                self.fs.rm_file(self.path(name))
            except FileNotFoundError:
                return

        self.call(remove, name)

    @property
    def protocols(self) -> frozenset[str]:
        found = self.fs.protocol
        return frozenset((found,) if isinstance(found, str) else found)

    @property
    def is_local(self) -> bool:
        return bool({"file", "local"} & self.protocols)

    @property
    def is_web(self) -> bool:
        return bool({"http", "https"} & self.protocols)

    def _make_parent(self, name: str) -> None:
        if not _BUCKETS & self.protocols:  # there, this would make a bucket
            parent = self.path(name).rpartition("/")[0]
            self.call(lambda: self.fs.makedirs(parent, exist_ok=True))


class Listing(dict[str, dict[str, Any]]):
    """A folder when it was listed: name -> what the file system knows of the file ("size", ...)."""

    def __init__(self, remote: RemoteFolder, files: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(files)
        self.remote = remote

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """A small file; None if there is none."""
        if name not in self:
            return None
        size = self[name]["size"]
        if size > max_bytes:
            raise StoreExistsError(
                f"{self.remote.url}/{name}: {size:,} bytes, wanted at most {max_bytes:,}, so none "
                "of ours; look there, or check the URL"
            )
        return self.remote.read(name, size)


def part_bytes(size: int) -> int:
    """Bytes per part of a file of `size` bytes: whole MiB, and never too many parts."""
    mib = 2**20
    return max(_PART, -(-size // (_MOST_PARTS * mib)) * mib)


def _sha256(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _code(error: BaseException) -> str:
    """S3's code for an error, or the class of the error if there is none."""
    answer = getattr(error.__cause__ or error, "response", None)
    code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return str(code or type(error).__name__)
