"""A folder somewhere: object storage, another disk, memory.

`open_place` gives a `Place`: list, read, create, write, remove, each tried again when that may
help. Names are joined to the folder and never leave it; nothing here creates a bucket; a listing is
never an old one. `create` and `put` never overwrite: in one step where the service has a
conditional create (S3, Google Cloud Storage, a local disk, memory), else after a look.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec

from shardmill.arguments import is_url
from shardmill.errors import DamagedStoreError, OptionError, StoreError, missing_extra
from shardmill.storage.retry import RetryPolicy
from shardmill.urls import Url, remember_options, safe_cause

BLOCK = 8 * 2**20
"""Bytes asked for at a time."""

TEMPORARY = ".shardmill-part-"
"""How the names of unfinished files on a disk begin."""

Listing = dict[str, dict[str, Any]]
"""Relative name -> what the file system knows of the file ("size", ...)."""

Pieces = Iterator[tuple[int, bytes]]
T = TypeVar("T")

_EXTRAS = {"s3": "s3", "s3a": "s3"}
_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"}
_CREATES = {"s3", "s3a", "gs", "gcs"}  # clients whose mode="create" is a condition of the request
_UNKNOWN = {"NotImplemented", "ParamValidationError"}  # a service or client without conditions
_memory = threading.Lock()  # fsspec's file system in memory looks and writes in two steps
_PART = 16 * 2**20
_MOST_PARTS = 9_000
# the tries are ours to count (retry.py), not those of the client below the client
_S3_DEFAULTS = {"config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 1}}}


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A folder of a file system; made by `open_place`."""

    fs: Any = field(repr=False)  # fsspec's AbstractFileSystem
    # as `fs` names it, without a "/" at the end; it may hold a secret
    root: str = field(repr=False)
    url: str  # for messages: without secrets

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _retried(self, action: Callable[[], T], name: str | None = None) -> T:
        what = self.url if name is None else f"{self.url}/{name}"
        return RetryPolicy().call(action, what, raises=StoreError)

    def listing(self) -> Listing:
        """Every file below."""
        if self.is_web:
            raise StoreError(
                f"{self.url}: a web server is only read from: it cannot be listed and cannot be "
                "written to; take object storage or a disk"
            )

        def find() -> dict[str, dict[str, Any]]:
            self.fs.invalidate_cache()
            try:
                found: dict[str, dict[str, Any]] = self.fs.find(self.root, detail=True)
            except FileNotFoundError:
                return {}
            return found

        start = len(self.root) + 1
        return {path[start:]: info for path, info in self._retried(find).items()}

    def info(self, name: str) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            self.fs.invalidate_cache()
            found: dict[str, Any] = self.fs.info(self.path(name))
            return found

        return self._retried(ask, name)

    def read(self, name: str, num_bytes: int) -> bytes:
        """A small file of known size, whole."""
        if self.is_web:
            return self._web(name, lambda pieces: _joined(pieces, num_bytes)) or b""
        return b"".join(self.block(name, at, num_bytes) for at in range(0, num_bytes, BLOCK))

    def block(self, name: str, start: int, size: int) -> bytes:
        """The bytes from `start` on: `BLOCK` of them, or up to `size`, the end of the file."""
        stop = min(start + BLOCK, size)

        def get() -> bytes:
            data: bytes = self.fs.cat_file(self.path(name), start=start, end=stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data):,} bytes came, wanted {stop - start:,}")
            return data

        return self._retried(get, name)

    def sha256(self, name: str, size: int) -> str:
        """Of the whole file, read back."""
        digest = hashlib.sha256()
        if not self.is_web:
            for start in range(0, size, BLOCK):
                digest.update(self.block(name, start, size))
            return digest.hexdigest()

        def hashed(pieces: Pieces) -> str:
            whole, total = hashlib.sha256(), 0
            for _, piece in pieces:
                whole.update(piece)
                total += len(piece)
                if total > size:  # a server may send without an end
                    return ""
            return whole.hexdigest()

        return self._web(name, hashed) or ""

    def web_size(self, name: str, most: int) -> int | None:
        """Bytes of a file of a web server, which may not say so itself: it is read, up to a little
        more than `most` bytes. None if it is not there."""

        def size(pieces: Pieces) -> int:
            total = 0
            for _, piece in pieces:
                total += len(piece)
                if total > most:
                    break
            return total

        return self._web(name, size)

    def _web(self, name: str, use: Callable[[Pieces], T]) -> T | None:
        """What `use` makes of a whole file of a web server; None if it is not there."""

        def get() -> T | None:
            try:
                return use(self.web_pieces(name, 0))
            except FileNotFoundError:
                return None

        return self._retried(get, name)

    def web_pieces(self, name: str, start: int) -> Pieces:
        """A file of a web server in one request: (offset, bytes). The first offset is `start`, or
        0 if the server does not serve ranges. Nothing is tried again here."""
        headers = {**self.fs.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        import aiohttp  # comes with the client of fsspec that this place uses

        # however long the whole takes, as long as something comes
        how = {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=60)}
        # block_size 0: as a stream; size: so that the client does not ask for it first
        answer = self.fs._open(self.path(name), block_size=0, size=1, headers=headers, **how)
        try:
            at = start if answer.r.status == 206 else 0
            while piece := answer.read(BLOCK):
                yield at, piece
                at += len(piece)
        finally:
            answer.close()

    def pipe(self, name: str, data: bytes) -> None:
        """A small file, over one that is there."""
        self._make_parent(name)
        self._retried(lambda: self.fs.pipe_file(self.path(name), data), name)

    def write(self, name: str, data: bytes) -> None:
        """As `pipe`; it is read back, and must be the same."""
        self.pipe(name, data)
        self._read_back(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """A small file, unless another one is there: then False, and that stays as it is."""

        def pipe(path: str, **options: Any) -> None:
            self.fs.pipe_file(path, data, **options)

        if not self._create(name, pipe):
            size = self.info(name)["size"]  # perhaps ours, and only the answer was lost
            return bool(size == len(data) and self.read(name, size) == data)
        self._read_back(name, data)
        return True

    def put(self, source: Path, name: str, on_bytes: Callable[[int], None]) -> bool:
        """A local file, large ones in parts, unless a file is there: then False, as `create`.

        `on_bytes` hears how many bytes are sent.
        """
        size = source.stat().st_size
        parts = {"chunksize": part_bytes(size), "max_concurrency": 2} if self.is_s3 else {}
        meter = _Callback(on_bytes)

        def put(path: str, **options: Any) -> None:
            self.fs.put_file(str(source), path, callback=meter, **parts, **options)

        return self._create(name, put)

    def _create(self, name: str, send: Callable[..., None]) -> bool:
        """Whether the file that `send` writes at a path got this name."""
        self._make_parent(name)
        if self.is_local:
            return self._retried(lambda: self._link(name, send), name)
        path, kinds = self.path(name), set(self.protocols)

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
                if not isinstance(error, TypeError) and _code(error) not in _UNKNOWN:
                    raise
            self.fs.invalidate_cache()
            if self.fs.exists(path):
                return False
            send(path)
            return True

        if "memory" in kinds:
            with _memory:
                return self._retried(create, name)
        return self._retried(create, name)

    def _link(self, name: str, send: Callable[..., None]) -> bool:
        """On a disk: the whole file under another name, then its own name in one step."""
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
                f"{self.url}/{name}: other bytes came back than were written; does another "
                "process write there? Look, then push again"
            )

    def remove(self, name: str) -> None:
        """Gone, or it was not there."""

        def rm() -> None:
            try:
                self.fs.rm_file(self.path(name))
            except FileNotFoundError:
                return

        self._retried(rm, name)

    @property
    def protocols(self) -> tuple[str, ...]:
        found = self.fs.protocol
        return (found,) if isinstance(found, str) else tuple(found)

    @property
    def is_local(self) -> bool:
        return bool({"file", "local"} & set(self.protocols))

    @property
    def is_web(self) -> bool:
        return bool({"http", "https"} & set(self.protocols))

    @property
    def is_s3(self) -> bool:
        return bool({"s3", "s3a"} & set(self.protocols))

    def _make_parent(self, name: str) -> None:
        if not _BUCKETS & set(self.protocols):  # there, this would make a bucket
            parent = self.path(name).rpartition("/")[0]
            self._retried(lambda: self.fs.makedirs(parent, exist_ok=True))


def part_bytes(size: int) -> int:
    """How large the parts of a file of `size` bytes are: whole MiB, never too many of them."""
    mib = 2**20
    return max(_PART, -(-size // (_MOST_PARTS * mib)) * mib)


def open_place(url: str, options: Mapping[str, Any] | None = None) -> RemoteFolder:
    """The folder at `url`; `options` go to the file system. Asks nobody anything yet."""
    if not url.strip():
        raise OptionError("the URL is empty; wanted s3://bucket/path, say: is a variable not set?")
    remember_options(options)
    address = Url(url)
    if address.refusal is not None:
        raise OptionError(address.refusal)
    if "://" not in url and (is_url(url) or url.startswith("hub:")):
        raise OptionError(f"{address}: found no '://' in it; wanted s3://bucket/path, or a folder")
    if address.is_web and urlsplit(url).query:
        raise OptionError(
            f"{address}: has a query (?...), which belongs to one file and not to a folder of files"
        )
    protocol = url.partition("://")[0] if "://" in url else "file"
    defaults: dict[str, Any] = _S3_DEFAULTS if protocol in _EXTRAS else {}
    try:
        fs, root = fsspec.core.url_to_fs(url, **{**defaults, **(options or {})})
    except ImportError as missing:
        if protocol in _EXTRAS:
            raise missing_extra("s3fs", _EXTRAS[protocol]) from missing
        raise OptionError(f"{address}: {missing}") from safe_cause(missing)
    except (ValueError, TypeError, OSError) as error:
        raise OptionError(f"{address}: {error}; wanted s3://bucket/path, say") from safe_cause(
            error
        )
    return place_of(fs, root, str(address))


def open_target(url: str, options: Mapping[str, Any] | None = None) -> RemoteFolder:
    """The same, to write to. A chain of file systems cannot promise what a push relies on."""
    if "::" in url.partition("://")[0]:
        raise OptionError(f"{Url(url)}: a chained URL is only read from; name its last part")
    return open_place(url, options)


def place_of(fs: Any, root: str, url: str) -> RemoteFolder:
    """A folder of an open file system."""
    root = root.rstrip("/")
    if not root:
        raise OptionError(f"{url}: names no folder; wanted something like {url}/name")
    return RemoteFolder(fs, root, url.rstrip("/"))


def _joined(pieces: Pieces, num_bytes: int) -> bytes:
    data = bytearray()
    for _, piece in pieces:
        data += piece
        if len(data) > num_bytes:
            break
    if len(data) != num_bytes:
        raise ConnectionError(f"{len(data):,} bytes came, wanted {num_bytes:,}")
    return bytes(data)


def _code(error: BaseException) -> str:
    """What an S3 service calls an error; the class of the error where it says nothing."""
    answer = getattr(error.__cause__ or error, "response", None)
    code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return str(code or type(error).__name__)


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
