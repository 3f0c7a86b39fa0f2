"""One store that is open, and everything of it that is opened when it is asked for.

In: a store, how its ids are read.  Out: tokens, documents, conversations, plans, each opened once.
Promise: opening reads no token; what is large stays on disk; threads may share it.
Not here: which stores there are (shelf), facts for a view (overview, documents, plans).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.inspector.view import Reading
from shardmill.loading import PackSource
from shardmill.loading.chats import checked_pad_id
from shardmill.mapped import PackSpace, TokenSpace, open_tokens
from shardmill.records import OffsetArray
from shardmill.shards import (
    ChatArrays,
    Exclusions,
    Store,
    StoredPlan,
    plans_of,
    read_exclusions,
)
from shardmill.shards.plans import PACKS, SUFFIX

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
