"""The journal of a build: what its workers have made, as segments with receipts.

It is the folder `segments` of the workplace, with a folder for each unit. A segment is
`NNNNNN.tokens` (raw, the store's dtype), `NNNNNN.lengths` (raw int64), `NNNNNN.batches` (JSON
lines: counts and drops of each batch), for conversations also `.mask`, `.turns`, `.roles` and
`.splits`, and `NNNNNN.json`, the receipt. The receipt is written last and atomically, with the
sha256 of all other parts, the cursor of the source, and a seal over itself. It counts only for the
plan and input it was made from, after the receipts before it. Segment borders are a matter of speed
and never show in a store.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.errors import BuildError
from shardmill.records import BoolArray, ChatExamples, Cursor, Drop, IntArray, Ragged
from shardmill.storage.atomic import HashedFile, atomic_write, cannot_write, sync_folder

_TOTALS = ("num_read", "num_given", "num_documents", "num_tokens", "num_bytes")
"""What a receipt sums up of its batches, under these names."""
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

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @property
    def num_tokens(self) -> int:
        return len(self.documents.values)


class _BatchLine(msgspec.Struct, frozen=True, array_like=True):
    """One batch of a segment, as a line of its part "batches"; fields as in `EncodedBatch`."""

    num_read: int
    num_given: int
    num_bytes: int
    num_documents: int
    drops: tuple[Drop, ...]
    void: tuple[int, ...]
    counts: Mapping[str, int]
    num_rows: int
    starts_file: bool
    chunk: int


def _parts_of(batch: EncodedBatch, *, tokens: int) -> Iterator[tuple[str, bytes | memoryview]]:
    """(part, bytes) to append to a segment that has `tokens` already."""
    yield "tokens", _bytes(batch.documents.values)
    yield "lengths", _bytes(batch.documents.lengths.astype("<i8"))
    line = {name: getattr(batch, name) for name in _BatchLine.__struct_fields__}
    yield "batches", msgspec.json.encode(_BatchLine(**line)) + b"\n"
    if batch.examples is not None:
        assert batch.splits is not None
        yield "mask", _bytes(batch.examples.mask)
        yield "turns", _bytes((batch.examples.turn_starts + tokens).astype("<i8"))
        yield "roles", _bytes(batch.examples.turn_roles)
        yield "splits", _bytes(batch.splits)


def _bytes(array: IntArray | BoolArray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _batches_of(data: Mapping[str, npt.NDArray[np.uint8]], dtype: str) -> Iterator[EncodedBatch]:
    """What was written to a segment: batch by batch, because a ledger counts whole batches."""
    values = data["tokens"].view(np.dtype(dtype).newbyteorder("<"))
    documents = Ragged.from_lengths(values, data["lengths"].view("<i8"))
    first = 0
    for line in data["batches"].tobytes().splitlines():
        account = msgspec.structs.asdict(msgspec.json.decode(line, type=_BatchLine))
        stop = first + account.pop("num_documents")
        part = documents.slice(first, stop)
        if "mask" in data:
            begin, end = documents.offsets[[first, stop]]
            starts = data["turns"].view("<i8")
            low, high = np.searchsorted(starts, (begin, end))
            account["examples"] = ChatExamples(
                ids=part,
                mask=data["mask"].view(np.bool_)[begin:end],
                turn_starts=starts[low:high] - begin,
                turn_roles=data["roles"][low:high],
            )
            account["splits"] = data["splits"][first:stop]
        yield EncodedBatch(documents=part, **account)
        first = stop


class DamagedSegmentError(BuildError):
    """A segment that does not match its receipt. Caught inside this package."""


class UnitKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the segments of a unit belong to."""

    feed: int
    start: int  # chunks of the feed, half-open
    stop: int
    plan: str  # sha256 of everything that determines the bytes
    inputs: str  # sha256 over names and times of the unit's files

    @property
    def folder(self) -> str:
        return f"{self.feed:03d}-{self.start:08d}"


class Receipt(UnitKey, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finished segment: what is in it and where its source resumes."""

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
        return UnitKey(**{name: getattr(self, name) for name in UnitKey.__struct_fields__})

    @property
    def seal(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A finished segment."""

    receipt: Receipt
    parts: Mapping[str, bytes] | None = None  # None: the journal has them


class SegmentWriter:
    """Collects the batches of one segment. It counts once it is sealed."""

    def __init__(
        self, key: UnitKey, *, after: Receipt | None, num_tokens: int | None = None
    ) -> None:
        """`after` is the receipt before this one, None at the start of a unit. It is due with
        `num_tokens`; None: `SEGMENT_TOKENS`."""
        self._key, self._due_tokens = key, num_tokens or SEGMENT_TOKENS
        self._number = 0 if after is None else after.number + 1
        self._previous = "" if after is None else after.seal
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._parts: dict[str, list[bytes | memoryview]] = {part: [] for part in PARTS}
        self._since = time.monotonic()

    def add(self, batch: EncodedBatch) -> None:
        for part, data in _parts_of(batch, tokens=self._totals["num_tokens"]):
            self._parts.setdefault(part, []).append(data)
        self._dropped.update(drop.reason for drop in batch.drops)
        self._counts.update(batch.counts)
        for name in _TOTALS:
            self._totals[name] += getattr(batch, name)

    @property
    def is_due(self) -> bool:
        """Whether it is large or old enough to be sealed."""
        old = time.monotonic() - self._since > SEGMENT_SECONDS
        large = self._totals["num_tokens"] >= self._due_tokens
        return large or (old and self._totals["num_read"] > 0)

    def seal(self, folder: Path | None, cursor: Cursor, *, last: bool) -> Segment:
        """Write it to the folder of its unit, the receipt last; without a folder it has its
        parts."""
        parts: dict[str, bytes] | None = None
        if folder is None:
            parts = {part: b"".join(data) for part, data in self._parts.items()}
            sha256 = {part: hashlib.sha256(data).hexdigest() for part, data in parts.items()}
        else:
            sha256 = {
                part: _write_part(_path(folder, self._number, part), data)
                for part, data in self._parts.items()
            }
        known: dict[str, Any] = {**msgspec.structs.asdict(self._key), **self._totals}
        receipt = Receipt(
            **known,
            number=self._number,
            previous=self._previous,
            counts=dict(self._counts),
            dropped=dict(self._dropped),
            cursor=cursor,
            last=last,
            sha256=sha256,
        )
        if folder is not None:
            _write_receipt(folder, receipt)
        return Segment(receipt=receipt, parts=parts)


def keep_segment(folder: Path, segment: Segment) -> Receipt:
    """Write a segment that came without a folder to that of its unit."""
    receipt = segment.receipt
    if segment.parts is None:
        return receipt
    for part, data in segment.parts.items():
        path = _path(folder, receipt.number, part)
        if _write_part(path, [data]) != receipt.sha256[part]:
            raise BuildError(
                f"{path}: this segment did not arrive as it was sent, so it does not count: check "
                "the network and the memory of the machines, and continue with {resume}",
                resume=True,
            )
    _write_receipt(folder, receipt)
    return receipt


def _write_part(path: Path, data: Iterable[bytes | memoryview]) -> str:
    """A durable file, in place of what an unsealed segment left there; its sha256."""
    try:
        file = HashedFile(path, replace=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        for piece in data:
            file.write(piece)
        return file.finish()
    finally:
        file.abort()


def _write_receipt(folder: Path, receipt: Receipt) -> None:
    """Make a segment count whose parts are in this folder."""
    path = _path(folder, receipt.number, "json")
    try:
        sync_folder(folder)
        with atomic_write(path) as file:
            file.write(receipt.seal.encode() + b"\n" + msgspec.json.encode(receipt))
    except OSError as error:
        raise cannot_write(path, error) from error


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
