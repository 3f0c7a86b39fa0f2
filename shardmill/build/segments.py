"""The journal: tokenised documents in segments, each done when its receipt is there.

A unit of work has a folder. A segment in it is `NNNNNN.tokens` (raw, the store's dtype),
`NNNNNN.lengths` (raw int64), `NNNNNN.batches` (JSON lines: the accounts and drops of each batch),
for conversations `.mask`, `.turns`, `.roles` and `.splits`, and `NNNNNN.json`, the receipt, written
last and atomically with the sha256 of all the others, the source's cursor behind it, what it
belongs to, and a seal of its own. Segment borders are a matter of speed and never show in a store.

Promise: a receipt counts only for the plan and the input it was made from, behind the very receipts
it was made behind.
"""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from shardmill.atomic import HashedFile, atomic_write, cannot_write, sync_folder
from shardmill.build.portion import PARTS, Account, Portion, parts_of, portions_of
from shardmill.errors import BuildError
from shardmill.records import Cursor

SEGMENT_TOKENS = 8 * 2**20
SEGMENT_SECONDS = 10.0
"""A segment is sealed at either, so a kill costs seconds even with a slow tokenizer."""


class DamagedSegmentError(BuildError):
    """A segment that is not what its receipt says; never leaves this room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKey:
    """What the segments of a unit belong to."""

    feed: int
    start: int  # grains of the feed, half-open
    stop: int
    plan: str  # sha256 of everything that determines the bytes
    inputs: str  # sha256 over names and times of the unit's files

    @property
    def folder(self) -> str:
        return f"{self.feed:03d}-{self.start:08d}"


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finished segment: what is in it and where its source goes on."""

    feed: int
    start: int
    stop: int
    plan: str
    inputs: str
    number: int  # in its unit
    previous: str  # the seal of the receipt before it; "" for the first of a unit
    num_read: int
    num_given: int
    num_documents: int
    num_tokens: int
    num_bytes: int
    counts: dict[str, int]  # of the source: "empty", "invalid_utf8"
    dropped: dict[str, int]  # reason to number of rows
    cursor: dict[str, Any]  # a Cursor
    last: bool  # nothing of the unit follows
    sha256: dict[str, str]  # part to digest

    @property
    def key(self) -> UnitKey:
        return UnitKey(
            feed=self.feed, start=self.start, stop=self.stop, plan=self.plan, inputs=self.inputs
        )

    @property
    def seal(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSize:
    """When a segment is sealed."""

    num_tokens: int
    seconds: float

    @classmethod
    def usual(cls) -> SegmentSize:
        return cls(num_tokens=SEGMENT_TOKENS, seconds=SEGMENT_SECONDS)


class PartFile(Protocol):
    """One part of an open segment, written front to back."""

    def write(self, data: bytes | memoryview) -> None: ...

    def finish(self) -> str:
        """Nothing follows; gives the sha256 of all of it."""

    def abort(self) -> None:
        """Let go of it. Never raises."""


class Segment:
    """One open segment, wherever its parts go. `seal` makes it count."""

    def __init__(
        self, key: UnitKey, *, after: Receipt | None, size: SegmentSize | None = None
    ) -> None:
        """`after` is the receipt before this one, None at the start of a unit."""
        self.num_documents = self.num_tokens = self.num_read = 0
        self._num_given = self._num_bytes = 0
        self._key, self._size = key, size or SegmentSize.usual()
        self._number = 0 if after is None else after.number + 1
        self._previous = "" if after is None else after.seal
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._files: dict[str, PartFile] = {part: self._begin(part) for part in PARTS}
        self._since = time.monotonic()

    def add(self, portion: Portion, account: Account) -> None:
        """The next portion; parts that it has and the others had not begin here."""
        for part, data in parts_of(portion, account, tokens=self.num_tokens):
            if part not in self._files:
                self._files[part] = self._begin(part)
            self._files[part].write(data)
        self._dropped.update(drop.reason for drop in portion.drops)
        self.num_tokens += len(portion.documents.values)
        self.num_documents += len(portion.documents)
        self.num_read += account.num_read
        self._num_given += account.num_given
        self._num_bytes += account.num_bytes
        self._counts.update(account.counts)

    @property
    def due(self) -> bool:
        old = time.monotonic() - self._since > self._size.seconds
        return self.num_tokens >= self._size.num_tokens or (old and self.num_read > 0)

    def seal(self, cursor: Cursor, *, last: bool) -> Receipt:
        sha256 = {part: file.finish() for part, file in self._files.items()}
        receipt = Receipt(
            **asdict(self._key),
            number=self._number,
            previous=self._previous,
            num_read=self.num_read,
            num_given=self._num_given,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_bytes=self._num_bytes,
            counts=dict(self._counts),
            dropped=dict(self._dropped),
            cursor=cursor,
            last=last,
            sha256=sha256,
        )
        self._keep(receipt)
        return receipt

    def abandon(self) -> None:
        """Close the files of an unsealed segment; harmless after `seal`."""
        for file in self._files.values():
            file.abort()

    @abstractmethod
    def _begin(self, part: str) -> PartFile: ...

    @abstractmethod
    def _keep(self, receipt: Receipt) -> None:
        """All parts are finished: make them count."""


class SegmentWriter(Segment):
    """A segment in a unit's folder. Unsealed, its files are overwritten later."""

    def __init__(
        self, folder: Path, key: UnitKey, *, after: Receipt | None, size: SegmentSize | None = None
    ) -> None:
        self._folder = folder
        super().__init__(key, after=after, size=size)

    def _begin(self, part: str) -> HashedFile:
        return open_part(self._folder, self._number, part)

    def _keep(self, receipt: Receipt) -> None:
        write_receipt(self._folder, receipt)


def open_part(folder: Path, number: int, part: str) -> HashedFile:
    """A new part of a segment; what an unsealed one of an earlier run left here is overwritten."""
    path = _path(folder, number, part)
    try:
        return HashedFile(path, replace=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_receipt(folder: Path, receipt: Receipt) -> None:
    """Make a segment count whose parts are finished in this folder."""
    path = _path(folder, receipt.number, "json")
    try:
        sync_folder(folder)
        with atomic_write(path) as file:
            file.write(receipt.seal.encode() + b"\n" + msgspec.json.encode(receipt))
    except OSError as error:
        raise cannot_write(path, error) from error


def read_receipts(folder: Path, key: UnitKey | None = None) -> list[Receipt]:
    """The receipts of a unit in order, up to the first that is missing, damaged, behind another
    than it was made behind, or not of the unit `key` (None: the unit of the first).

    What follows that one is removed, so that no leftover is ever taken for work done.
    """
    receipts: list[Receipt] = []
    while (path := _path(folder, len(receipts), "json")).exists():
        try:
            receipt = _read_receipt(path)
        except (DamagedSegmentError, msgspec.MsgspecError, UnicodeDecodeError):
            break
        before = receipts[-1].seal if receipts else ""
        key = key or receipt.key
        if (receipt.key, receipt.previous, receipt.number) != (key, before, len(receipts)):
            break
        receipts.append(receipt)
        if receipt.last:
            break
    keep_receipts(folder, receipts)
    return receipts


def keep_receipts(folder: Path, receipts: list[Receipt]) -> None:
    """Remove every file of a unit that is not of these segments."""
    known = {
        _path(folder, receipt.number, part).name
        for receipt in receipts
        for part in (*receipt.sha256, "json")
    }
    for path in folder.iterdir():
        if path.name not in known:
            path.unlink()


def _read_receipt(path: Path) -> Receipt:
    sha256, _, data = path.read_bytes().partition(b"\n")
    if hashlib.sha256(data).hexdigest().encode() != sha256:
        raise DamagedSegmentError(f"{path}: changed after it was written")
    return msgspec.json.decode(data, type=Receipt)


def load_segment(folder: Path, receipt: Receipt, dtype: str) -> Iterator[tuple[Portion, Account]]:
    """A segment from disk, checked against the receipt's hashes before the first portion."""
    data: dict[str, Any] = {}
    for part, sha256 in receipt.sha256.items():
        path = _path(folder, receipt.number, part)
        try:
            data[part] = np.fromfile(path, np.uint8)
        except OSError as error:
            raise DamagedSegmentError(f"{path}: cannot be read: {error.strerror}") from error
        if hashlib.sha256(data[part].data).hexdigest() != sha256:
            raise DamagedSegmentError(f"{path}: changed after it was written")
    return portions_of(data, dtype)


def _path(folder: Path, number: int, part: str) -> Path:
    return folder / f"{number:06d}.{part}"
