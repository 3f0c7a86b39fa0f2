"""What a finished folder consists of, here or at a URL, and how its files are moved and compared.

A manifest that is damaged, unfinished, lists no checksums or a name that could leave the folder is
refused. A file that is not listed is not part of the folder, with two exceptions that carry their
own checksum: the exclusions of a store, which change while the store stays the same, and its table
of origins.

`fetch` continues where an earlier try stopped and ends with the right sha256 or an error. `is_same`
is true only when a checksum over every byte says so: the storage's ETag where it is an MD5 of the
bytes, else a sha256 of the copy read back. Size alone is never enough.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from shardmill.errors import DamagedStoreError, ManifestError, StoreError, StoreNotFoundError
from shardmill.formats.packed.files import file_sha256, is_sealed
from shardmill.records import JSON
from shardmill.remote.folder import Listing, RemoteFolder, part_bytes
from shardmill.store import Exclusions, Manifest
from shardmill.store.exclusions import MAX_EXCLUDE_BYTES, decode_exclusions
from shardmill.store.layout import EXCLUDE, FILE_NAME, META, ORIGINS
from shardmill.store.manifest import (
    MAX_META_BYTES,
    Count,
    Sha256,
    decode_manifest,
    fingerprint,
    listed_files,
    read_plain_file,
)
from shardmill.store.plans import MAX_ORIGINS_BYTES, decode_origins

log = logging.getLogger(__name__)

PACKED = "manifest.json"
LARGEST = {META: MAX_META_BYTES, PACKED: 2**24}
"""The files that finish a folder, and how large each may be."""

MARKER = ".shardmill-push.json"
"""What an unfinished push leaves: which folder these files belong to."""

BUILD = ".shardmill-build/"
"""The folder for what an unfinished build leaves beside its shards."""

ReadFile: TypeAlias = Callable[[str, int], bytes | None]
"""A file of the folder, by name, of at most so many bytes; None if there is none."""

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with bytes done and bytes in all; from any thread, one call at a time."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_ETAG = re.compile(r"[0-9a-f]{32}(?:-([0-9]+))?")
_BUFFER = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    """One file that a manifest lists."""

    name: str  # relative, with "/", checked to stay inside the folder
    size: int | None  # bytes; None where the manifest does not fix them
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A finished folder: its manifest, byte for byte, and every file it lists."""

    manifest_name: str  # the file that makes the folder finished
    manifest: bytes
    manifest_sha256: str  # of those bytes
    store: Manifest | None  # those bytes, decoded; None: a packed folder
    files: tuple[FileFact, ...]  # all others, exclusions included
    exclusions: Exclusions | None = None  # of a store that has them; the manifest knows nothing

    @property
    def kind(self) -> str:
        return "packed folder" if self.store is None else "store"


class _Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bytes: Count
    sha256: Sha256


def local_contents(folder: Path) -> Contents:
    """The finished folder on this disk, with its table of origins."""

    def read(name: str, max_bytes: int) -> bytes | None:
        return read_plain_file(folder / name, max_bytes)

    contents = _read_folder(read, str(folder), "finish it, or check the path")
    return with_origins(contents, read, where=str(folder))


def remote_contents(found: Listing) -> Contents:
    """The finished folder that was listed, without the table of origins."""
    advice = "a push to here is unfinished" if MARKER in found else "check the URL"
    if any(name.startswith(BUILD) for name in found):
        advice = "a build to here is unfinished"
    return _read_folder(found.read, found.remote.url, advice)


def remote_store(found: Listing) -> tuple[Contents, Manifest, Exclusions]:
    """The same, for a store: also its manifest, and what is excluded there."""
    contents = remote_contents(found)
    if contents.store is None:
        raise StoreNotFoundError(
            f"{found.remote.url}: a {contents.kind}, not a store: pull it to read it"
        )
    nothing = Exclusions(store=fingerprint(contents.store), entries=(), sha256=None)
    return contents, contents.store, contents.exclusions or nothing


def list_remote(remote: RemoteFolder) -> Listing:
    """The files of a remote folder.

    A web server cannot be listed: it is asked for each file that no manifest names.
    """
    if not remote.is_web:
        return remote.listing()
    most = {**LARGEST, EXCLUDE: MAX_EXCLUDE_BYTES, ORIGINS: MAX_ORIGINS_BYTES}
    found = {name: remote.web_size(name, bound) for name, bound in most.items()}
    there = {name: {"size": size} for name, size in found.items() if size is not None}
    return Listing(remote, there)


def read_manifests(read: ReadFile) -> dict[str, bytes]:
    """The files that finish the folder, by name; more than one only where folders were mixed."""
    found = {name: read(name, most) for name, most in LARGEST.items()}
    return {name: data for name, data in found.items() if data is not None}


def _read_folder(read: ReadFile, where: str, advice: str) -> Contents:
    manifests = read_manifests(read)
    if not manifests:
        raise StoreNotFoundError(
            f"{where}: no {' and no '.join(LARGEST)}, so not a finished folder: {advice}"
        )
    if len(manifests) > 1:
        raise ManifestError(f"{where}: has {' and '.join(manifests)}; keep one kind in a folder")
    ((name, manifest),) = manifests.items()
    contents = read_contents(name, manifest, where=f"{where}/{name}")
    data = None if contents.store is None else read(EXCLUDE, MAX_EXCLUDE_BYTES)
    if contents.store is None or data is None:
        return contents
    exclusions = decode_exclusions(data, contents.store, where=f"{where}/{EXCLUDE}")
    return replace(_with_file(contents, EXCLUDE, data), exclusions=exclusions)


def with_origins(contents: Contents, read: ReadFile, *, where: str) -> Contents:
    """The same store with the table of origins beside its manifest, if there is one.

    A table that is damaged, or of another store, is left out with a warning: a store works without.
    """
    path = f"{where}/{ORIGINS}"
    try:
        data = read(ORIGINS, MAX_ORIGINS_BYTES)
        if data is None:
            return contents
        if contents.store is None:
            raise ManifestError(f"{path}: not a table of origins of a store")
        decode_origins(data, contents.store, where=path)
    except StoreError as error:
        log.warning("%s; it is left out", error)
        return contents
    return _with_file(contents, ORIGINS, data)


def _with_file(contents: Contents, name: str, data: bytes) -> Contents:
    fact = FileFact(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return replace(contents, files=(*contents.files, fact))


def read_contents(name: str, data: bytes, *, where: str) -> Contents:
    """What the manifest called `name` with these untrusted bytes lists."""
    store = None
    if name == META:
        store = decode_manifest(data, where=where)
        if not store.built:
            raise StoreNotFoundError(f'{where}: a placeholder ("built" is false); build it first')
        listed = listed_files(store)
        files = [FileFact(name=one.file, size=size, sha256=one.sha256) for one, size in listed]
    else:
        files = _packed_files(data, where)
    return Contents(
        manifest_name=name,
        manifest=data,
        manifest_sha256=hashlib.sha256(data).hexdigest(),
        store=store,
        files=tuple(files),
    )


def _packed_files(data: bytes, where: str) -> list[FileFact]:
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        if "files" not in fields:
            raise ManifestError(
                f"{where}: lists no checksums, so a copy could not be checked; write the folder "
                "again with this version"
            )
        listed = msgspec.convert(fields["files"], type=dict[str, _Listed])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"{where}: not a manifest of a packed folder: {error}") from error
    if not is_sealed(fields):
        raise ManifestError(f"{where}: its own checksum does not match; it was changed or damaged")
    names = [PACKED, *(name.lower() for name in listed)]
    for name in listed:
        if not FILE_NAME.fullmatch(name) or names.count(name.lower()) > 1:
            raise ManifestError(f"{where}: lists {name!r:.200}, which is not a unique plain name")
    return [FileFact(name=k, size=v.bytes, sha256=v.sha256) for k, v in listed.items()]


# --- single files


def is_same(remote: RemoteFolder, fact: FileFact, path: Path, info: dict[str, Any]) -> bool:
    """Whether the copy that `info` describes holds the bytes of `path`, which has `fact.sha256`."""
    size = path.stat().st_size
    if info.get("size") != size:
        return False
    md5 = info.get("md5Hash")  # of Google Cloud Storage
    if md5 and b64decode(md5).hex() == _local_etag(path, size, in_parts=False):
        return True
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


def fetch(
    remote: RemoteFolder, fact: FileFact, size: int, path: Path, on_bytes: Callable[[int], None]
) -> bool:
    """Bring the file of `size` bytes to `path`, durably; False: all of it was there.

    What is there is taken for its beginning. A file with another sha256 is fetched once more from
    the start. If that fails too it is damage, and an empty file is left at `path`.
    """
    was_there = path.is_file() and path.stat().st_size == size
    for _ in range(2):
        remote.call(lambda: _fetch_rest(remote, fact.name, size, path, on_bytes), fact.name)
        found = file_sha256(path)
        if found == fact.sha256:
            return not was_there
        os.truncate(path, 0)
        was_there = False
    raise DamagedStoreError(
        f"{remote.url}/{fact.name}: its sha256 is {found}, wanted {fact.sha256}; the copy there is "
        "damaged, or was replaced meanwhile: push it again"
    )


def _fetch_rest(
    remote: RemoteFolder, name: str, size: int, path: Path, on_bytes: Callable[[int], None]
) -> None:
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
