"""The stores that a page may look at.

In: folders, tokenizers.  Out: stores by number, opened when they are asked for.
Promise: only these stores are ever read; a store that cannot be opened is told with its reason and
hides no other; one that was built again is opened again; few large stores are open at a time.
Not here: what is in a store (opened), requests (api).

One store that is open, and everything of it that is opened when it is asked for.

In: a store, how its ids are read.  Out: tokens, documents, conversations, plans, each opened once.
Promise: opening reads no token; what is large stays on disk; threads may share it.
Not here: which stores there are (shelf), facts for a view (overview, documents, plans).

The tokenizer of a store, opened by name.

In: a name, special tokens, stores.  Out: a Tokenizer; the ids that are structure.
Promise: a tokenizer is used for a store only if it is the one that the store was built with; other
words would be shown for its ids.
Not here: flags (cli), texts of single tokens (words).

What a request asks, checked at the border.

In: names and values, as text.  Out: numbers, choices and texts.
Promise: anything that is missing, unknown, twice, no number or out of bounds is an `OptionError`
that names it, what was found and what is wanted.
Not here: which addresses there are (api).
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from shardmill.errors import (
    DamagedStoreError,
    OptionError,
    ShardmillError,
    StoreError,
    StoreNotFoundError,
)
from shardmill.inspect.blame_records import made_by
from shardmill.inspect.tokens import Reading, Words
from shardmill.loading import PackSource
from shardmill.loading.packed_rows import checked_pad_id
from shardmill.protocols import Tokenizer
from shardmill.records import IntArray, OffsetArray
from shardmill.store import (
    Exclusions,
    Manifest,
    Store,
    StoredPlan,
    open_store,
    plans_of,
    read_exclusions,
    read_manifest,
)
from shardmill.store.layout import META
from shardmill.store.manifest import refuse_remote
from shardmill.store.plans import PACKS, SUFFIX
from shardmill.store.readers import PackSpace, TokenSpace, open_tokens
from shardmill.store.store import ChatArrays
from shardmill.tokenizers import open_tokenizer

T = TypeVar("T")

_MAPS = 256  # shards mapped at a time: a page looks at few


class OpenStore:
    """A store on the shelf. It keeps what was opened until it is let go itself."""

    def __init__(self, store: Store, reading: Reading) -> None:
        self.store, self.reading = store, reading
        # with `name`, what a loading.TokenSource asks of a store that is open already
        self.splits, self.dtype, self.fingerprint = store.splits, store.dtype, store.fingerprint
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}  # what takes long holds up nothing else
        self._kept: dict[Hashable, Any] = {}

    @property
    def name(self) -> str:
        return self.store.folder.name

    @property
    def folder(self) -> Path:
        return self.store.folder

    @property
    def is_chat(self) -> bool:
        return self.store.is_chat

    @property
    def why(self) -> str:
        """Why its ids are not read as text; "" when they are."""
        return self.reading.why or ""

    @property
    def exclusions(self) -> Exclusions:
        """As they are now: they come and go while the store stays."""
        return read_exclusions(self.store)

    def open_tokens(self, split: str) -> TokenSpace:
        return self.keep(("tokens", split), partial(open_tokens, self.store, split, max_maps=_MAPS))

    def document_starts(self, split: str) -> OffsetArray:
        return self.keep(("starts", split), partial(self.store.document_starts, split))

    def chat_arrays(self, split: str) -> ChatArrays:
        return self.keep(("chat", split), partial(self.store.chat_arrays, split))

    def spans(self, split: str, first: int, last: int) -> OffsetArray:
        """Where the documents first..last start, and where the last of them ends."""
        starts, total = self.document_starts(split), self.store.num_tokens(split)
        edges = np.array(starts[first : last + 1], np.int64)
        if last >= len(starts):
            edges = np.append(edges, total)
        if len(edges) and (edges[0] < 0 or edges[-1] > total or (np.diff(edges) < 0).any()):
            raise DamagedStoreError(
                f"{self.folder}, split {split!r}: the index gives documents {first:,}..{last:,} "
                f"impossible places; check it with `shardmill verify`"
            )
        return edges

    def plans(self) -> dict[str, StoredPlan | StoreError]:
        """Every plan by name, or why it cannot be used. Looked at again when one is written."""
        files = sorted((self.folder / PACKS).glob(f"*{SUFFIX}"))
        stamp = tuple((path.name, path.stat().st_mtime_ns) for path in files)
        return self.keep(("plans", stamp), lambda: dict(plans_of(self.store)))

    def plan(self, name: str, split: str | None = None) -> PackSpace:
        """The rows of a plan that is listed; names are looked up, never joined to a path."""
        plans = self.plans()
        if name not in plans:
            known = ", ".join(plans) or "none yet: make one with `shardmill pack`"
            raise StoreNotFoundError(f"{self.folder}: no plan {name!r}; its plans are: {known}")
        found = plans[name]
        if isinstance(found, StoreError):
            raise found
        if split is not None and found.facts.split != split:
            raise OptionError(
                f"plan={name!r} is of the split {found.facts.split!r}, not of {split!r}"
            )
        pad_id = checked_pad_id(self.store.manifest, str(self.folder), None)
        key = ("plan", name, found.fingerprint)
        return self.keep(key, partial(PackSpace, self.store, found, pad_id=pad_id))

    def pack_source(self, name: str, split: str | None = None) -> PackSource:
        """The same as a source of a training."""
        plan = self.plan(name, split).plan
        key = ("source", name, plan.fingerprint, self.exclusions.sha256)
        return self.keep(key, partial(PackSource, self.folder, plan.path))

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once."""
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            if key not in self._kept:
                self._kept[key] = make()
            return cast(T, self._kept[key])


def open_named(name: str, specials: Mapping[str, str] | None, *stores: Store) -> Tokenizer:
    """The tokenizer `name`, refused unless it is that of all these stores."""
    opened = open_tokenizer(name, specials=specials)
    for store in stores:
        problem = mismatch(name, opened, store.manifest)
        if problem is not None:
            raise OptionError(problem)
    return opened


def mismatch(name: str, opened: Tokenizer, manifest: Manifest) -> str | None:
    """Why this tokenizer does not read the ids of this store; None when it does."""
    if made_by(manifest, opened):
        return None
    return (
        f"--tokenizer {name}: not the tokenizer of this store (fingerprint "
        f"{opened.fingerprint[:16]}, the store's is "
        f"{(manifest.tokenizer_fingerprint or 'unknown')[:16]}); its ids would be read as "
        "other words: name the one that the store was built with, with the same --special"
    )


def marker_ids(*stores: Store) -> IntArray:
    """The ids that are structure, not text."""
    found: set[int] = set()
    for manifest in (store.manifest for store in stores):
        chat = manifest.options.get("chat", {})
        found |= {*manifest.special_token_ids.values(), *chat.get("marker_ids", ())}
    return np.array(sorted(found), np.int64)


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


_DIGITS = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_MOST_TEXT = 1000

MOST_PAGE = 500
"""Entries of a list in one answer."""


class NotThereError(OptionError):
    """A document or row whose number is well formed, but which does not exist."""


class Query:
    """The values of one request."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._asked: set[str] = set()

    def number(
        self, name: str, default: int | None = None, *, least: int = 0, most: int = 2**53 - 1
    ) -> int:
        """A whole number; without a default it must be there."""
        value = self.optional(name)
        if value is None:
            if default is None:
                raise OptionError(f"{name} is missing: wanted {name}=NUMBER")
            return default
        wanted = f"wanted a whole number from {least:,} to {most:,}"
        if not _DIGITS.fullmatch(value):
            raise OptionError(f"{name}={value[:40]!r}: {wanted}")
        if not least <= int(value) <= most:
            raise OptionError(f"{name}={int(value):,}: {wanted}")
        return int(value)

    def whole(self, name: str, *, least: int = 0, most: int = 2**53 - 1) -> int | None:
        """A whole number, or None when it was not sent."""
        return None if self.optional(name) is None else self.number(name, least=least, most=most)

    def page(self, limit: int = 100, *, most: int = MOST_PAGE) -> tuple[int, int]:
        """start and limit."""
        return self.number("start", 0), self.number("limit", limit, least=1, most=most)

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.optional(name)
        if value is None and default is not None:
            return default
        if value is None or value not in choices:
            found = f"{name} is missing" if value is None else f"{name}={value[:80]!r}"
            raise OptionError(f"{found}: wanted one of {', '.join(map(repr, choices))}")
        return value

    def text(self, name: str) -> str:
        value = self.optional(name)
        if not value:
            raise OptionError(f"{name} is missing: wanted {name}=TEXT")
        return value

    def optional(self, name: str) -> str | None:
        """As it was sent; "" counts as not sent."""
        self._asked.add(name)
        value = self._values.get(name) or None
        if value is not None and len(value) > _MOST_TEXT:
            raise OptionError(f"{name}: {len(value):,} characters; wanted at most {_MOST_TEXT:,}")
        return value

    def done(self) -> None:
        """After the answer is made: refuse names that nobody asked for."""
        unknown = sorted(self._values.keys() - self._asked)
        if unknown:
            raise OptionError(
                f"{', '.join(name[:40] for name in unknown[:8])}: unknown here; wanted any of "
                f"{', '.join(sorted(self._asked)) or 'nothing'}"
            )
