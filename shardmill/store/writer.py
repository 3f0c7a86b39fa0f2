"""Write a store: documents or conversations in, shards, index and manifest out.

An id that does not fit is refused before anything is cast. Memory stays at a few MiB beyond what
the caller passes in. A file is synced before its entry exists; the manifest is written last, and
only if the ledger balances: without it the folder is not a store. Equal documents give equal bytes,
however they were appended. A store may begin with the contents of a finished one.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar
from weakref import WeakSet

import msgspec
import numpy as np

from shardmill.errors import BuildError, OptionError, StoreExistsError, UnfinishedBuildError
from shardmill.protocols import Closing
from shardmill.records import ROLES, BoolArray, ChatExamples, Drop, IntArray, OffsetArray, Ragged
from shardmill.storage.atomic import HashedFile, cannot_write, sync_folder
from shardmill.store.layout import (
    DROPPED,
    DTYPES,
    INDEX_HEADER_BYTES,
    ITEMSIZE,
    MAX_COUNT,
    META,
    STORED,
    check_shape,
    check_tokens,
    index_header,
    looks_like_data,
)
from shardmill.store.manifest import (
    ChatEntry,
    DroppedRow,
    ListedFile,
    Manifest,
    ShardEntry,
    SplitEntry,
    StoreFacts,
    make_manifest,
    write_manifest,
)
from shardmill.store.store import ShardDocuments, Store, damaged, read_chunks

log = logging.getLogger(__name__)
Chunk = TypeVar("Chunk", bytes, memoryview)
NewFile: TypeAlias = Callable[[Path], HashedFile]
"""Opens a file that `StoreWriter.close` closes."""

_CHUNK = 2**20  # tokens or documents cast at a time
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}


def dropped_rows(store: Store) -> Iterator[Drop]:
    """The rows that gave no document of a store, in order."""
    entry = store.manifest.dropped
    if entry is None:
        return
    path = store.folder / entry.file
    for line in _checked(path, entry.sha256, _read_lines(path)):
        try:
            row = msgspec.json.decode(line, type=DroppedRow)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise damaged(path, f"not a dropped row: {error}") from error
        yield Drop(id=row.id, reason=row.reason)


def meta_sha256(folder: Path) -> str:
    """Of the meta.json in a folder: another one, another store. Empty when there is none."""
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
        self._files: WeakSet[HashedFile] = WeakSet()  # all that may be open
        self._drops = _DropSink(self.folder / DROPPED, self._new_file)
        self._state = "open"
        self.folder.mkdir(parents=True, exist_ok=True)
        _refuse_leftovers(self.folder, splits)
        cut = None if shard_bytes is None else shard_bytes // ITEMSIZE[dtype]
        self._splits = {
            name: _SplitSink(self.folder, name, dtype, cut, self._new_file) for name in splits
        }
        self._chats = {
            name: _ChatSink(self.folder, name, self._new_file) for name in splits if chat
        }

    def take_over(self, old: Store, *, hold_drops: int = 0) -> None:
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
        _check_examples(examples, where=where or split, first=sink.documents)
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
            for file in list(self._files):
                file.abort()

    def _new_file(self, path: Path) -> HashedFile:
        file = HashedFile(path)
        self._files.add(file)
        return file

    def _sink(self, split: str) -> _SplitSink:
        self._check_open()
        if split not in self._splits:
            raise OptionError(f"no split {split!r}; this store has {list(self._splits)}")
        return self._splits[split]

    def _check_open(self) -> None:
        if self._state != "open":
            raise BuildError(
                f"{self.folder}: this writer is {self._state}; start again in an empty folder"
            )


class _SplitSink:
    """The shards and the index of one split. `shard_tokens` None: one file for all."""

    def __init__(
        self, folder: Path, split: str, dtype: str, shard_tokens: int | None, new_file: NewFile
    ) -> None:
        self.tokens = 0
        self.documents = 0
        self._folder, self._new_file = folder, new_file
        self._split = split
        self._single = shard_tokens is None
        self._cut = MAX_COUNT if shard_tokens is None else shard_tokens
        self._stored = np.dtype(dtype).newbyteorder("<")
        self._hashes: list[str] = []  # of the finished shards
        self._shard: HashedFile | None = None
        self._index = _IndexSink(new_file(folder / f"{split}_idx.npy"))
        if self._single:
            self._shard = new_file(folder / self._name(0))
        else:
            (folder / split).mkdir(exist_ok=True)

    def take_over(self, old: Path, entry: SplitEntry) -> bool:
        """Begin with the shards and documents of a finished split in the folder `old`. Full shards
        are linked; the last one is copied. False when full ones had to be copied too."""
        assert not self.documents, "a split begins only once"
        linked = True
        for shard in entry.shards:
            new = self._folder / self._name(len(self._hashes))
            if shard.tokens == self._cut:
                linked &= _share_file(old / shard.file, new, shard.sha256)
                self._hashes.append(shard.sha256)
                continue
            if self._shard is None:
                self._shard = self._new_file(new)
            path = old / shard.file
            for chunk in _checked(path, shard.sha256, read_chunks(path)):
                self._shard.write(chunk)
        self._index.take_over(old, entry.index)
        self.tokens, self.documents = entry.tokens, entry.documents
        return linked

    def append(self, values: IntArray, offsets: OffsetArray) -> None:
        """Add documents whose ids fit the dtype."""
        self._index.append(offsets[:-1], after=self.tokens)
        self.documents += len(offsets) - 1
        done = 0
        while done < len(values):
            free = self._cut - self.tokens % self._cut
            part = values[done : done + min(free, _CHUNK)]
            if self._shard is None:
                self._shard = self._new_file(self._folder / self._name(len(self._hashes)))
            self._shard.write(np.ascontiguousarray(part, dtype=self._stored).view(np.uint8).data)
            done += len(part)
            self.tokens += len(part)
            if len(part) == free:
                self._close_shard(self._shard)

    def finish(self, chat: ChatEntry | None = None) -> SplitEntry:
        """The entry of the split; `chat` is that of its chat files."""
        if self.documents and not self._hashes and self._shard is None:
            # documents without a token still have to start in some shard
            self._shard = self._new_file(self._folder / self._name(0))
        if self._shard is not None:
            self._close_shard(self._shard)
        starts = range(0, len(self._hashes) * self._cut, self._cut)
        tokens = [min(self._cut, self.tokens - start) for start in starts]
        documents = ShardDocuments(tokens)
        index = self._index.finish(documents)
        shards = [
            ShardEntry(
                file=self._name(number),
                tokens=tokens[number],
                documents=started,
                first_document=first,
                last_document=last,
                sha256=self._hashes[number],
            )
            for number, (started, first, last) in enumerate(documents.of_shards())
        ]
        return SplitEntry(
            tokens=self.tokens, documents=self.documents, index=index, shards=shards, chat=chat
        )

    def _close_shard(self, shard: HashedFile) -> None:
        self._hashes.append(shard.finish())
        self._shard = None

    def _name(self, number: int) -> str:
        if self._single:
            return f"{self._split}_tokens.bin"
        return f"{self._split}/shard_{number:05d}.bin"


class _IndexSink:
    """Starts of documents or turns as .npy: the header comes last, because it holds the count."""

    def __init__(self, file: HashedFile) -> None:
        self.entries = 0
        self._file = file
        self._file.write(bytes(INDEX_HEADER_BYTES))

    def take_over(self, old: Path, entry: ListedFile) -> None:
        """Begin with the starts of a finished index."""
        path, skip = old / entry.file, INDEX_HEADER_BYTES
        for chunk in _checked(path, entry.sha256, read_chunks(path)):
            self._file.write(chunk[skip:])
            skip = 0
        self.entries = entry.entries

    def append(self, starts: OffsetArray, *, after: int) -> None:
        """Add starts in a token space of their own, which follows `after` tokens."""
        for low in range(0, len(starts), _CHUNK):
            part = np.ascontiguousarray(starts[low : low + _CHUNK] + after, dtype="<i8")
            self._file.write(part.view(np.uint8).data)
        self.entries += len(starts)

    def finish(self, documents: ShardDocuments | None = None) -> ListedFile:
        """The entry of the file; `documents` is shown all its starts."""
        self._file.finish()
        path, sha256, skip = self._file.path, hashlib.sha256(), INDEX_HEADER_BYTES
        try:
            with path.open("r+b") as file:
                file.write(index_header(self.entries))
                file.flush()
                os.fsync(file.fileno())
            for chunk in read_chunks(path):
                sha256.update(chunk)
                if documents is not None:
                    documents.add(np.frombuffer(chunk[skip:], "<i8"))
                skip = 0
        except OSError as error:
            raise cannot_write(path, error) from error
        return ListedFile(file=path.name, entries=self.entries, sha256=sha256.hexdigest())


class _ChatSink:
    """What the conversations of one split have beside their tokens: loss mask, turns, roles."""

    def __init__(self, folder: Path, split: str, new_file: NewFile) -> None:
        self._tokens = 0
        self._trained = 0
        self._mask = new_file(folder / f"{split}_mask.bin")
        self._bits: BoolArray = np.empty(0, np.bool_)  # up to 7 tokens that fill no byte yet
        self._turns = _IndexSink(new_file(folder / f"{split}_turns.npy"))
        self._roles = new_file(folder / f"{split}_roles.bin")

    def append(self, examples: ChatExamples) -> None:
        """Add examples that `_check_examples` accepts."""
        self._turns.append(examples.turn_starts, after=self._tokens)
        self._roles.write(np.ascontiguousarray(examples.turn_roles).data)
        for start in range(0, len(examples.mask), _CHUNK):
            part = examples.mask[start : start + _CHUNK]
            bits = np.concatenate((self._bits, part))
            whole = len(bits) // 8 * 8
            # one bit per token, the first in the lowest bit of a byte
            self._mask.write(np.packbits(bits[:whole], bitorder="little").data)
            self._bits = bits[whole:].copy()
            self._tokens += len(part)
            self._trained += int(np.count_nonzero(part))

    def finish(self) -> ChatEntry:
        self._mask.write(np.packbits(self._bits, bitorder="little").data)
        turns = self._turns.finish()
        return ChatEntry(
            mask=_entry(self._mask, self._tokens),
            turns=turns,
            roles=_entry(self._roles, turns.entries),
            num_turns=turns.entries,
            trained_tokens=self._trained,
        )


def _entry(file: HashedFile, entries: int) -> ListedFile:
    """The entry of a file of the store's own folder, finished here."""
    return ListedFile(file=file.path.name, entries=entries, sha256=file.finish())


def _check_examples(examples: ChatExamples, *, where: str, first: int) -> None:
    """Refuse examples whose parts do not fit together; their ids are checked elsewhere.

    `first` is the number of examples before these, for the message.
    """
    for problem in _shape_problems(examples):
        raise OptionError(f"{where}: {problem}")
    if not len(examples.ids):
        return

    def refuse(wrong: BoolArray, problem: str) -> None:
        if wrong.any():
            raise OptionError(f"{where}, example {first + int(wrong.argmax()):,}: {problem}")

    refuse(examples.ids.lengths == 0, "has no token; drop it")
    trains = np.logical_or.reduceat(examples.mask, examples.ids.offsets[:-1])
    refuse(~trains, "trains no token, so it would teach nothing; drop it with a reason")
    turns = np.searchsorted(examples.turn_starts, examples.ids.offsets)
    refuse(turns[1:] == turns[:-1], "no turn starts in it")


def _shape_problems(examples: ChatExamples) -> Iterator[str]:
    tokens = len(examples.ids.values)
    mask, starts, roles = examples.mask, examples.turn_starts, examples.turn_roles
    if mask.dtype != np.bool_ or mask.shape != (tokens,):
        yield f"the mask is {mask.dtype} {mask.shape}, wanted bool ({tokens:,},), one per token"
    if starts.dtype != np.int64 or starts.ndim != 1:
        yield f"starts of turns are {starts.ndim}-d {starts.dtype}, wanted 1-d int64"
    elif len(starts) and (starts[0] < 0 or (starts[1:] < starts[:-1]).any()):
        yield "starts of turns are negative or decrease"
    elif len(starts) and starts[-1] >= tokens:
        yield f"a turn starts at token {starts[-1]:,} of {tokens:,}"
    if roles.dtype != np.uint8 or roles.shape != starts.shape:
        yield f"roles are {roles.dtype} {roles.shape}, wanted uint8 {starts.shape}, one per turn"
    elif len(roles) and roles.max() >= len(ROLES):
        yield f"a turn has the role {roles.max()}, but there are {len(ROLES)}: {', '.join(ROLES)}"


def _share_file(old: Path, new: Path, sha256: str) -> bool:
    """Link a file that never changes into another folder; False when it had to be copied."""
    try:
        os.link(os.path.realpath(old), new)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise cannot_write(new, error) from error
    else:
        return True
    file = HashedFile(new)
    try:
        for chunk in _checked(old, sha256, read_chunks(old)):
            file.write(chunk)
        file.finish()
    finally:
        file.abort()
    return False


def _checked(path: Path, sha256: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The bytes of a file of a store. Raises after the last of them if their hash is wrong."""
    digest = hashlib.sha256()
    try:
        for chunk in chunks:
            digest.update(chunk)
            yield chunk
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error
    if digest.hexdigest() != sha256:
        raise damaged(path, f"its sha256 is {digest.hexdigest()}, wanted {sha256}")


def _read_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        yield from lines


class _DropSink:
    """dropped.jsonl: made with the first dropped row, absent when there is none."""

    def __init__(self, path: Path, new_file: NewFile) -> None:
        self._path, self._new_file = path, new_file
        self._file: HashedFile | None = None
        self._reasons: Counter[str] = Counter()

    def append(self, drops: Iterable[Drop]) -> None:
        for drop in drops:
            if self._file is None:
                self._file = self._new_file(self._path)
            row = DroppedRow(id=_clean(drop.id), reason=_clean(drop.reason))
            self._file.write(msgspec.json.encode(row) + b"\n")
            self._reasons[row.reason] += 1

    def take_over(self, old: Store, hold: int) -> None:
        """Begin with the dropped rows of a store, without the last `hold`."""
        assert self._file is None, "old rows come before new ones"
        drops, total = dropped_rows(old), sum(old.manifest.ledger.documents.dropped.values())
        self.append(islice(drops, total - hold))
        deque(drops, maxlen=0)  # the hash of the file is checked after its last row

    def check(self, facts: StoreFacts) -> None:
        claimed = {k: v for k, v in facts.ledger.documents.dropped.items() if v}
        if claimed != dict(self._reasons):
            raise BuildError(
                f"{self._path.parent}: the ledger says dropped {claimed}, but the rows recorded "
                f"were {dict(self._reasons)}; every dropped row needs an id and a reason"
            )

    def finish(self) -> ListedFile | None:
        return None if self._file is None else _entry(self._file, self._reasons.total())


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
