"""The journal of a build: tokenised documents in segments, each finished when its receipt exists.

A unit has a folder. A segment in it is `NNNNNN.tokens` (raw, the store's dtype), `NNNNNN.lengths`
(raw int64), `NNNNNN.batches` (JSON lines: counts and drops of each batch), for conversations also
`.mask`, `.turns`, `.roles` and `.splits`, and `NNNNNN.json`, the receipt. The receipt is written
last and atomically, with the sha256 of all other parts, the cursor of the source, and a seal over
itself. It counts only for the plan and input it was made from, after the receipts before it.
Segment borders are a matter of speed and never show in a store.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.errors import BuildError
from shardmill.records import BoolArray, ChatExamples, Cursor, Drop, IntArray, Ragged
from shardmill.storage.atomic import HashedFile, atomic_write, cannot_write, sync_folder

PARTS = ("tokens", "lengths", "batches")
"""Every segment has these parts; conversations add `mask`, `turns`, `roles` and `splits`."""
SEGMENT_TOKENS = 8 * 2**20
SEGMENT_SECONDS = 10.0
"""A segment is sealed at either limit, so a kill costs seconds even with a slow tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedBatch:
    """Documents or conversations in the dtype of the store, and the counts of their batch."""

    documents: Ragged
    drops: tuple[Drop, ...] = ()
    void: tuple[int, ...] = ()  # positions, among the texts of the batch, of those without a token
    examples: ChatExamples | None = None  # of conversations; its ids are `documents`
    splits: npt.NDArray[np.uint8] | None = None  # of conversations: number of the split of each
    num_read: int
    num_given: int = 0  # texts or conversations, including those without a token
    num_bytes: int = 0  # of text, about
    counts: Mapping[str, int] = field(default_factory=dict)
    num_rows: int = 0  # of a file that is read in parts; drops count rows from the first of these
    starts_file: bool = False  # rows are counted from 0 here, not on from the batch before
    cursor: Cursor = field(default_factory=dict)  # where the source resumes after this batch
    chunk: int = 0  # number in its unit


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
    starts_file: bool
    chunk: int


def _parts_of(batch: EncodedBatch, *, tokens: int) -> Iterator[tuple[str, bytes | memoryview]]:
    """(part, bytes) to append to a segment that has `tokens` already."""
    yield "tokens", _bytes(batch.documents.values)
    yield "lengths", _bytes(batch.documents.lengths.astype("<i8"))
    line = _Batch(
        num_read=batch.num_read,
        num_given=batch.num_given,
        num_bytes=batch.num_bytes,
        num_documents=len(batch.documents),
        drops=[(drop.id, drop.reason, drop.row) for drop in batch.drops],
        void=batch.void,
        counts=dict(batch.counts),
        num_rows=batch.num_rows,
        starts_file=batch.starts_file,
        chunk=batch.chunk,
    )
    yield "batches", msgspec.json.encode(line) + b"\n"
    if batch.examples is not None:
        assert batch.splits is not None
        yield "mask", _bytes(batch.examples.mask)
        yield "turns", _bytes((batch.examples.turn_starts + tokens).astype("<i8"))
        yield "roles", _bytes(batch.examples.turn_roles)
        yield "splits", _bytes(batch.splits)


def _bytes(array: IntArray | BoolArray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _batches_of(data: Mapping[str, npt.NDArray[np.uint8]], dtype: str) -> Iterator[EncodedBatch]:
    """What was written to a segment: batch by batch, because a ledger counts whole batches;
    conversations as one."""
    values = data["tokens"].view(np.dtype(dtype).newbyteorder("<"))
    documents = Ragged.from_lengths(values, data["lengths"].view("<i8"))
    lines = data["batches"].tobytes().splitlines()
    batches = [msgspec.json.decode(line, type=_Batch) for line in lines]
    if "mask" not in data:
        first = 0
        for batch in batches:
            stop = first + batch.num_documents
            yield _decoded([batch], documents.slice(first, stop), void=batch.void)
            first = stop
        return
    examples = ChatExamples(
        ids=documents,
        mask=data["mask"].view(np.bool_),
        turn_starts=data["turns"].view("<i8"),
        turn_roles=data["roles"],
    )
    yield _decoded(batches, documents, examples=examples, splits=data["splits"])


def _decoded(batches: list[_Batch], documents: Ragged, **others: Any) -> EncodedBatch:
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(batch.counts)
    return EncodedBatch(
        documents=documents,
        drops=tuple(
            Drop(id=where, reason=reason, row=row)
            for batch in batches
            for where, reason, row in batch.drops
        ),
        num_read=sum(batch.num_read for batch in batches),
        num_given=sum(batch.num_given for batch in batches),
        num_bytes=sum(batch.num_bytes for batch in batches),
        counts=counts,
        num_rows=sum(batch.num_rows for batch in batches),
        starts_file=any(batch.starts_file for batch in batches),
        chunk=batches[0].chunk if batches else 0,
        **others,
    )


class DamagedSegmentError(BuildError):
    """A segment that does not match its receipt. Caught inside this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKey:
    """What the segments of a unit belong to."""

    feed: int
    start: int  # chunks of the feed, half-open
    stop: int
    plan: str  # sha256 of everything that determines the bytes
    inputs: str  # sha256 over names and times of the unit's files

    @property
    def folder(self) -> str:
        return f"{self.feed:03d}-{self.start:08d}"


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finished segment: what is in it and where its source resumes."""

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
    def default(cls) -> SegmentSize:
        return cls(num_tokens=SEGMENT_TOKENS, seconds=SEGMENT_SECONDS)


class _HashedBuffer:
    """A part in memory, with the methods of `HashedFile`."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        self.data += data

    def finish(self) -> str:
        return self._sha256.hexdigest()

    def abort(self) -> None:
        """Nothing to close."""


class SegmentWriter:
    """One open segment. It counts once it is sealed; unsealed files are overwritten later."""

    def __init__(
        self,
        folder: Path | None,
        key: UnitKey,
        *,
        after: Receipt | None,
        size: SegmentSize | None = None,
    ) -> None:
        """`folder` is that of the unit; None keeps the parts in memory, for `parts`. `after` is the
        receipt before this one, None at the start of a unit."""
        self._folder, self._key, self._size = folder, key, size or SegmentSize.default()
        self._number = 0 if after is None else after.number + 1
        self._previous = "" if after is None else after.seal
        self._num_documents = self._num_tokens = self._num_read = 0
        self._num_given = self._num_bytes = 0
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._files: dict[str, HashedFile | _HashedBuffer] = {}
        for part in PARTS:
            self._files[part] = self._open(part)
        self._since = time.monotonic()

    def _open(self, part: str) -> HashedFile | _HashedBuffer:
        if self._folder is None:
            return _HashedBuffer()
        return _open_part(self._folder, self._number, part)

    def add(self, batch: EncodedBatch) -> None:
        for part, data in _parts_of(batch, tokens=self._num_tokens):
            if part not in self._files:
                self._files[part] = self._open(part)
            self._files[part].write(data)
        self._dropped.update(drop.reason for drop in batch.drops)
        self._num_tokens += len(batch.documents.values)
        self._num_documents += len(batch.documents)
        self._num_read += batch.num_read
        self._num_given += batch.num_given
        self._num_bytes += batch.num_bytes
        self._counts.update(batch.counts)

    @property
    def is_due(self) -> bool:
        """Whether it is large or old enough to be sealed."""
        old = time.monotonic() - self._since > self._size.seconds
        return self._num_tokens >= self._size.num_tokens or (old and self._num_read > 0)

    def seal(self, cursor: Cursor, *, last: bool) -> Receipt:
        receipt = Receipt(
            **asdict(self._key),
            number=self._number,
            previous=self._previous,
            num_read=self._num_read,
            num_given=self._num_given,
            num_documents=self._num_documents,
            num_tokens=self._num_tokens,
            num_bytes=self._num_bytes,
            counts=dict(self._counts),
            dropped=dict(self._dropped),
            cursor=cursor,
            last=last,
            sha256={part: file.finish() for part, file in self._files.items()},
        )
        if self._folder is not None:
            _write_receipt(self._folder, receipt)
        return receipt

    def parts(self) -> dict[str, bytearray]:
        """All bytes of a segment in memory."""
        files = self._files.items()
        return {part: file.data for part, file in files if isinstance(file, _HashedBuffer)}

    def abandon(self) -> None:
        """Close the files of an unsealed segment; harmless after `seal`."""
        for file in self._files.values():
            file.abort()


def _open_part(folder: Path, number: int, part: str) -> HashedFile:
    path = _path(folder, number, part)
    try:
        return HashedFile(path, replace=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def _write_receipt(folder: Path, receipt: Receipt) -> None:
    """Make a segment count whose parts are finished in this folder."""
    path = _path(folder, receipt.number, "json")
    try:
        sync_folder(folder)
        with atomic_write(path) as file:
            file.write(receipt.seal.encode() + b"\n" + msgspec.json.encode(receipt))
    except OSError as error:
        raise cannot_write(path, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedSegment:
    """A segment on its way from a worker that does not see the journal."""

    receipt: Receipt
    parts: Mapping[str, bytearray] | None  # None: the journal has them already


def keep_segment(folder: Path, segment: CarriedSegment) -> Receipt:
    """Write a carried segment to the folder of its unit, its receipt last."""
    receipt = segment.receipt
    if segment.parts is None:
        return receipt
    for part, data in segment.parts.items():
        file = _open_part(folder, receipt.number, part)
        try:
            file.write(memoryview(data))
            found = file.finish()
        finally:
            file.abort()
        if found != receipt.sha256[part]:
            raise BuildError(
                f"{folder / part}: segment {receipt.number} did not arrive as it was sent, so it "
                "does not count: check the network and the memory of the machines, and continue "
                "with {resume}",
                resume=True,
            )
    _write_receipt(folder, receipt)
    return receipt


def read_receipts(folder: Path, key: UnitKey | None = None) -> list[Receipt]:
    """The receipts of a unit in order, up to the first that is missing, damaged, out of sequence,
    or not of the unit `key` (None: the unit of the first).

    Everything after that is removed, so that no leftover is ever taken for finished work.
    """
    receipts: list[Receipt] = []
    while (path := _path(folder, len(receipts), "json")).exists():
        sha256, _, data = path.read_bytes().partition(b"\n")
        if hashlib.sha256(data).hexdigest().encode() != sha256:
            break
        try:
            receipt = msgspec.json.decode(data, type=Receipt)
        except (msgspec.MsgspecError, UnicodeDecodeError):
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
    """Remove every file of a unit that is not part of these segments."""
    known = {
        _path(folder, receipt.number, part).name
        for receipt in receipts
        for part in (*receipt.sha256, "json")
    }
    for path in folder.iterdir():
        if path.name not in known:
            path.unlink()


def load_segment(folder: Path, receipt: Receipt, dtype: str) -> Iterator[EncodedBatch]:
    """A segment from disk, checked against its receipt's hashes before the first batch."""
    data: dict[str, Any] = {}
    for part, sha256 in receipt.sha256.items():
        path = _path(folder, receipt.number, part)
        try:
            data[part] = np.fromfile(path, np.uint8)
        except OSError as error:
            raise DamagedSegmentError(f"{path}: cannot be read: {error.strerror}") from error
        if hashlib.sha256(data[part].data).hexdigest() != sha256:
            raise DamagedSegmentError(f"{path}: changed after it was written")
    return _batches_of(data, dtype)


def _path(folder: Path, number: int, part: str) -> Path:
    return folder / f"{number:06d}.{part}"
