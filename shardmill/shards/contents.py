"""Read one file of a store and compare its contents with its entry.

In: a path and what the manifest says of it.  Out: sentences about what is wrong, without the name.
Promise: a few MiB of memory; every byte is hashed; structure is checked even where the hash
already differs, so that the report says what the damage does.
Not here: names and sizes (scan.py), the order of files (verify.py).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from shardmill.records import OffsetArray
from shardmill.shards.entries import FileEntry, ShardEntry, SplitEntry
from shardmill.shards.layout import INDEX_HEADER_BYTES, index_header

Tick = Callable[[int], None]
_CHUNK = 2**22  # bytes; a multiple of every item size


def check_shard(
    path: Path, shard: ShardEntry, dtype: str, vocab_size: int | None, tick: Tick
) -> Iterator[str]:
    """sha256, and no id outside the vocabulary where its size is known."""
    sha256, highest = hashlib.sha256(), -1
    stored = np.dtype(dtype).newbyteorder("<")
    for chunk in chunks(path, tick):
        sha256.update(chunk)
        ids = np.frombuffer(chunk, stored, count=len(chunk) // stored.itemsize)
        highest = max(highest, int(ids.max(initial=0)))
    yield from hash_problem(sha256.hexdigest(), shard.sha256)
    if vocab_size is not None and highest >= vocab_size:
        yield f"holds the id {highest:,}, but the vocabulary has {vocab_size:,} ids"


def check_index(path: Path, split: SplitEntry, tick: Tick) -> Iterator[str]:
    """sha256, header, starts that rise from 0 within the split, and the spans of the shards."""
    sha256 = hashlib.sha256()
    spans = _Spans(split)
    for number, chunk in enumerate(chunks(path, tick)):
        sha256.update(chunk)
        if number == 0 and chunk[:INDEX_HEADER_BYTES] != index_header(split.documents):
            yield f"its header is not that of {split.documents:,} int64"
        data = chunk[INDEX_HEADER_BYTES:] if number == 0 else chunk
        spans.add(np.frombuffer(data, "<i8", count=len(data) // 8))
    yield from hash_problem(sha256.hexdigest(), split.index.sha256)
    yield from spans.problems()


def check_dropped(
    path: Path, entry: FileEntry, reasons: Mapping[str, int], tick: Tick
) -> Iterator[str]:
    """sha256, and one row with id and reason for each row that the ledger says was dropped."""
    sha256 = hashlib.sha256()
    for chunk in chunks(path, tick):
        sha256.update(chunk)
    yield from hash_problem(sha256.hexdigest(), entry.sha256)
    found: Counter[str] = Counter()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                found[msgspec.json.decode(line, type=_Dropped).reason] += 1
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                yield f"line {number:,} is no dropped row: {error}"
                return
    if found != Counter(reasons):
        yield f"lists dropped rows {dict(found)}, but the ledger says {dict(reasons)}"


class _Dropped(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    reason: str


class _Spans:
    """Compare document starts, seen in chunks, with what the shards claim.

    The document of token `t` is the number of starts <= t, minus one, and such counts add up
    over chunks: so the first and last document of every shard need no second pass.
    """

    def __init__(self, split: SplitEntry) -> None:
        self._split = split
        stops = np.cumsum([0] + [shard.tokens for shard in split.shards], dtype=np.int64)
        self._begins, self._ends = stops[:-1], stops[1:]
        self._up_to_first = np.zeros(len(self._begins), np.int64)  # starts <= the first token
        self._up_to_last = np.zeros(len(self._begins), np.int64)  # starts <= the last token
        self._seen = 0
        self._previous = 0
        self._problem: str | None = None

    def add(self, starts: OffsetArray) -> None:
        if len(starts) == 0 or self._problem:
            return
        self._problem = self._order_problem(starts)
        self._up_to_first += np.searchsorted(starts, self._begins, side="right")
        self._up_to_last += np.searchsorted(starts, self._ends - 1, side="right")
        self._seen += len(starts)
        self._previous = int(starts[-1])

    def _order_problem(self, starts: OffsetArray) -> str | None:
        if self._seen == 0 and starts[0] != 0:
            return f"document 0 starts at token {starts[0]:,}, wanted 0"
        before = np.concatenate(([self._previous], starts[:-1]))
        falls = np.flatnonzero(starts < before)  # a difference could overflow
        if len(falls):
            return f"document {self._seen + falls[0]:,} starts before the one in front of it"
        if starts[-1] > self._split.tokens:
            return f"a document starts at token {starts[-1]:,} of {self._split.tokens:,}"
        return None

    def problems(self) -> Iterator[str]:
        if self._problem:
            yield self._problem
        elif self._seen != self._split.documents:
            yield f"{self._seen:,} documents start, wanted {self._split.documents:,}"
        else:
            yield from self._shard_problems()

    def _shard_problems(self) -> Iterator[str]:
        # a document that starts at the border of two shards starts in the second one; behind the
        # last token there is no second one, so what starts there counts for the last shard
        started = np.diff(self._up_to_last, prepend=0)
        if len(started):
            started[-1] += self._seen - self._up_to_last[-1]
        firsts, lasts = self._up_to_first - 1, self._up_to_last - 1
        counted = zip(started.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
        for shard, (documents, first, last) in zip(self._split.shards, counted, strict=True):
            claimed = (shard.documents, shard.first_document, shard.last_document)
            found = (documents, first, last) if shard.tokens else (documents, None, None)
            if claimed != found:
                yield (
                    f"puts (started, first, last) {found} in {shard.file}, but the manifest says "
                    f"{claimed}"
                )


def hash_problem(found: str, wanted: str) -> Iterator[str]:
    if found != wanted:
        yield f"damaged: its sha256 is {found}, wanted {wanted}"


def chunks(path: Path, tick: Tick) -> Iterator[memoryview]:
    """The bytes of a file, a few MiB at a time, in a buffer that is used again."""
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb") as file:
        while size := file.readinto(buffer):
            yield buffer[:size]
            tick(size)
