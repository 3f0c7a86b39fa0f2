"""Write a store: documents, conversations or finished shards in, shards, index and manifest out.

An id that does not fit is refused before anything is cast. Memory stays at a few MiB beyond what
the caller passes in. A file is synced before its entry exists; the manifest is written last, and
only if the ledger balances: without it the folder is not a store. Equal documents give equal bytes,
however they were appended. Shards that were written elsewhere are adopted without a look at their
tokens. A store may begin with the contents of a finished one.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar
from weakref import WeakSet

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.errors import BuildError, OptionError, StoreExistsError, UnfinishedBuildError
from shardmill.protocols import Closing
from shardmill.records import (
    ROLES,
    BoolArray,
    ChatExamples,
    Drop,
    IntArray,
    OffsetArray,
    PreferenceKind,
    Ragged,
)
from shardmill.storage.atomic import HashedFile, cannot_write, sync_folder, temporary_name
from shardmill.store.branches import num_records, problems_of, saved_tokens
from shardmill.store.layout import (
    DROPPED,
    INDEX_HEADER_BYTES,
    ITEMSIZE,
    MAX_COUNT,
    META,
    STORED,
    check_shape,
    check_tokens,
    index_header,
    looks_like_data,
    shard_name,
)
from shardmill.store.manifest import (
    ChatEntry,
    DroppedRow,
    ListedFile,
    Manifest,
    PreferenceEntry,
    ShardEntry,
    SplitEntry,
    StoreFacts,
    WrittenShard,
    make_manifest,
    write_manifest,
)
from shardmill.store.store import (
    ShardDocuments,
    Span,
    damaged,
    documents_started,
    read_chunks,
)

log = logging.getLogger(__name__)
Chunk = TypeVar("Chunk", bytes, memoryview)
NewFile: TypeAlias = Callable[[Path], HashedFile]
"""Opens a file that `StoreWriter.close` closes."""

_CHUNK = 2**20  # tokens or documents cast at a time, or bytes of a mask moved
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}


def meta_sha256(folder: Path) -> str:
    """Of the meta.json in a folder: another one, another store. Empty when there is none."""
    try:
        with (folder / META).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdoptedTurns:
    """What the conversations in some shards have beside their tokens, which are counted from 0."""

    mask_bits: npt.NDArray[np.uint8]  # token p is bit p % 8 of byte p // 8; the bits left over, 0
    turn_starts: OffsetArray  # (turns,) never decreasing
    turn_roles: npt.NDArray[np.uint8]  # (turns,) indices into ROLES
    links: OffsetArray | None = None  # (branches, 4) of preferences: see `branches`, from 0


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
        preference: PreferenceKind | None = None,
    ) -> None:
        """`shard_bytes` None: one file per split; else shards are cut at exactly that size, and
        those that are adopted hold at most that.

        `chat`: the store holds conversations, with loss mask and turns (`append_examples`);
        `preference`: of them prompts and their answers, which are adopted.
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
        if (self.folder / META).exists():
            raise StoreExistsError(
                f"{folder}: {META} is here already; write to a fresh folder and publish it"
            )
        _refuse_leftovers(self.folder)
        self._cut = None if shard_bytes is None else shard_bytes // ITEMSIZE[dtype]
        self._splits = {
            name: _SplitSink(self.folder, name, dtype, self._cut, self._new_file) for name in splits
        }
        self._chats = {
            name: _ChatSink(self.folder, name, self._new_file, preference)
            for name in splits
            if chat or preference
        }
        self._preference = preference

    def append(self, split: str, documents: Ragged, *, where: str = "") -> None:
        """Add documents to a split. `where` names their origin in an error."""
        if self._chats:
            raise OptionError(f"{self.folder}: a store of conversations takes append_examples only")
        sink = self._sink(split, "append")
        check_tokens(documents, self.dtype, where=where or split, first=sink.documents)
        if len(documents):
            self._state = "failed"  # until every byte of this call is written
            sink.append(documents.values, documents.offsets)
            self._state = "open"

    def append_examples(self, split: str, examples: ChatExamples, *, where: str = "") -> None:
        """Add rendered conversations to a split of a store made with `chat`."""
        if not self._chats:
            raise OptionError(f"{self.folder}: open the writer with chat=True to add conversations")
        if self._preference:
            raise OptionError(f"{self.folder}: a store of preferences takes adopt only")
        sink, ids = self._sink(split, "append"), examples.ids
        check_tokens(ids, self.dtype, where=where or split, first=sink.documents)
        _check_examples(examples, where=where or split, first=sink.documents)
        if len(ids):
            self._state = "failed"  # until every byte of this call is written
            turns = AdoptedTurns(
                mask_bits=np.packbits(examples.mask, bitorder="little"),
                turn_starts=examples.turn_starts,
                turn_roles=examples.turn_roles,
            )
            self._chats[split].append(turns, ids.lengths)
            sink.append(ids.values, ids.offsets)
            self._state = "open"

    def adopt(
        self,
        split: str,
        shards: Sequence[WrittenShard],
        lengths: OffsetArray,
        chat: AdoptedTurns | None = None,
    ) -> None:
        """List shards that somebody else wrote: they hold the next documents of a split, whose
        tokens are counted in `lengths`, and nothing else. The files are never opened, so they may
        be in this folder or wherever the store will be. (If no document of a split has a token,
        `finish` writes the one empty shard here.)

        `chat`: the turns, in a store of conversations. That each conversation has a turn and trains
        a token is up to whoever rendered it; only `verify` looks.
        """
        sink, where = self._sink(split, "adopt"), f"{self.folder}, split {split!r}"
        if self._cut is None:
            raise OptionError(f"{where}: one file per split is not adopted; give shard_bytes")
        _check_lengths(shards, lengths, self._cut, where=where)
        if chat is None and self._chats:
            raise OptionError(f"{where}: a store of conversations; pass their turns as chat")
        if chat is not None:
            if not self._chats:
                raise OptionError(f"{where}: open the writer with chat=True to add conversations")
            _check_turns(chat, lengths, where=where, first=sink.documents)
            _check_links(chat.links, self._preference, len(lengths), where=where)
        self._state = "failed"  # until every byte of this call is written
        sink.adopt(shards, lengths)
        if chat is not None:
            self._chats[split].append(chat, lengths)
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
        for name, sink in self._splits.items():
            if sink.filled_with is None:
                _refuse_leftovers(self.folder / name)
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

    def _sink(self, split: str, method: Literal["append", "adopt"]) -> _SplitSink:
        self._check_open()
        if split not in self._splits:
            raise OptionError(f"no split {split!r}; this store has {list(self._splits)}")
        sink = self._splits[split]
        if sink.filled_with is None and method == "append":
            _refuse_leftovers(self.folder / split)
        elif sink.filled_with not in (None, method):
            raise OptionError(
                f"{self.folder}: split {split!r} is filled with {sink.filled_with}, not {method}; "
                "use one of them for all of a split"
            )
        return sink

    def _check_open(self) -> None:
        if self._state != "open":
            raise BuildError(
                f"{self.folder}: this writer is {self._state}; start again in an empty folder"
            )


class _SplitSink:
    """The shards and the index of one split. `shard_tokens` None: one file for all."""

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: str,
        shard_tokens: int | None,
        new_file: NewFile,
    ) -> None:
        self.tokens = 0
        self.documents = 0
        self.filled_with: Literal["append", "adopt"] | None = None
        self._folder, self._new_file = folder, new_file
        self._split = split
        self._single = shard_tokens is None
        self._cut = MAX_COUNT if shard_tokens is None else shard_tokens
        self._stored = np.dtype(dtype).newbyteorder("<")
        self._shards: list[WrittenShard] = []
        self._spans: list[Span] = []  # of adopted shards; those of others are counted at the end
        self._shard: HashedFile | None = None
        self._index = _IndexSink(new_file(folder / f"{split}_idx.npy"))
        if self._single:
            self._shard = new_file(folder / self._name(0))
        else:
            (folder / split).mkdir(exist_ok=True)

    def append(self, values: IntArray, offsets: OffsetArray) -> None:
        """Add documents whose ids fit the dtype."""
        self.filled_with = "append"
        self._index.append(offsets[:-1], after=self.tokens)
        self.documents += len(offsets) - 1
        done = 0
        while done < len(values):
            free = self._cut - self.tokens % self._cut
            part = values[done : done + min(free, _CHUNK)]
            if self._shard is None:
                self._shard = self._new_file(self._folder / self._name(len(self._shards)))
            self._shard.write(np.ascontiguousarray(part, dtype=self._stored).view(np.uint8).data)
            done += len(part)
            self.tokens += len(part)
            if len(part) == free:
                self._close_shard(self._shard)

    def adopt(self, shards: Sequence[WrittenShard], lengths: OffsetArray) -> None:
        """Add shards that `_check_lengths` accepts."""
        self.filled_with = "adopt"
        tokens = [shard.tokens for shard in shards]
        documents = ShardDocuments(tokens, first_token=self.tokens, first_document=self.documents)
        for low in range(0, len(lengths), _CHUNK):
            # lengths [3 2] after 10 tokens: edges [10 13 15]
            edges = np.append(self.tokens, lengths[low : low + _CHUNK])
            np.cumsum(edges, out=edges)
            self._index.append(edges[:-1])
            documents.add(edges[:-1])
            self.tokens = int(edges[-1])
        self.documents += len(lengths)
        self._shards += shards
        self._spans += documents.spans()

    def finish(self, chat: ChatEntry | None = None) -> SplitEntry:
        """The entry of the split; `chat` is that of its chat files."""
        if self.documents and not self._shards and self._shard is None:
            # documents without a token still have to start in some shard
            self._shard = self._new_file(self._folder / self._name(0))
        if self._shard is not None:
            self._close_shard(self._shard)
        documents = ShardDocuments([shard.tokens for shard in self._shards])
        index = self._index.finish(None if self._spans else documents)
        spans = self._spans or documents.spans()
        started = documents_started(spans, self.documents)
        shards = [
            ShardEntry(
                **msgspec.structs.asdict(shard),
                documents=count,
                first_document=first,
                last_document=last,
            )
            for shard, count, (first, last) in zip(self._shards, started, spans, strict=True)
        ]
        return SplitEntry(
            tokens=self.tokens, documents=self.documents, index=index, shards=shards, chat=chat
        )

    def _close_shard(self, shard: HashedFile) -> None:
        number = len(self._shards)
        tokens, sha256 = self.tokens - number * self._cut, shard.finish()
        self._shards.append(WrittenShard(file=self._name(number), tokens=tokens, sha256=sha256))
        self._shard = None

    def _name(self, number: int) -> str:
        return f"{self._split}_tokens.bin" if self._single else shard_name(self._split, number)


class _IndexSink:
    """Starts of documents or turns as .npy. The header has their number, so it is written again at
    the end, and all is read again for its hash."""

    def __init__(self, file: HashedFile) -> None:
        self.entries = 0
        self._file = file
        self._file.write(index_header(0))

    def append(self, starts: OffsetArray, *, after: int = 0) -> None:
        """Add starts in a token space of their own, which follows `after` tokens."""
        for low in range(0, len(starts), _CHUNK):
            part = starts[low : low + _CHUNK]
            moved = np.ascontiguousarray(part + after if after else part, dtype="<i8")
            self._file.write(moved.view(np.uint8).data)
        self.entries += len(starts)

    def finish(self, documents: ShardDocuments | None = None) -> ListedFile:
        """The entry of the file; `documents` is shown all its starts."""
        path, found = self._file.path, self._file.finish()
        if self.entries or documents is not None:
            found = self._read_again(path, documents)
        return ListedFile(file=path.name, entries=self.entries, sha256=found)

    def _read_again(self, path: Path, documents: ShardDocuments | None) -> str:
        sha256, skip = hashlib.sha256(), INDEX_HEADER_BYTES
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
        return sha256.hexdigest()


class _ChatSink:
    """What the conversations of one split have beside their tokens: loss mask, turns, roles."""

    def __init__(
        self, folder: Path, split: str, new_file: NewFile, preference: PreferenceKind | None
    ) -> None:
        self._tokens = self._examples = self._branches = self._records = self._saved = 0
        self._preference = preference
        if preference is not None:
            self._links = new_file(folder / f"{split}_branches.bin")
        self._trained = 0
        self._mask = new_file(folder / f"{split}_mask.bin")
        self._rest = np.zeros(1, np.uint8)  # the bits of up to 7 tokens that fill no byte yet
        self._turns = _IndexSink(new_file(folder / f"{split}_turns.npy"))
        self._roles = new_file(folder / f"{split}_roles.bin")

    def append(self, turns: AdoptedTurns, lengths: OffsetArray) -> None:
        """Add the turns of the next examples, which have so many tokens."""
        tokens = int(lengths.sum())
        if turns.links is not None:
            moved = np.add(turns.links, (self._examples, self._examples, self._records, 0))
            self._links.write(np.ascontiguousarray(moved, "<i8").view(np.uint8).data)
            self._branches += len(moved)
            self._records += num_records(turns.links)
            self._saved += saved_tokens(turns.links, lengths)
        self._examples += len(lengths)
        self._turns.append(turns.turn_starts, after=self._tokens)
        self._roles.write(np.ascontiguousarray(turns.turn_roles).data)
        for low in range(0, len(turns.mask_bits), _CHUNK):
            bits = turns.mask_bits[low : low + _CHUNK]
            self._append_bits(bits, min(8 * len(bits), tokens - 8 * low))

    def _append_bits(self, bits: npt.NDArray[np.uint8], tokens: int) -> None:
        """Add one bit for each token, whole bytes at a time.

        After the bits ppp, bytes aaaaaaaa bbbbbbbb become aaaaappp bbbbbaaa .....bbb.
        """
        shift = self._tokens % 8
        moved = np.append(bits << shift, np.uint8(0))
        moved[1:] |= bits >> (8 - shift)  # numpy moves all bits out by 8
        moved[:1] |= self._rest
        whole = (shift + tokens) // 8
        self._mask.write(moved[:whole].data)
        self._rest = moved[whole : whole + 1].copy()
        self._tokens += tokens
        self._trained += int(np.bitwise_count(bits).sum())

    def finish(self) -> ChatEntry:
        if self._tokens % 8:
            self._mask.write(self._rest.data)
        turns, preference = self._turns.finish(), None
        if self._preference is not None:
            preference = PreferenceEntry(
                branches=_entry(self._links, self._branches),
                kind=self._preference,
                records=self._records,
                saved_tokens=self._saved,
            )
        return ChatEntry(
            mask=_entry(self._mask, self._tokens),
            turns=turns,
            roles=_entry(self._roles, turns.entries),
            num_turns=turns.entries,
            trained_tokens=self._trained,
            preference=preference,
        )


def _entry(file: HashedFile, entries: int) -> ListedFile:
    """The entry of a file of the store's own folder, finished here."""
    return ListedFile(file=file.path.name, entries=entries, sha256=file.finish())


def _check_examples(examples: ChatExamples, *, where: str, first: int) -> None:
    """Refuse examples whose parts do not fit together; their ids are checked elsewhere.

    `first` is the number of examples before these, for the message.
    """
    tokens, mask = len(examples.ids.values), examples.mask
    if mask.dtype != np.bool_ or mask.shape != (tokens,):
        found = f"{mask.dtype} {mask.shape}"
        raise OptionError(f"{where}: the mask is {found}, wanted bool ({tokens:,},), one per token")
    for problem in _turn_problems(examples.turn_starts, examples.turn_roles, tokens):
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


def _check_lengths(
    shards: Sequence[WrittenShard], lengths: OffsetArray, full: int, *, where: str
) -> None:
    """Refuse shards that cannot hold documents of these lengths."""
    if not isinstance(lengths, np.ndarray) or lengths.dtype != np.int64 or lengths.ndim != 1:
        raise OptionError(f"{where}: lengths are {lengths!r:.80}, wanted 1-d int64")
    if lengths.min(initial=0) < 0:
        raise BuildError(f"{where}: a document of {lengths.min()} tokens; write the shards again")
    for shard in shards:
        if not 1 <= shard.tokens <= full:
            raise BuildError(
                f"{where}: {shard.file} has {shard.tokens:,} tokens, wanted 1 to {full:,}; write "
                "it again"
            )
    found, wanted = sum(shard.tokens for shard in shards), int(lengths.sum())
    if found != wanted:
        raise BuildError(
            f"{where}: its documents have {wanted:,} tokens, but their {len(shards):,} shards hold "
            f"{found:,}; write them again"
        )


def _check_turns(chat: AdoptedTurns, lengths: OffsetArray, *, where: str, first: int) -> None:
    """Refuse turns that do not fit documents of these lengths; `first` as in `_check_examples`."""
    bits, tokens = chat.mask_bits, int(lengths.sum())
    if bits.dtype != np.uint8 or bits.shape != (-(-tokens // 8),):
        raise OptionError(
            f"{where}: the mask is {bits.dtype} {bits.shape}, wanted uint8 ({-(-tokens // 8):,},), "
            "one bit per token"
        )
    if tokens % 8 and bits[-1] >> tokens % 8:
        raise OptionError(f"{where}: the mask has bits after its last token, {tokens:,}")
    if not lengths.all():
        number = first + int(lengths.argmin())
        raise OptionError(f"{where}, example {number:,}: has no token; drop it")
    for problem in _turn_problems(chat.turn_starts, chat.turn_roles, tokens):
        raise OptionError(f"{where}: {problem}")


def _check_links(
    links: OffsetArray | None, kind: PreferenceKind | None, documents: int, *, where: str
) -> None:
    """Refuse branches that do not fit so many documents, or another kind of store."""
    if (links is None) != (kind is None):
        raise OptionError(f"{where}: branches and preference: give both, or neither")
    if links is not None and kind is not None:
        for problem in problems_of(links, kind, documents):
            raise OptionError(f"{where}: {problem}")


def _turn_problems(starts: OffsetArray, roles: npt.NDArray[np.uint8], tokens: int) -> Iterator[str]:
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


def share_file(old: Path, new: Path, sha256: str) -> bool:
    """Link a file that never changes into another folder; False when it had to be copied."""
    try:
        os.link(os.path.realpath(old), new)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise cannot_write(new, error) from error
    else:
        return True
    file = HashedFile(temporary_name(new))
    try:
        for chunk in _checked(old, sha256, read_chunks(old)):
            file.write(chunk)
        file.finish()
        file.path.replace(new)
    finally:
        file.abort()
        file.path.unlink(missing_ok=True)
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


def _refuse_leftovers(place: Path) -> None:
    names = sorted(entry.name for entry in place.iterdir()) if place.is_dir() else []
    found = [name for name in names if looks_like_data(name)]
    if found:
        raise UnfinishedBuildError(
            f"{place / found[0]}: left by an earlier build; shards of two builds are never "
            "mixed: delete the folder or write to another"
        )
