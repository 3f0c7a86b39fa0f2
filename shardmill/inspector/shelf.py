"""The stores that a page may look at.

In: folders, tokenizers.  Out: stores by number, opened when they are asked for.
Promise: only these stores are ever read; a store that cannot be opened is told with its reason and
hides no other; one that was built again is opened again; few large stores are open at a time.
Not here: what is in a store (opened), requests (api).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.errors import OptionError, ShardmillError, StoreNotFoundError
from shardmill.inspector.decoding import marker_ids, mismatch, open_named
from shardmill.inspector.opened import OpenStore
from shardmill.inspector.view import Reading
from shardmill.inspector.words import Words
from shardmill.shards import Manifest, Store, open_store, read_manifest
from shardmill.shards.layout import META
from shardmill.shards.manifest import refuse_remote

MOST_SHARDS = 250_000
"""Of all stores that are open at a time; the one in use may have more."""

MOST_STORES = 1000
NO_TOKENIZER = (
    "no tokenizer was named, so ids are shown: start `shardmill view` with --tokenizer and the one "
    "that this store was built with, and the same --special, to see text"
)
_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the list of stores says of one."""

    kind: str | None  # "text" or "chat"; None when it cannot be opened
    splits: tuple[str, ...]
    error: str | None


def find_stores(folders: Sequence[Path]) -> list[Path]:
    """Each folder that is a store, and the stores right inside of those that are none."""
    found: list[Path] = []
    for folder in folders:
        refuse_remote(folder)
        inside = [folder] if (folder / META).is_file() else sorted(_stores_in(folder))
        if not inside:
            raise StoreNotFoundError(
                f"{folder}: no store, and no folder with stores in it: wanted {META} there, or in "
                f"a folder of it; build one with `shardmill build`"
            )
        found += [path.absolute() for path in inside]
    unique = list(dict.fromkeys(found))
    if len(unique) > MOST_STORES:
        raise OptionError(f"{len(unique):,} stores; wanted at most {MOST_STORES:,}: name some")
    return unique


def _stores_in(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        # a build that is not finished lies in a hidden folder
        if not path.name.startswith(".") and (path / META).is_file():
            yield path


def names_apart(paths: Sequence[Path]) -> tuple[str, ...]:
    """The name of each folder; of those that share one, as much of the path as tells them apart.

    /runs/1/chats, /runs/2/chats, /wiki -> 1/chats, 2/chats, wiki
    """
    same: dict[str, list[Path]] = {}
    for path in paths:
        same.setdefault(path.name, []).append(path)
    found = {}
    for group in same.values():
        depth = 1
        while len({path.parts[-depth:] for path in group}) < len(group):
            depth += 1
        found.update({path: "/".join(path.parts[-depth:]) for path in group})
    return tuple(found[path] for path in paths)


class Tokenizers:
    """The tokenizers that were named, each opened once and used where it fits."""

    def __init__(self, names: Sequence[str], specials: Mapping[str, str] | None) -> None:
        self._opened = [(name, Words(open_named(name, specials))) for name in names]

    def of(self, store: Store) -> tuple[str | None, Reading]:
        """The name of the store's own one, and how its ids are read."""
        problems = []
        for name, words in self._opened:
            problem = mismatch(name, words.tokenizer, store.manifest)
            if problem is None:
                return name, Reading(words=words, why=None, markers=marker_ids(store))
            problems.append(problem)
        why = "; ".join(problems) or NO_TOKENIZER
        return None, Reading(words=None, why=why, markers=marker_ids(store))


class Shelf:
    """Stores by number, from 0. Threads may share it."""

    def __init__(self, paths: Sequence[Path], tokenizers: Tokenizers) -> None:
        self.paths = tuple(paths)
        self.names = names_apart(self.paths)
        self._tokenizers = tokenizers
        self._lock = threading.Lock()
        self._locks = [threading.Lock() for _ in self.paths]
        self._open: OrderedDict[int, tuple[_Stamp, OpenStore]] = OrderedDict()
        self._summaries: dict[int, tuple[_Stamp, Summary]] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, number: int) -> Path:
        if not 0 <= number < len(self.paths):
            has = f"the stores are 0 to {len(self) - 1}" if self.paths else "no store was named"
            raise StoreNotFoundError(f"there is no store {number:,}; {has}, see /api/stores")
        return self.paths[number]

    def store(self, number: int) -> OpenStore:
        """The store, open; as it is on disk now."""
        path = self.path(number)
        with self._locks[number]:
            stamp = _stamp(path)
            with self._lock:
                known = self._open.get(number)
                if known is not None and known[0] == stamp:
                    self._open.move_to_end(number)
                    return known[1]
            store = open_store(path)
            opened = OpenStore(store, self._tokenizers.of(store)[1])
            with self._lock:
                self._open[number] = stamp, opened
                self._open.move_to_end(number)
                self._let_go()
            return opened

    def manifest(self, number: int) -> Manifest:
        """What the store lists, also when its files are damaged."""
        try:
            return self.store(number).store.manifest
        except ShardmillError:
            return read_manifest(self.path(number))

    def tokenizer_name(self, opened: OpenStore) -> str | None:
        return self._tokenizers.of(opened.store)[0]

    def find(self, folder: Path) -> OpenStore | None:
        """The store in this folder, if it stands on the shelf."""
        found = folder.absolute()
        return self.store(self.paths.index(found)) if found in self.paths else None

    def name_of(self, folder: Path) -> str | None:
        """What the store in this folder is called, if it is on the shelf."""
        found = folder.absolute()
        return self.names[self.paths.index(found)] if found in self.paths else None

    def summary(self, number: int) -> Summary:
        """What the list says; opens the store once."""
        path = self.path(number)
        try:
            stamp = _stamp(path)
            known = self._summaries.get(number)
            if known is not None and known[0] == stamp:
                return known[1]
            store = self.store(number).store
        except (ShardmillError, OSError) as error:
            return Summary(kind=None, splits=(), error=str(error))
        kind = "chat" if store.is_chat else "text"
        made = Summary(kind=kind, splits=store.splits, error=None)
        self._summaries[number] = stamp, made
        return made

    def _let_go(self) -> None:
        """Of the stores that were not used for longest, until the rest is small enough."""
        while len(self._open) > 1 and sum(map(_size, self._open.values())) > MOST_SHARDS:
            self._open.popitem(last=False)


def _size(entry: tuple[_Stamp, OpenStore]) -> int:
    return sum(len(split.shards) for split in entry[1].store.manifest.splits.values())


def _stamp(path: Path) -> _Stamp:
    """By which a store is known again: the file that is written last."""
    try:
        found = (path / META).stat()
    except OSError as error:
        raise StoreNotFoundError(
            f"{path}: its {META} cannot be read ({error.strerror}); it was moved or removed"
        ) from error
    return found.st_mtime_ns, found.st_ino, found.st_size
