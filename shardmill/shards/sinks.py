"""Files that are written once, front to back, and know their sha256 at the end.

In: token ids and document offsets of one split.  Out: its shards and its index, durable.
Promise: bounded memory (at most a few MiB beyond what the caller passes in); a file is synced
before its entry exists; equal input, however it was divided into calls, gives equal bytes.
Not here: range checks, the manifest, who calls with what (writer.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shardmill.atomic import HashedFile, cannot_write
from shardmill.records import IntArray, OffsetArray
from shardmill.shards.continued import checked_chunks, share_file
from shardmill.shards.entries import ChatEntry, FileEntry, ShardEntry, SplitEntry
from shardmill.shards.layout import (
    INDEX_HEADER_BYTES,
    MAX_COUNT,
    index_header,
    index_name,
    shard_name,
    single_name,
)

_CHUNK = 2**20  # tokens or documents cast at a time


class IndexSink:
    """Starts of documents or turns as .npy: the header comes last, because it holds the count."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.entries = 0
        self._file = HashedFile(folder / self.name)
        self._file.write(bytes(INDEX_HEADER_BYTES))

    def copied(self, old: Path, entry: FileEntry) -> Iterator[OffsetArray]:
        """Begin with the starts of a finished index; each part of them is given when it is here."""
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
        self._spans = ShardSpans(self._cut)
        self._index = IndexSink(folder, index_name(split))
        if self._single:
            self._shard = HashedFile(folder / single_name(split))
        else:
            (folder / split).mkdir(exist_ok=True)

    def take_over(self, old: Path, entry: SplitEntry) -> bool:
        """Begin with the shards and documents of a finished split in the folder `old`: full shards
        are linked, what goes on is copied. False when a full one had to be copied too."""
        assert not self.documents, "a split begins only once"
        linked = True
        for shard in entry.shards:
            new = self._folder / self._name(len(self._hashes))
            if shard.tokens == self._cut:
                linked &= share_file(old / shard.file, new, shard.sha256)
                self._hashes.append(shard.sha256)
                continue
            if self._shard is None:
                self._shard = HashedFile(new)
            for chunk in checked_chunks(old / shard.file, shard.sha256):
                self._shard.write(chunk)
        for starts in self._index.copied(old, entry.index):
            self._spans.count(starts)
        self._spans.take_over(entry.shards)
        self.tokens, self.documents = entry.tokens, entry.documents
        return linked

    def append(self, values: IntArray, offsets: OffsetArray) -> None:
        """Documents behind those already here. Their ids fit the dtype: the caller checked."""
        for start in range(0, len(offsets) - 1, _CHUNK):
            starts = offsets[start : min(start + _CHUNK, len(offsets) - 1)] + self.tokens
            self._index.append(starts)
            self._spans.count(starts)
        self._spans.extend(offsets, self.tokens, self.documents)
        self.documents += len(offsets) - 1
        self._write(values)

    def _write(self, values: IntArray) -> None:
        done = 0
        while done < len(values):
            room = self._cut - self.tokens % self._cut
            part = values[done : done + min(room, _CHUNK)]
            if self._shard is None:
                self._shard = HashedFile(self._folder / self._name(len(self._hashes)))
            self._shard.write(np.ascontiguousarray(part, dtype=self._stored).view(np.uint8).data)
            done += len(part)
            self.tokens += len(part)
            if len(part) == room:
                self._close_shard()

    def finish(self, chat: ChatEntry | None = None) -> SplitEntry:
        """The entry of the split; `chat` is that of its chat files."""
        if self.documents and not self._hashes and self._shard is None:
            # documents without a token still have to start in some shard
            self._shard = HashedFile(self._folder / self._name(0))
        if self._shard is not None:
            self._close_shard()
        shards = [self._entry(number) for number in range(len(self._hashes))]
        index = self._index.finish()
        return SplitEntry(
            tokens=self.tokens, documents=self.documents, index=index, shards=shards, chat=chat
        )

    def abort(self) -> None:
        self._index.abort()
        if self._shard is not None:
            self._shard.abort()

    def _close_shard(self) -> None:
        assert self._shard is not None
        self._hashes.append(self._shard.finish())
        self._shard = None

    def _entry(self, number: int) -> ShardEntry:
        started, first, last = self._spans.of(number, len(self._hashes))
        return ShardEntry(
            file=self._name(number),
            tokens=min(self._cut, self.tokens - number * self._cut),
            documents=started,
            first_document=first,
            last_document=last,
            sha256=self._hashes[number],
        )

    def _name(self, number: int) -> str:
        return single_name(self._split) if self._single else shard_name(self._split, number)


class ShardSpans:
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
        """Begin behind these shards; their starts have been counted."""
        filled = [shard for shard in shards if shard.tokens]
        self._first = [_known(shard.first_document) for shard in filled]
        lasts = [_known(shard.last_document) for shard in filled]
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
        """Note which document owns the first and last token of every shard that these
        documents touch; `tokens` and `documents` lie before them."""
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
        # documents without a token behind the very last token count for the last shard
        started = self._started[number:] if final else self._started[number : number + 1]
        if number >= len(self._first):
            return sum(started), None, None
        last = self._last[number] if number < len(self._last) else self._last_filled
        return sum(started), self._first[number], last


def _known(document: int | None) -> int:
    assert document is not None, "a shard with tokens has documents"
    return document
