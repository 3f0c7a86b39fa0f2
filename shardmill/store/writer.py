"""Write a store: documents or conversations in, shards, index and manifest out.

An id that does not fit is refused before anything is cast. The manifest is the last thing written,
and only if the ledger balances; without it the folder is not a store. Equal documents give equal
bytes, however they were appended. A store may begin with the contents of a finished one.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from shardmill.errors import BuildError, OptionError, StoreExistsError, UnfinishedBuildError
from shardmill.protocols import Closing
from shardmill.records import ChatExamples, Drop, Ragged
from shardmill.storage.atomic import HashedFile, sync_folder
from shardmill.store.layout import (
    DROPPED,
    DTYPES,
    ITEMSIZE,
    META,
    STORED,
    check_shape,
    check_tokens,
    looks_like_data,
)
from shardmill.store.manifest import (
    DroppedRow,
    FileEntry,
    Manifest,
    StoreFacts,
    make_manifest,
    write_manifest,
)
from shardmill.store.sinks import ChatSink, SplitSink, check_examples, checked_chunks, damaged
from shardmill.store.store import open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldStore:
    """A finished store that another one begins with. It is only read."""

    folder: Path
    manifest: Manifest
    sha256: str  # of its meta.json

    def is_still_there(self) -> bool:
        """Whether it was not replaced since it was opened."""
        return _meta_sha256(self.folder) == self.sha256

    def drops(self) -> Iterator[Drop]:
        """Its dropped rows, in order."""
        entry = self.manifest.dropped
        if entry is None:
            return
        with (self.folder / entry.file).open("rb") as lines:
            for line in lines:
                try:
                    row = msgspec.json.decode(line, type=DroppedRow)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise damaged(
                        self.folder / entry.file, f"not a dropped row: {error}"
                    ) from error
                yield Drop(id=row.id, reason=row.reason)


def open_old(folder: Path) -> OldStore:
    """The store at `folder`, after the checks of `open_store`."""
    sha256 = _meta_sha256(folder)
    store = open_store(folder)
    return OldStore(folder=store.folder, manifest=store.manifest, sha256=sha256)


def _meta_sha256(folder: Path) -> str:
    """Empty when there is none."""
    try:
        with (folder / META).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


class StoreWriter(Closing):
    """A store that is being written, in a folder without another one. Use it in a `with` block:
    leaving the block before `finish` closes every file and writes no meta.json."""

    def __init__(
        self,
        folder: Path,
        *,
        splits: Sequence[str],
        dtype: str,
        shard_bytes: int | None,
        chat: bool = False,
    ) -> None:
        """`shard_bytes` None: one file per split; else shards are cut at exactly that size.

        `chat`: the store holds conversations, with loss mask and turns (`append_examples`).
        """
        check_shape(tuple(splits), dtype, shard_bytes)
        self.folder = Path(folder)
        self.dtype = dtype
        self.shard_bytes = shard_bytes
        self.splits = tuple(sorted(splits))
        self._drops = _DropSink(self.folder / DROPPED)
        self._state = "open"
        self.folder.mkdir(parents=True, exist_ok=True)
        _refuse_leftovers(self.folder, splits)
        cut = None if shard_bytes is None else shard_bytes // ITEMSIZE[dtype]
        self._splits = {name: SplitSink(self.folder, name, dtype, cut) for name in splits}
        self._chats = {name: ChatSink(self.folder, name) for name in splits} if chat else {}

    def take_over(self, old: OldStore, *, hold_drops: int = 0) -> None:
        """Begin with everything in a finished store of the same shape, except its last
        `hold_drops` dropped rows, which the caller records again."""
        self._check_open()
        shape = (self.splits, self.dtype, self.shard_bytes, bool(self._chats))
        found = old.manifest
        chat = any(split.chat is not None for split in found.splits.values())
        theirs = (tuple(sorted(found.splits)), DTYPES[found.token_dtype], found.shard_bytes, chat)
        if shape != theirs or chat:
            raise OptionError(
                f"{old.folder}: a store of (splits, dtype, shard_bytes, chat) {theirs} cannot be "
                f"continued as {shape}; build it again"
            )
        self._state = "failed"  # until every byte is here
        linked = [
            sink.take_over(old.folder, found.splits[name]) for name, sink in self._splits.items()
        ]
        if not all(linked):
            log.warning("%s: this disk cannot link files, so its shards are copied", self.folder)
        self._drops.take_over(old, hold_drops)
        self._state = "open"

    def append(self, split: str, documents: Ragged, *, where: str = "") -> None:
        """Add documents to a split. `where` names their origin in an error."""
        if self._chats:
            raise OptionError(f"{self.folder}: a store of conversations takes append_examples only")
        sink = self._sink(split)
        check_tokens(documents, self.dtype, where=where or split, first=sink.documents)
        if len(documents):
            self._state = "failed"  # until every byte of this call is written
            sink.append(documents.values, documents.offsets)
            self._state = "open"

    def append_examples(self, split: str, examples: ChatExamples, *, where: str = "") -> None:
        """Add rendered conversations to a split of a store made with `chat`."""
        if not self._chats:
            raise OptionError(f"{self.folder}: open the writer with chat=True to add conversations")
        sink, ids = self._sink(split), examples.ids
        check_tokens(ids, self.dtype, where=where or split, first=sink.documents)
        check_examples(examples, where=where or split, first=sink.documents)
        if len(ids):
            self._state = "failed"  # until every byte of this call is written
            self._chats[split].append(examples)
            sink.append(ids.values, ids.offsets)
            self._state = "open"

    def record_drops(self, drops: Iterable[Drop]) -> None:
        """Note input rows that gave no document."""
        self._check_open()
        self._drops.append(drops)

    def num_tokens(self, split: str) -> int:
        return self._splits[split].tokens

    def num_documents(self, split: str) -> int:
        return self._splits[split].documents

    def finish(self, facts: StoreFacts) -> Manifest:
        """Sync every file, then write meta.json: from here on the store exists."""
        self._check_open()
        self._state = "failed"
        self._drops.check(facts)
        chats = {name: sink.finish() for name, sink in self._chats.items()}
        splits = {name: sink.finish(chats.get(name)) for name, sink in self._splits.items()}
        manifest = make_manifest(
            facts,
            built=True,
            token_dtype=STORED[self.dtype],
            shard_bytes=self.shard_bytes,
            splits=splits,
            dropped=self._drops.finish(),
        )
        if self.shard_bytes is not None:
            for name in splits:
                sync_folder(self.folder / name)
        sync_folder(self.folder)
        write_manifest(self.folder, manifest)
        self._state = "finished"
        return manifest

    def close(self) -> None:
        """Close every file; before `finish` no meta.json is left. Deleting is up to the caller."""
        if self._state != "finished":
            self._state = "failed"
            self._drops.abort()
            for split in self._splits.values():
                split.abort()
            for chat in self._chats.values():
                chat.abort()

    def _sink(self, split: str) -> SplitSink:
        self._check_open()
        if split not in self._splits:
            raise OptionError(f"no split {split!r}; this store has {list(self._splits)}")
        return self._splits[split]

    def _check_open(self) -> None:
        if self._state != "open":
            raise BuildError(
                f"{self.folder}: this writer is {self._state}; start again in an empty folder"
            )


class _DropSink:
    """dropped.jsonl: made with the first dropped row, absent when there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: HashedFile | None = None
        self._reasons: Counter[str] = Counter()

    def append(self, drops: Iterable[Drop]) -> None:
        for drop in drops:
            if self._file is None:
                self._file = HashedFile(self._path)
            row = DroppedRow(id=_clean(drop.id), reason=_clean(drop.reason))
            self._file.write(msgspec.json.encode(row) + b"\n")
            self._reasons[row.reason] += 1

    def take_over(self, old: OldStore, hold: int) -> None:
        """Begin with the dropped rows of a store, without the last `hold`."""
        assert self._file is None, "old rows come before new ones"
        entry = old.manifest.dropped
        if entry is None:
            return
        left = entry.entries - hold  # lines still to be copied
        for chunk in checked_chunks(old.folder / entry.file, entry.sha256):
            if left and self._file is None:
                self._file = HashedFile(self._path)
            if self._file is not None:
                kept = _first_lines(bytes(chunk), left)
                left -= kept.count(b"\n")
                self._file.write(kept)
        self._reasons.update(old.manifest.ledger.documents.dropped)
        if hold:
            held = islice(old.drops(), entry.entries - hold, None)
            self._reasons -= Counter(drop.reason for drop in held)

    def check(self, facts: StoreFacts) -> None:
        claimed = {k: v for k, v in facts.ledger.documents.dropped.items() if v}
        if claimed != dict(self._reasons):
            raise BuildError(
                f"{self._path.parent}: the ledger says dropped {claimed}, but the rows recorded "
                f"were {dict(self._reasons)}; every dropped row needs an id and a reason"
            )

    def finish(self) -> FileEntry | None:
        if self._file is None:
            return None
        entries = self._reasons.total()
        return FileEntry(file=DROPPED, entries=entries, sha256=self._file.finish())

    def abort(self) -> None:
        if self._file is not None:
            self._file.abort()


def _first_lines(data: bytes, lines: int) -> bytes:
    """Up to the end of so many lines, or all when there are fewer."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    if len(ends) < lines:
        return data
    return data[: int(ends[lines - 1]) + 1] if lines else b""


def _clean(text: str) -> str:
    """File names may hold bytes that are no UTF-8; JSON must not: they become `\\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _refuse_leftovers(folder: Path, splits: Sequence[str]) -> None:
    if (folder / META).exists():
        raise StoreExistsError(
            f"{folder}: {META} is here already; write to a fresh folder and publish it"
        )
    for place in (folder, *(folder / split for split in splits)):
        names = sorted(entry.name for entry in place.iterdir()) if place.is_dir() else []
        found = [name for name in names if looks_like_data(name)]
        if found:
            raise UnfinishedBuildError(
                f"{place / found[0]}: left by an earlier build; shards of two builds are never "
                "mixed: delete the folder or write to another"
            )
