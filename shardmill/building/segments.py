"""The journal: tokenised documents in segments, each done when its receipt is there.

A unit of work has a folder. A segment in it is `NNNNNN.tokens` (raw, the store's dtype),
`NNNNNN.lengths` (raw int64), `NNNNNN.batches` (JSON lines: the accounts and drops of each batch),
for conversations `.mask`, `.turns`, `.roles` and `.splits`, and `NNNNNN.json`, the receipt, written
last and atomically with the sha256 of all the others, the source's cursor behind it, what it
belongs to, and a seal of its own. Segment borders are a matter of speed and never show in a store.

Promise: a receipt counts only for the plan and the input it was made from, behind the very receipts
it was made behind.

What moves through a build: some documents or conversations of one source, and the account.

In: arrays.  Out: the same arrays as named runs of bytes, and back.
Promise: what was written as parts comes back equal; documents come back batch by batch, as they
were written, because a ledger counts whole batches.
Not here: files, hashes (segments.py), where a document goes (commit.py).

Segments that are made where the journal is not, and carried to it.

In: a segment's parts in the memory of one process.  Out: the same segment in the unit's folder.
Promise: what arrives is what was sent, by its hashes; it counts from the moment its receipt stands
here, like one that was made here.
Not here: how a note travels (engines), what is in a segment (segments.py).
"""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.errors import BuildError
from shardmill.records import BoolArray, ChatExamples, Cursor, Drop, IntArray, Ragged
from shardmill.storage.atomic import HashedFile, atomic_write, cannot_write, sync_folder

PARTS = ("tokens", "lengths", "batches")
"""Every segment has these; one of conversations has those, unless it is empty."""
CHAT_PARTS = ("mask", "turns", "roles", "splits")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatPart:
    """What conversations have beside their ids."""

    examples: ChatExamples
    splits: npt.NDArray[np.uint8]  # (len(examples.ids),) the number of the split of each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portion:
    """Some documents, in the dtype of the store, and the rows that gave none."""

    documents: Ragged
    drops: tuple[Drop, ...] = ()
    void: tuple[int, ...] = ()  # places, among the texts given, of those without a token
    chat: ChatPart | None = None  # of conversations; its ids are `documents`


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """What a source says of a portion."""

    num_read: int
    num_given: int = 0  # texts or conversations, with those that gave no token
    num_bytes: int = 0  # of text, about
    counts: Mapping[str, int] = field(default_factory=dict)
    num_rows: int = 0  # rows of a file that is read in parts; its drops count them from 0
    begins: bool = False  # rows are counted from 0 here, not on from the portion before
    cursor: Cursor = field(default_factory=dict)  # the source goes on here
    grain: int = 0  # which grain of its unit it is of, or begins in


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    """One batch of a segment, as a line of its part "batches"."""

    num_read: int
    num_given: int
    num_bytes: int
    num_documents: int
    drops: list[tuple[str, str, int | None]]  # id, reason, row
    void: tuple[int, ...]
    counts: dict[str, int]
    num_rows: int
    begins: bool
    grain: int


def parts_of(
    portion: Portion, account: SourceCounts, *, tokens: int
) -> Iterator[tuple[str, bytes | memoryview]]:
    """(part, bytes) to write behind a segment of so many `tokens`."""
    yield "tokens", _bytes(portion.documents.values)
    yield "lengths", _bytes(portion.documents.lengths.astype("<i8"))
    batch = _Batch(
        num_read=account.num_read,
        num_given=account.num_given,
        num_bytes=account.num_bytes,
        num_documents=len(portion.documents),
        drops=[(drop.id, drop.reason, drop.row) for drop in portion.drops],
        void=portion.void,
        counts=dict(account.counts),
        num_rows=account.num_rows,
        begins=account.begins,
        grain=account.grain,
    )
    yield "batches", msgspec.json.encode(batch) + b"\n"
    if portion.chat is not None:
        examples = portion.chat.examples
        yield "mask", _bytes(examples.mask)
        yield "turns", _bytes((examples.turn_starts + tokens).astype("<i8"))
        yield "roles", _bytes(examples.turn_roles)
        yield "splits", _bytes(portion.chat.splits)


def portions_of(
    data: Mapping[str, npt.NDArray[np.uint8]], dtype: str
) -> Iterator[tuple[Portion, SourceCounts]]:
    """All that was written to a segment: batch by batch, or conversations as one portion."""
    values = data["tokens"].view(np.dtype(dtype).newbyteorder("<"))
    documents = Ragged.from_lengths(values, data["lengths"].view("<i8"))
    lines = data["batches"].tobytes().splitlines()
    batches = [msgspec.json.decode(line, type=_Batch) for line in lines]
    if "mask" not in data:
        yield from _by_batch(documents, batches)
        return
    examples = ChatExamples(
        ids=documents,
        mask=data["mask"].view(np.bool_),
        turn_starts=data["turns"].view("<i8"),
        turn_roles=data["roles"],
    )
    chat = ChatPart(examples=examples, splits=data["splits"])
    drops = tuple(drop for batch in batches for drop in _drops_of(batch))
    yield Portion(documents=documents, drops=drops, chat=chat), _account_of(batches)


def _by_batch(documents: Ragged, batches: list[_Batch]) -> Iterator[tuple[Portion, SourceCounts]]:
    first = 0
    for batch in batches:
        stop = first + batch.num_documents
        part, drops = documents.slice(first, stop), _drops_of(batch)
        yield Portion(documents=part, drops=drops, void=batch.void), _account_of([batch])
        first = stop


def _account_of(batches: list[_Batch]) -> SourceCounts:
    """Of batches that are one portion: one, or conversations, which have no rows."""
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(batch.counts)
    return SourceCounts(
        num_read=sum(batch.num_read for batch in batches),
        num_given=sum(batch.num_given for batch in batches),
        num_bytes=sum(batch.num_bytes for batch in batches),
        counts=counts,
        num_rows=sum(batch.num_rows for batch in batches),
        begins=any(batch.begins for batch in batches),
        grain=batches[0].grain if batches else 0,
    )


def _drops_of(batch: _Batch) -> tuple[Drop, ...]:
    return tuple(Drop(id=where, reason=reason, row=row) for where, reason, row in batch.drops)


def _bytes(array: IntArray | BoolArray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


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

    def add(self, portion: Portion, account: SourceCounts) -> None:
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


def load_segment(
    folder: Path, receipt: Receipt, dtype: str
) -> Iterator[tuple[Portion, SourceCounts]]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A receipt and what it is about."""

    receipt: Receipt
    parts: Mapping[str, bytearray] | None  # None: they lie in the journal already


Send = Callable[[Parcel], None]


class CarriedSegment(Segment):
    """A segment in memory, sent off when it is sealed."""

    def __init__(
        self, send: Send, key: UnitKey, *, after: Receipt | None, size: SegmentSize | None = None
    ) -> None:
        self._send = send
        self._buffers: dict[str, _HashedBuffer] = {}
        super().__init__(key, after=after, size=size)

    def _begin(self, part: str) -> _HashedBuffer:
        return self._buffers.setdefault(part, _HashedBuffer())

    def _keep(self, receipt: Receipt) -> None:
        parts = {part: buffer.data for part, buffer in self._buffers.items()}
        self._send(Parcel(receipt=receipt, parts=parts))


class _HashedBuffer:
    """A part that never sees a disk."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        self.data += data

    def finish(self) -> str:
        return self._sha256.hexdigest()

    def abort(self) -> None:
        """Nothing is held but memory."""


def keep_parcel(folder: Path, parcel: Parcel) -> Receipt:
    """Put a carried segment into the folder of its unit, durable, its receipt last."""
    receipt = parcel.receipt
    if parcel.parts is None:
        return receipt
    for part, data in parcel.parts.items():
        file = open_part(folder, receipt.number, part)
        try:
            file.write(memoryview(data))
            found = file.finish()
        finally:
            file.abort()
        if found != receipt.sha256[part]:
            raise BuildError(
                f"{folder / part}: segment {receipt.number} did not arrive as it was sent; it does "
                "not count: look at the network and the memory of the machines, and go on with "
                "resume=True"
            )
    write_receipt(folder, receipt)
    return receipt
