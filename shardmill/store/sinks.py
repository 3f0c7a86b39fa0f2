"""The files of one split, written front to back.

Memory stays at a few MiB beyond what the caller passes in. A file is synced before its entry
exists. Equal input gives equal bytes, however it was divided into calls. Ids are checked by the
caller.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shardmill.errors import DamagedStoreError, OptionError
from shardmill.records import ROLES, BoolArray, ChatExamples, IntArray, OffsetArray
from shardmill.storage.atomic import HashedFile, cannot_write
from shardmill.store.layout import (
    INDEX_HEADER_BYTES,
    MAX_COUNT,
    index_header,
    index_name,
    mask_name,
    roles_name,
    shard_name,
    single_name,
    turns_name,
)
from shardmill.store.manifest import ChatEntry, FileEntry, ShardEntry, SplitEntry
from shardmill.store.store import NEXT_STEP, read_chunks

_CHUNK = 2**20  # tokens or documents cast at a time
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}


class SplitSink:
    """The shards and the index of one split. `shard_tokens` None: one file for all."""

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int | None) -> None:
        self.tokens = 0
        self.documents = 0
        self._folder = folder
        self._split = split
        self._single = shard_tokens is None
        self._cut = MAX_COUNT if shard_tokens is None else shard_tokens
        self._stored = np.dtype(dtype).newbyteorder("<")
        self._hashes: list[str] = []  # of the finished shards
        self._shard: HashedFile | None = None
        self._spans = _ShardSpans(self._cut)
        self._index = _IndexSink(folder, index_name(split))
        if self._single:
            self._shard = HashedFile(folder / single_name(split))
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
                self._shard = HashedFile(new)
            for chunk in checked_chunks(old / shard.file, shard.sha256):
                self._shard.write(chunk)
        for starts in self._index.take_over(old, entry.index):
            self._spans.count(starts)
        self._spans.take_over(entry.shards)
        self.tokens, self.documents = entry.tokens, entry.documents
        return linked

    def append(self, values: IntArray, offsets: OffsetArray) -> None:
        """Add documents whose ids fit the dtype."""
        for start in range(0, len(offsets) - 1, _CHUNK):
            starts = offsets[start : min(start + _CHUNK, len(offsets) - 1)] + self.tokens
            self._index.append(starts)
            self._spans.count(starts)
        self._spans.extend(offsets, self.tokens, self.documents)
        self.documents += len(offsets) - 1
        done = 0
        while done < len(values):
            free = self._cut - self.tokens % self._cut
            part = values[done : done + min(free, _CHUNK)]
            if self._shard is None:
                self._shard = HashedFile(self._folder / self._name(len(self._hashes)))
            self._shard.write(np.ascontiguousarray(part, dtype=self._stored).view(np.uint8).data)
            done += len(part)
            self.tokens += len(part)
            if len(part) == free:
                self._close_shard(self._shard)

    def finish(self, chat: ChatEntry | None = None) -> SplitEntry:
        """The entry of the split; `chat` is that of its chat files."""
        if self.documents and not self._hashes and self._shard is None:
            # documents without a token still have to start in some shard
            self._shard = HashedFile(self._folder / self._name(0))
        if self._shard is not None:
            self._close_shard(self._shard)
        shards = []
        for number, sha256 in enumerate(self._hashes):
            started, first, last = self._spans.of(number, len(self._hashes))
            shards.append(
                ShardEntry(
                    file=self._name(number),
                    tokens=min(self._cut, self.tokens - number * self._cut),
                    documents=started,
                    first_document=first,
                    last_document=last,
                    sha256=sha256,
                )
            )
        index = self._index.finish()
        return SplitEntry(
            tokens=self.tokens, documents=self.documents, index=index, shards=shards, chat=chat
        )

    def abort(self) -> None:
        self._index.abort()
        if self._shard is not None:
            self._shard.abort()

    def _close_shard(self, shard: HashedFile) -> None:
        self._hashes.append(shard.finish())
        self._shard = None

    def _name(self, number: int) -> str:
        return single_name(self._split) if self._single else shard_name(self._split, number)


class _IndexSink:
    """Starts of documents or turns as .npy: the header comes last, because it holds the count."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.entries = 0
        self._file = HashedFile(folder / self.name)
        self._file.write(bytes(INDEX_HEADER_BYTES))

    def take_over(self, old: Path, entry: FileEntry) -> Iterator[OffsetArray]:
        """Copy the starts of a finished index; yields them part by part."""
        head, rest = INDEX_HEADER_BYTES, b""
        for chunk in checked_chunks(old / entry.file, entry.sha256):
            data, head = rest + bytes(chunk[head:]), max(0, head - len(chunk))
            whole = len(data) // 8 * 8
            starts, rest = np.frombuffer(data[:whole], "<i8"), data[whole:]
            self.append(starts)
            yield starts

    def append(self, starts: OffsetArray) -> None:
        self._file.write(np.ascontiguousarray(starts, dtype="<i8").view(np.uint8).data)
        self.entries += len(starts)

    def finish(self) -> FileEntry:
        self._file.finish()
        path = self._file.path
        try:
            with path.open("r+b") as file:
                file.write(index_header(self.entries))
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise cannot_write(path, error) from error
        return FileEntry(file=self.name, entries=self.entries, sha256=sha256)

    def abort(self) -> None:
        self._file.abort()


class _ShardSpans:
    """Which documents start in each shard, and which are its first and last.

    Shards are cut every `cut` tokens, so all of it is arithmetic on document starts:
    cut = 4, starts [0 3 4 9], 10 tokens -> shards [0 1] [2] [2..3], started [2 1 1].
    """

    def __init__(self, cut: int) -> None:
        self._cut = cut
        self._started: list[int] = []
        self._first: list[int] = []
        self._last: list[int] = []  # of full shards
        self._last_filled: int | None = None  # the newest document that has a token

    def take_over(self, shards: Sequence[ShardEntry]) -> None:
        """Begin after these shards; their starts have been counted."""
        filled = [shard for shard in shards if shard.tokens]
        # a shard with tokens has documents, so `or 0` replaces nothing
        self._first = [shard.first_document or 0 for shard in filled]
        lasts = [shard.last_document or 0 for shard in filled]
        self._last = lasts[: sum(shard.tokens == self._cut for shard in filled)]
        self._last_filled = lasts[-1] if lasts else None

    def count(self, starts: OffsetArray) -> None:
        """Note documents that start at these tokens, in order."""
        if not len(starts):
            return
        shards = starts // self._cut
        base = int(shards[0])
        for number, count in enumerate(np.bincount(shards - base).tolist(), start=base):
            self._started += [0] * (number + 1 - len(self._started))
            self._started[number] += count

    def extend(self, offsets: OffsetArray, tokens: int, documents: int) -> None:
        """Note which document owns the first and last token of every shard that these documents
        touch; `tokens` and `documents` come before them."""
        stop = tokens + int(offsets[-1])
        if stop == tokens:
            return
        begun = np.arange(-(-tokens // self._cut), -(-stop // self._cut)) * self._cut
        ended = np.arange(tokens // self._cut + 1, stop // self._cut + 1) * self._cut - 1
        positions = np.concatenate((begun, ended, [stop - 1])) - tokens
        owners = np.searchsorted(offsets, positions, side="right") - 1 + documents
        self._first += owners[: len(begun)].tolist()
        self._last += owners[len(begun) : -1].tolist()
        self._last_filled = int(owners[-1])

    def of(self, number: int, shards: int) -> tuple[int, int | None, int | None]:
        """(documents that start in it, first document, last document) of shard `number`."""
        final = number == shards - 1
        # documents without a token after the very last token count for the last shard
        started = self._started[number:] if final else self._started[number : number + 1]
        if number >= len(self._first):
            return sum(started), None, None
        last = self._last[number] if number < len(self._last) else self._last_filled
        return sum(started), self._first[number], last


class ChatSink:
    """What the conversations of one split have beside their tokens: loss mask, turns, roles."""

    def __init__(self, folder: Path, split: str) -> None:
        self._split = split
        self._tokens = 0
        self._trained = 0
        self._mask = HashedFile(folder / mask_name(split))
        self._bits: BoolArray = np.empty(0, np.bool_)  # up to 7 tokens that fill no byte yet
        self._turns = _IndexSink(folder, turns_name(split))
        self._roles = HashedFile(folder / roles_name(split))

    def append(self, examples: ChatExamples) -> None:
        """Add examples that `check_examples` accepts."""
        starts, mask = examples.turn_starts, examples.mask
        for start in range(0, len(starts), _CHUNK):
            self._turns.append(starts[start : start + _CHUNK] + self._tokens)
        self._roles.write(np.ascontiguousarray(examples.turn_roles).data)
        for start in range(0, len(mask), _CHUNK):
            part = mask[start : start + _CHUNK]
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
            mask=FileEntry(
                file=mask_name(self._split), entries=self._tokens, sha256=self._mask.finish()
            ),
            turns=turns,
            roles=FileEntry(
                file=roles_name(self._split), entries=turns.entries, sha256=self._roles.finish()
            ),
            num_turns=turns.entries,
            trained_tokens=self._trained,
        )

    def abort(self) -> None:
        self._mask.abort()
        self._turns.abort()
        self._roles.abort()


def check_examples(examples: ChatExamples, *, where: str, first: int) -> None:
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
        for chunk in checked_chunks(old, sha256):
            file.write(chunk)
        file.finish()
    finally:
        file.abort()
    return False


def checked_chunks(path: Path, sha256: str) -> Iterator[memoryview]:
    """The bytes of a file of a store, in a buffer that is used again. Raises after the last chunk
    if their hash is wrong."""
    digest = hashlib.sha256()
    try:
        for chunk in read_chunks(path):
            digest.update(chunk)
            yield chunk
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error
    if digest.hexdigest() != sha256:
        raise damaged(path, f"its sha256 is {digest.hexdigest()}, wanted {sha256}")


def damaged(path: Path, what: str) -> DamagedStoreError:
    return DamagedStoreError(f"{path}: {what}; {NEXT_STEP}")
