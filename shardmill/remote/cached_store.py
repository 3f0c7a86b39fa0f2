"""Read a remote store through a bounded local cache that many processes may share.

A shard is fetched when it is first read, checked by sha256, and stays in the cache while it is held
or open. The tokens are the same as those of a local copy. One `TokenSpace` opens at most half of
the cache, so that two processes fit beside each other. Windows in random order read all shards all
the time: use `shuffle="block"`, or a cache that holds the whole split.

In the cache a file is visible whole or not at all. Files and those being fetched never take more
than `max_bytes`; the least recently used file goes first, and never one that is held. A process
that dies holds nothing. Each file is fetched by one thread of one process at a time, while the
others wait for it. Network disks without `flock` are not supported.

The protocol, in locks of the kernel (storage/atomic.py):
1. Names change only under `.lock`: a part appears, becomes the file, goes; a file goes. So names do
   not change while `.lock` is held.
2. A part is locked exclusively while it is fetched, from the moment it is claimed. A part that is
   not locked exclusively was left by a dead fetcher: the next one claims it and continues it.
3. A file is locked shared by everyone who holds it. It is removed only under an exclusive lock.
4. A finished part keeps its locks under its new name: the fetcher's becomes shared under `.lock`,
   so it cannot be removed in between, and everyone who waited shared for the part then holds the
   file.
5. Waiting for `.lock` while holding a lock that its holder waits for never happens: under `.lock`
   only claiming a dead part waits, for those who waited for the dead fetcher and let go at once.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, OptionError, ShardmillError, StoreError
from shardmill.protocols import Closing
from shardmill.records import OffsetArray
from shardmill.remote.contents import check_size, fetch, in_parallel, list_remote, remote_store
from shardmill.remote.folder import RemoteFolder, open_folder
from shardmill.storage.atomic import LockedFile
from shardmill.store.layout import DTYPES
from shardmill.store.manifest import SplitEntry, fingerprint
from shardmill.store.readers import TokenSpace
from shardmill.store.readers.files import ShardFiles
from shardmill.store.store import map_index
from shardmill.urls import Url


def open_remote(
    url: str,
    *,
    cache: str | Path,
    max_bytes: int,
    workers: int = 4,
    storage_options: Mapping[str, Any] | None = None,
) -> RemoteStore:
    """The store at `url`; its indexes are fetched now, its shards when they are read.

    `max_bytes` bounds the whole folder `cache`: all processes that share it must give the same.
    What is excluded is fixed when the store is opened.
    """
    files = FileCache(cache, max_bytes)
    return RemoteStore(Url(url), files, whole_number(workers, "workers"), storage_options)


class RemoteStore(Closing):
    """A finished store on object storage. Made by `open_remote`; threads may share it."""

    def __init__(
        self, url: Url, cache: FileCache, workers: int, options: Mapping[str, Any] | None
    ) -> None:
        self._url, self._cache, self._workers = url, cache, workers
        self._options = dict(options or {})
        self.url = str(url)  # without secrets
        self._opened: tuple[int, RemoteFolder] | None = None  # in which process, and what
        found = list_remote(self._remote())
        contents, self.manifest, self.exclusions = remote_store(found)
        self._manifest_sha256 = contents.manifest_sha256
        self.splits: tuple[str, ...] = tuple(self.manifest.splits)
        self.dtype: str = DTYPES[self.manifest.token_dtype]
        self.fingerprint = fingerprint(self.manifest)
        self.name = self.url.rstrip("/").rpartition("/")[2]
        self.is_chat = any(split.chat is not None for split in self.manifest.splits.values())
        if self.manifest.version == 3:
            raise OptionError(
                f"{self.url}: a store of preferences, which is not read through a cache: copy it "
                "with `shardmill pull`, and read the copy with shardmill.load"
            )
        self._facts = {fact.name: fact for fact in contents.files}
        self.folder = cache.folder / contents.manifest_sha256[:32]  # of its cached files
        self._indexes: dict[str, Lease] = {}
        self._hold_indexes()

    def open_tokens(self, split: str) -> TokenSpace:
        """All tokens of a split; shards are fetched as their windows are read."""
        files = RemoteFiles(self, split)
        largest = max((files.file_bytes(shard) for shard in range(len(files))), default=1)
        # The shard that is being read stays a little longer, hence one less.
        max_open = self._cache.max_bytes // largest // 2 - 1
        return TokenSpace(files, max_maps=min(max(max_open, 1), 256), reader="pread")

    def document_starts(self, split: str) -> OffsetArray:
        """(documents,) int64, read-only: where documents start in the whole split."""
        entry = self.entry(split)
        if not self._indexes:
            self._hold_indexes()
        return map_index(self._indexes[entry.index.file].path, entry.documents)

    def entry(self, split: str) -> SplitEntry:
        """The manifest's entry of a split."""
        if split not in self.manifest.splits:
            raise OptionError(f"{self.url}: no split {split!r}; it has {list(self.splits)}")
        return self.manifest.splits[split]

    def lease(self, name: str) -> Lease:
        """A file of the store, which is fetched if it is not in the cache."""
        fact, remote = self._facts[name], self._remote()
        size = check_size(remote, fact, fact.size)

        def bring(part: Path) -> None:
            fetch(remote, fact, size, part, lambda _: None)

        return self._cache.hold(f"{self.folder.name}/{name}", size, bring)

    def close(self) -> None:
        """Release everything; may be called again. The files stay in the cache."""
        indexes, self._indexes = self._indexes, {}
        for lease in indexes.values():
            lease.close()

    def _remote(self) -> RemoteFolder:
        if self._opened is None or self._opened[0] != os.getpid():  # no client survives a fork
            self._opened = os.getpid(), open_folder(self._url.reveal(), self._options)
        return self._opened[1]

    def _hold_indexes(self) -> None:
        names = [split.index.file for split in self.manifest.splits.values()]
        leases = in_parallel(self._workers, self.lease, names)
        self._indexes = dict(zip(names, leases, strict=True))

    def __reduce__(self) -> tuple[object, ...]:
        how = self._url, self._cache, self._workers, self._options
        return _reopen, (how, self._manifest_sha256)

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r}, splits={list(self.splits)})"


class RemoteFiles(ShardFiles):
    """The shards of a split that hold tokens. Pickles as its store."""

    def __init__(self, store: RemoteStore, split: str) -> None:
        shards = [shard for shard in store.entry(split).shards if shard.tokens]
        numbers = np.zeros((2, len(shards)), np.int64)
        numbers[0] = [shard.tokens for shard in shards]
        width = np.dtype(store.dtype).itemsize
        paths = [f"{store.url}/{shard.file}" for shard in shards]
        super().__init__(paths, numbers, width, np.empty(0, np.int64))  # the cache checks its files
        self._names = [shard.file for shard in shards]
        self._store, self._split = store, split

    def open(self, shard: int) -> int:
        """A descriptor of the file in the cache, which stays there until the last copy of the
        descriptor is closed."""
        with closing(self._store.lease(self._names[shard])) as lease:
            return lease.descriptor()

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFiles, (self._store, self._split)


def _reopen(how: tuple[Url, FileCache, int, dict[str, Any]], wanted: str) -> RemoteStore:
    store = RemoteStore(*how)
    if store._manifest_sha256 != wanted:
        raise DamagedStoreError(
            f"{store.url}: was replaced since this store was pickled; open it again"
        )
    return store


Fetch = Callable[[Path], None]
"""Writes the whole file to the part at this path; what is there already is its beginning."""

_LOCK = ".lock"
_PART = re.compile(r"\..+\.([0-9]+)\.part")


class Lease:
    """A file of the cache that is not removed until `close`. A forked process holds it too."""

    def __init__(self, path: Path, file: LockedFile) -> None:
        self.path = path
        self._file = file
        now = time.time_ns()  # the kernel's own clock for files has steps of a few ms
        os.utime(file.fileno(), ns=(now, now))
        file.inherit()

    def descriptor(self) -> int:
        """An open descriptor, for the caller to close; the file stays until then."""
        return os.dup(self._file.fileno())

    def close(self) -> None:
        """Release the file; may be called again."""
        self._file.close()

    def __del__(self) -> None:
        self.close()


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
        """The file `name` of `size` bytes, from the cache or brought by `fetch`."""
        path = self.folder / name
        try:
            while True:  # again, if another thread fetched it, or failed to, meanwhile
                lease = _cached(path, size) or self._bring(path, size, fetch)
                if lease is not None:
                    return lease
        except OSError as error:
            if isinstance(error, ShardmillError):
                raise
            raise _unusable(path, error) from error

    def _bring(self, path: Path, size: int, fetch: Fetch) -> Lease | None:
        """Fetch the file, or wait for another thread that does; None if we must look again."""
        part = path.with_name(f".{path.name}.{size}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._changing_names(), ExitStack() as undo:
            if path.exists():
                if path.lstat().st_size == size:
                    return None  # another thread was quicker
                path.unlink()  # it was cut: fetch it again
            file = LockedFile(part, create=True)
            undo.callback(file.close)
            is_ours = _claim(file)
            if is_ours:
                self._make_room(part, size)
            undo.pop_all()
        return self._fetch(file, path, part, size, fetch) if is_ours else _lease(file, path, size)

    def _fetch(self, file: LockedFile, path: Path, part: Path, size: int, fetch: Fetch) -> Lease:
        """Fill our part and give it its name."""
        with ExitStack() as undo:
            undo.callback(file.close)
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
                        f"{part}: was removed or replaced while it was fetched; leave the files of "
                        "a cache alone, and read again"
                    )
                part.rename(path)
                file.lock(shared=True)
            undo.pop_all()
            return Lease(path, file)

    def _make_room(self, part: Path, size: int) -> None:
        """Remove the least recently used files until `size` more bytes fit, or give the part up."""
        others = sorted(entry for entry in self._entries() if entry[1] != part)
        total = size + sum(num_bytes for _, _, num_bytes in others)
        for _, path, num_bytes in others if size <= self.max_bytes else ():
            if total <= self.max_bytes:
                return
            if _removed(path):
                total -= num_bytes
        if total <= self.max_bytes:
            return
        part.unlink()
        if size > self.max_bytes:
            raise StoreError(
                f"{self.folder}: a file of {size:,} bytes does not fit {{max_bytes}}; allow more",
                max_bytes=self.max_bytes,
            )
        raise StoreError(
            f"{self.folder}: {total - size:,} bytes are in use and {size:,} more do not fit "
            "{max_bytes}; release shards, or allow more",
            max_bytes=self.max_bytes,
        )

    def _entries(self) -> Iterator[tuple[int, Path, int]]:
        """(last use in ns, path, bytes) of each file; a part being fetched counts in full."""
        for top, _, names in os.walk(self.folder):
            for name in names:
                path = Path(top, name)
                if path == self.folder / _LOCK:
                    continue
                with suppress(FileNotFoundError):  # not one of ours: ours stay while we hold .lock
                    found = path.lstat()
                    part = _PART.fullmatch(name)
                    if stat.S_ISREG(found.st_mode):
                        size = max(found.st_size, int(part[1]) if part else 0)
                        yield found.st_mtime_ns, path, size

    @contextmanager
    def _changing_names(self) -> Iterator[None]:
        with closing(LockedFile(self.folder / _LOCK, create=True)) as lock:
            lock.lock()
            yield


def _cached(path: Path, size: int) -> Lease | None:
    """The file, if it exists and is whole."""
    try:
        file = LockedFile(path)
    except FileNotFoundError:
        return None
    return _lease(file, path, size)


def _lease(file: LockedFile, path: Path, size: int) -> Lease | None:
    """A lease on an open file, if it is whole and still has its name; else it is closed.

    Waits until one who fetches it is done, or dead, or for a moment while it is removed or renamed.
    """
    with ExitStack() as undo:
        undo.callback(file.close)
        file.lock(shared=True)
        if not file.is_at(path) or file.size != size:
            return None
        undo.pop_all()
        return Lease(path, file)


def _claim(part: LockedFile) -> bool:
    """Whether the part is ours to fetch; False if another fetches it. Under `.lock`."""
    if part.lock(wait=False):
        return True
    if not part.lock(shared=True, wait=False):
        return False
    # It is not being fetched, and under .lock no fetch begins. Those who hold it shared waited for
    # a fetcher that died, and let go at once. With retries instead of a wait, many processes could
    # fail for ever.
    part.lock()
    return True


def _removed(path: Path) -> bool:
    """Whether the file could be removed, since it was not held. Under `.lock`."""
    try:
        file = LockedFile(path)
    except FileNotFoundError:
        return True
    with closing(file):
        if not file.lock(wait=False):
            return False
        path.unlink(missing_ok=True)
        return True


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: the cache cannot be used: {error.strerror}; free some space, or choose a "
        "folder on a local disk that you may write to"
    )
