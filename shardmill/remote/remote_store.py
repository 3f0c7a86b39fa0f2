"""Read a remote store through a bounded local cache that many processes may share.

A shard is fetched when it is first read, checked by sha256, and stays in the cache while it is held
or mapped. The tokens are the same as those of a local copy. One `TokenSpace` maps at most half of
the cache, so that two processes fit beside each other. Windows in random order read all shards all
the time: use `shuffle="block"`, or a cache that holds the whole split.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, OptionError
from shardmill.protocols import Closing
from shardmill.records import OffsetArray, TokenFile
from shardmill.remote.cache import FileCache, Lease
from shardmill.remote.contents import Contents
from shardmill.remote.folder import RemoteFolder, open_folder
from shardmill.remote.pull import list_remote, remote_contents
from shardmill.remote.transfer import check_size, fetch, in_parallel
from shardmill.store import Exclusions
from shardmill.store.layout import DTYPES
from shardmill.store.manifest import ShardEntry, SplitEntry, decode_manifest, fingerprint
from shardmill.store.readers import TokenSpace
from shardmill.store.readers.files import ShardFiles
from shardmill.store.store import map_index
from shardmill.urls import Url

How: TypeAlias = tuple[Url, str, int, int, dict[str, Any]]
"""URL, folder of the cache, its bytes, threads, options of the client."""


class RemoteFiles(ShardFiles):
    """The shards of a split that hold tokens. Pickles as its store."""

    def __init__(self, store: RemoteStore, split: str) -> None:
        shards = store.shards(split)
        self._numbers = [number for number, shard in enumerate(shards) if shard.tokens]
        numbers = np.zeros((3, len(self._numbers)), np.int64)
        numbers[0] = [shards[number].tokens for number in self._numbers]
        numbers[1] = width = np.dtype(store.dtype).itemsize
        paths = [f"{store.url}/{shards[number].file}" for number in self._numbers]
        super().__init__(paths, numbers, width, np.empty(0, np.int64))  # the cache checks its files
        self._store, self._split = store, split

    def open(self, shard: int) -> int:
        """A descriptor of the file in the cache, which stays there until the last copy of the
        descriptor is closed: a map keeps its own."""
        return self._store.open_shard(self._split, self._numbers[shard])

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFiles, (self._store, self._split)


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
    how = (Url(url), str(Path(cache).absolute()), max_bytes, workers, dict(storage_options or {}))
    remote = open_folder(url, storage_options)
    return RemoteStore(remote_contents(remote, list_remote(remote)), how)


class RemoteStore(Closing):
    """A finished store on object storage. Made by `open_remote`; threads may share it."""

    def __init__(self, contents: Contents, how: How) -> None:
        self._url, folder, max_bytes, workers, self._options = how
        self.url = str(self._url)  # without secrets
        if contents.kind != "store":
            raise OptionError(f"{self.url}: a {contents.kind}, not a store: pull it to read it")
        self._how, self._contents = how, contents
        self._workers = whole_number(workers, "workers")
        self.manifest = decode_manifest(contents.manifest, where=self.url)
        self.splits: tuple[str, ...] = tuple(self.manifest.splits)
        self.dtype: str = DTYPES[self.manifest.token_dtype]
        self.fingerprint = fingerprint(self.manifest)
        self.exclusions: Exclusions = contents.exclusions or Exclusions(
            store=self.fingerprint, entries=(), sha256=None
        )
        self._facts = {fact.name: fact for fact in contents.files}
        self._cache = FileCache(folder, max_bytes)
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._opened: tuple[int, RemoteFolder] | None = None  # in which process, and what
        self._fetch_all(self._index_files())

    @property
    def name(self) -> str:
        """The last part of its URL."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def folder(self) -> Path:
        """The folder of its files in the cache."""
        return self._cache.folder / self._contents.manifest_sha256[:32]

    @property
    def is_chat(self) -> bool:
        return any(split.chat is not None for split in self.manifest.splits.values())

    def num_shards(self, split: str) -> int:
        return len(self.shards(split))

    def shards(self, split: str) -> Sequence[ShardEntry]:
        """The manifest's entry of each shard."""
        return self._split(split).shards

    def local_shard(self, split: str, shard: int) -> Path:
        """The file of one shard, fetched and held until `release` or `close`."""
        return self.ensure(split, [shard])[0]

    def ensure(self, split: str, shards: Iterable[int]) -> list[Path]:
        """The same for several shards, fetched side by side."""
        return self._fetch_all([self._shard_name(split, shard) for shard in shards])

    def token_files(self, split: str, shards: Sequence[int]) -> list[TokenFile]:
        """Several shards for a `TokenSpace`, held until `release` or `close`."""
        entries = self._split(split).shards
        paths = self.ensure(split, shards)
        return [
            TokenFile(path=path, num_tokens=entries[shard].tokens, dtype=self.dtype)
            for path, shard in zip(paths, shards, strict=True)
        ]

    def open_tokens(self, split: str) -> TokenSpace:
        """All tokens of a split; shards are fetched as their windows are read."""
        files = RemoteFiles(self, split)
        largest = max((files.file_bytes(shard) for shard in range(len(files))), default=1)
        # The shard that is being read stays a little longer, hence one less.
        max_maps = self._cache.max_bytes // largest // 2 - 1
        return TokenSpace(files, max_maps=min(max(max_maps, 1), 256), reader="grouped")

    def open_shard(self, split: str, shard: int) -> int:
        """An open file of one shard, which stays in the cache while it is open or mapped."""
        lease = self._lease(self._shard_name(split, shard))
        try:
            return lease.descriptor()
        finally:
            lease.close()

    def document_starts(self, split: str) -> OffsetArray:
        """(documents,) int64, read-only: where documents start in the whole split."""
        entry = self._split(split)
        return map_index(self._fetch_all([entry.index.file])[0], entry.documents)

    def release(self, split: str, shards: Iterable[int]) -> None:
        """Let the cache remove these shards; what is mapped already stays readable."""
        for shard in shards:
            name = self._shard_name(split, shard)
            with self._lock:
                lease = self._leases.pop(name, None)
            if lease is not None:
                lease.close()

    def close(self) -> None:
        """Release everything; may be called again. The files stay in the cache."""
        with self._lock:
            leases, self._leases = self._leases, {}
        for lease in leases.values():
            lease.close()

    def _fetch_all(self, names: Sequence[str]) -> list[Path]:
        return in_parallel(self._workers, self._hold, names)

    def _hold(self, name: str) -> Path:
        with self._lock:
            held = self._leases.get(name)
        if held is not None:
            return held.path
        lease = self._lease(name)
        with self._lock:
            held = self._leases.setdefault(name, lease)
        if held is not lease:
            lease.close()  # another thread was quicker
        return held.path

    def _lease(self, name: str) -> Lease:
        """A new lease of a file, which is fetched if it is not in the cache."""
        if self._opened is None or self._opened[0] != os.getpid():  # no client survives a fork
            self._opened = os.getpid(), open_folder(self._url.reveal(), self._options)
        fact, remote = self._facts[name], self._opened[1]
        size = check_size(remote, fact, fact.size)

        def bring(part: Path) -> None:
            fetch(remote, fact, size, part, lambda _: None)

        return self._cache.hold(f"{self._contents.manifest_sha256[:32]}/{name}", size, bring)

    def _index_files(self) -> list[str]:
        names = []
        for split in self.manifest.splits.values():
            entries = [split.index]
            if split.chat:
                entries += [split.chat.mask, split.chat.turns, split.chat.roles]
            names += [entry.file for entry in entries]
        return names

    def _split(self, name: str) -> SplitEntry:
        if name not in self.manifest.splits:
            raise OptionError(f"{self.url}: no split {name!r}; it has {list(self.splits)}")
        return self.manifest.splits[name]

    def _shard_name(self, split: str, shard: int) -> str:
        shards, number = self._split(split).shards, whole_number(shard, "shard", least=0)
        if number >= len(shards):
            raise OptionError(f"{self.url}: shard {number:,} of {len(shards):,} in {split!r}")
        return shards[number].file

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._how, self._contents.manifest_sha256)

    def __repr__(self) -> str:
        held = len(self._leases)
        return f"RemoteStore({self.url!r}, splits={list(self.splits)}, files held={held})"


def _reopen(how: How, wanted: str) -> RemoteStore:
    url, cache, max_bytes, workers, options = how
    store = open_remote(
        url.reveal(), cache=cache, max_bytes=max_bytes, workers=workers, storage_options=options
    )
    if store._contents.manifest_sha256 != wanted:
        raise DamagedStoreError(f"{url}: was replaced since this store was pickled; open it again")
    return store
