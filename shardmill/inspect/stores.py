"""The stores that a page may look at, and what its first view shows of one.

Only these stores are ever read, each opened when it is asked for. A store that cannot be opened is
listed with its reason and hides no other; one that was built again is opened again; few large
stores are open at a time. Opening reads no token, and the facts here come from the manifest, so the
work does not grow with documents or tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from shardmill.errors import (
    DamagedStoreError,
    OptionError,
    ShardmillError,
    StoreError,
    StoreNotFoundError,
)
from shardmill.inspect.tokens import Reading, TokenTexts, tokenizer_mismatch
from shardmill.loading import PackSource
from shardmill.loading.packed_rows import checked_pad_id
from shardmill.protocols import Tokenizer
from shardmill.records import JSON, IntArray, OffsetArray
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
from shardmill.store.layout import DTYPES, ITEMSIZE, META
from shardmill.store.manifest import refuse_remote
from shardmill.store.plans import PACKS, SUFFIX
from shardmill.store.readers import PackSpace, TokenSpace, open_tokens
from shardmill.store.store import ChatArrays
from shardmill.tokenizers import open_tokenizer

T = TypeVar("T")
_FileStamp = tuple[int, int, int]

MOST_STORES = 1000
MOST_SHARDS = 250_000
"""Of all stores that are open at a time; the one in use may have more."""
NO_TOKENIZER = (
    "no tokenizer was named, so ids are shown: start `shardmill view` with --tokenizer and the one "
    "that this store was built with, and the same --special, to see text"
)
_MAPS = 256  # shards mapped at a time: a page looks at few


class NotThereError(OptionError):
    """A document or row whose number is well formed, but which does not exist."""


class OpenStore:
    """A store that is open. It keeps what was opened of it until it is dropped itself."""

    def __init__(self, store: Store, reading: Reading) -> None:
        self.store, self.reading, self.folder = store, reading, store.folder
        # with `name` and `open_tokens`, what loading.TokenSource needs of a store that is open
        self.splits, self.dtype, self.fingerprint = store.splits, store.dtype, store.fingerprint
        self.name, self.is_chat = store.folder.name, store.is_chat
        self.manifest = store.manifest
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}  # what takes long holds up nothing else
        self._kept: dict[Hashable, Any] = {}

    @property
    def exclusions(self) -> Exclusions:
        """As they are now: they may change while the store is open."""
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
                f"impossible positions; check it with `shardmill verify`"
            )
        return edges

    def plans(self) -> dict[str, StoredPlan | StoreError]:
        """Every plan by name, or why it cannot be used. Read again when one is written."""
        files = sorted((self.folder / PACKS).glob(f"*{SUFFIX}"))
        mtimes = tuple((path.name, path.stat().st_mtime_ns) for path in files)
        return self.keep(("plans", mtimes), lambda: dict(plans_of(self.store)))

    def plan_names(self) -> str:
        """For an error."""
        return ", ".join(self.plans()) or "none yet: make one with `shardmill pack`"

    def plan(self, name: str, split: str | None = None) -> PackSpace:
        """The rows of a plan that is listed; names are looked up, never joined to a path."""
        found = self.plans().get(name)
        if found is None:
            raise StoreNotFoundError(
                f"{self.folder}: no plan {name!r}; its plans are: {self.plan_names()}"
            )
        if isinstance(found, StoreError):
            raise found
        if split is not None and found.facts.split != split:
            raise OptionError(
                f"plan={name!r} is of the split {found.facts.split!r}, not of {split!r}"
            )
        pad_id = checked_pad_id(self.store.manifest, str(self.folder), None)
        key = ("plan", name, found.fingerprint)
        return self.keep(key, partial(PackSpace, self.store, found, pad_id=pad_id))

    def pack_source(self, name: str) -> PackSource:
        """The rows of a plan as a source of a training."""
        plan = self.plan(name).plan
        key = ("source", name, plan.fingerprint, self.exclusions.sha256)
        return self.keep(key, partial(PackSource, self.folder, plan.path))

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made once."""
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
        problem = tokenizer_mismatch(store.manifest, opened, f"--tokenizer {name}")
        if problem is not None:
            raise OptionError(problem)
    return opened


def marker_ids(*stores: Store) -> IntArray:
    """The ids that are structure, not text."""
    found: set[int] = set()
    for manifest in (store.manifest for store in stores):
        chat = manifest.options.get("chat", {})
        found |= {*manifest.special_token_ids.values(), *chat.get("marker_ids", ())}
    return np.array(sorted(found), np.int64)


def find_stores(folders: Sequence[Path]) -> list[Path]:
    """Each folder that is a store, and the stores directly inside those that are not."""
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


def _stores_in(folder: Path) -> list[Path]:
    """A build that is not finished is in a hidden folder, and left out."""
    inside = folder.iterdir() if folder.is_dir() else ()
    return [path for path in inside if path.name[0] != "." and (path / META).is_file()]


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
    """The tokenizers that were named, each opened once and used for the stores it fits."""

    def __init__(self, names: Sequence[str], specials: Mapping[str, str] | None) -> None:
        self._opened = [(name, TokenTexts(open_named(name, specials))) for name in names]

    def of(self, store: Store) -> Reading:
        """How the ids of a store are read: with its own tokenizer, if that was named."""
        problems, markers = [], marker_ids(store)
        for name, texts in self._opened:
            problem = tokenizer_mismatch(store.manifest, texts.tokenizer, f"--tokenizer {name}")
            if problem is None:
                return Reading(name=name, texts=texts, why=None, markers=markers)
            problems.append(problem)
        return Reading(texts=None, why="; ".join(problems) or NO_TOKENIZER, markers=markers)


class Shelf:
    """Stores by number, from 0. Threads may share it."""

    def __init__(self, paths: Sequence[Path], tokenizers: Tokenizers) -> None:
        self.paths = tuple(paths)
        self.names = names_apart(self.paths)
        self._tokenizers = tokenizers
        self._lock = threading.Lock()
        self._locks = [threading.Lock() for _ in self.paths]
        self._open: OrderedDict[int, tuple[_FileStamp, OpenStore]] = OrderedDict()
        self._summaries: dict[int, tuple[_FileStamp, dict[str, JSON]]] = {}

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
            stamp = _file_stamp(path)
            with self._lock:
                known = self._open.get(number)
                if known is not None and known[0] == stamp:
                    self._open.move_to_end(number)
                    return known[1]
            store = open_store(path)
            opened = OpenStore(store, self._tokenizers.of(store))
            with self._lock:
                self._open[number] = stamp, opened
                self._open.move_to_end(number)
                # drop the stores that were not used for longest, until the rest is small enough
                while len(self._open) > 1 and self._num_shards() > MOST_SHARDS:
                    self._open.popitem(last=False)
            return opened

    def _num_shards(self) -> int:
        manifests = [opened.store.manifest for _, opened in self._open.values()]
        return sum(len(split.shards) for one in manifests for split in one.splits.values())

    def manifest(self, number: int) -> Manifest:
        """What the store lists, also when its files are damaged."""
        try:
            return self.store(number).store.manifest
        except ShardmillError:
            return read_manifest(self.path(number))

    def find(self, folder: Path) -> int | None:
        """The number of the store in this folder, if it is one of these."""
        found = folder.absolute()
        return self.paths.index(found) if found in self.paths else None

    def lines(self) -> list[JSON]:
        """A line for each store in the list of them; one that cannot be opened has its reason."""
        return [
            {"store": number, "name": name, "path": str(path), **self._summary(number)}
            for number, (name, path) in enumerate(zip(self.names, self.paths, strict=True))
        ]

    def _summary(self, number: int) -> dict[str, JSON]:
        """Opens the store once."""
        try:
            stamp = _file_stamp(self.path(number))
            known = self._summaries.get(number)
            if known is not None and known[0] == stamp:
                return known[1]
            store = self.store(number).store
        except (ShardmillError, OSError) as error:
            return {"kind": None, "splits": [], "error": str(error)}
        made: dict[str, JSON] = {"kind": _kind(store), "splits": [*store.splits], "error": None}
        self._summaries[number] = stamp, made
        return made

    def facts(self, number: int) -> dict[str, JSON]:
        """Everything that the first view of a store shows."""
        opened = self.store(number)
        store, manifest = opened.store, opened.store.manifest
        plain: dict[str, Any] = msgspec.to_builtins(
            {
                name: getattr(manifest, name)
                for name in ("ledger", "sources", "options", "produced_by", "special_token_ids")
            }
        )
        return {
            "store": number,
            "name": self.names[number],
            "path": str(store.folder),
            "kind": _kind(store),
            "unit": manifest.unit,
            "dtype": store.dtype,
            "vocab_size": manifest.vocab_size,
            "fingerprint": store.fingerprint,
            "tokenizer": {
                "name": opened.reading.name,
                "open": opened.reading.texts is not None,
                "why": opened.reading.why,
                "fingerprint": manifest.tokenizer_fingerprint,
            },
            "splits": [_split_facts(manifest, name) for name in store.splits],
            **plain,
            "repaired": plain["ledger"]["repaired"],
            "plans": [plan_line(name, plan) for name, plan in opened.plans().items()],
            "exclusions": _exclusion_facts(opened),
        }


def _file_stamp(path: Path) -> _FileStamp:
    """Changes when the store is built again: it is that of the file that is written last."""
    try:
        found = (path / META).stat()
    except OSError as error:
        raise StoreNotFoundError(
            f"{path}: its {META} cannot be read ({error.strerror}); it was moved or removed"
        ) from error
    return found.st_mtime_ns, found.st_ino, found.st_size


def _kind(store: Store) -> str:
    return "chat" if store.is_chat else "text"


def _split_facts(manifest: Manifest, name: str) -> dict[str, JSON]:
    split = manifest.splits[name]
    return {
        "name": name,
        "tokens": split.tokens,
        "documents": split.documents,
        "shards": len(split.shards),
        "bytes": split.tokens * ITEMSIZE[DTYPES[manifest.token_dtype]],
        "trained_tokens": split.chat.trained_tokens if split.chat else None,
        "turns": split.chat.num_turns if split.chat else None,
    }


def plan_line(name: str, plan: StoredPlan | StoreError) -> dict[str, JSON]:
    """A plan in the list; one that cannot be used has its reason."""
    if isinstance(plan, StoreError):
        return {"name": name, "error": str(plan)}
    facts = plan.facts
    return {
        "name": name,
        "split": facts.split,
        "seq_len": facts.options.seq_len,
        "rows": facts.metrics.num_rows,
        "pieces": facts.metrics.num_pieces,
        "utilisation": facts.utilisation,
        "error": None,
    }


def _exclusion_facts(opened: OpenStore) -> dict[str, JSON] | None:
    """What is not trained on any more; None: everything is."""
    try:
        found = opened.exclusions
    except StoreError as error:
        return {"entries": 0, "documents": 0, "tokens": 0, "sha256": "", "error": str(error)}
    if not found.entries:
        return None
    return {
        "error": None,
        "entries": len(found.entries),
        "documents": sum(len(entry.documents or ()) for entry in found.entries),
        "tokens": sum(found.num_tokens(split) for split in opened.splits),
        "sha256": found.sha256,
    }


def shard_page(
    manifest: Manifest, name: str, page: tuple[int, int], statuses: Mapping[str, str] | None
) -> dict[str, JSON]:
    """Some shards of a split. `statuses` of files that are not sound; None: not checked yet."""
    start, limit = page
    split, width = manifest.splits[name], ITEMSIZE[DTYPES[manifest.token_dtype]]
    return {
        "total": len(split.shards),
        "shards": [
            {
                "shard": number,
                "file": shard.file,
                "tokens": shard.tokens,
                "documents": shard.documents,
                "bytes": shard.tokens * width,
                "sha256": shard.sha256,
                "status": "unchecked" if statuses is None else statuses.get(shard.file, "ok"),
            }
            for number, shard in enumerate(split.shards[start : start + limit], start)
        ],
    }
