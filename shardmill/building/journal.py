"""Everything unfinished of a build, beside its store: lock, plan, journal, staged store.

`<parent>/.<name>.building/` holds it, so the store's own folder is either absent or whole. The lock
is the kernel's (flock): a dead process does not hold it. Workers hold it with the coordinator, so
no other build begins while one of them still writes.

The journal is its folder `segments`, with a folder for each unit. A segment is `NNNNNN.tokens`
(raw, the store's dtype), `NNNNNN.lengths` (raw int64), `NNNNNN.batches` (JSON lines: counts and
drops of each batch), for conversations also `.mask`, `.turns`, `.roles` and `.splits`, and
`NNNNNN.json`, the receipt. The receipt is written last and atomically, with the sha256 of all other
parts, the cursor of the source, and a seal over itself. It counts only for the plan and input it
was made from, after the receipts before it. Segment borders are a matter of speed and never show in
a store.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.arguments import refuse_url
from shardmill.errors import BuildError, BuildLockedError, OptionError, UnfinishedBuildError
from shardmill.records import JSON, BoolArray, ChatExamples, Cursor, Drop, IntArray, Ragged
from shardmill.storage.atomic import (
    HashedFile,
    LockedFile,
    atomic_write,
    cannot_write,
    is_temporary,
    sync_folder,
)
from shardmill.storage.files import describe_difference

log = logging.getLogger(__name__)

_DYING_SECONDS = 0.5  # workers hold the lock too, and die a moment after the coordinator
_FILES = ("lock", "plan.json", "produced_by.json", "dropped_engine.json")
_FOLDERS = ("segments", "store")


@dataclass(frozen=True, slots=True)
class Workplace:
    """An open, locked workplace."""

    folder: Path
    plan: dict[str, JSON]
    resumed: bool
    lock: int  # descriptor of the lock, which is held while any process has it open

    @property
    def segments(self) -> Path:
        return self.folder / "segments"

    def staging(self) -> Path:
        """An empty folder for the store itself."""
        path = self.folder / "store"
        if path.exists():
            shutil.rmtree(path)
        path.mkdir()
        return path

    def read_note(self, name: str) -> dict[str, JSON] | None:
        return _read_json(self.folder / f"{name}.json")

    def write_note(self, name: str, value: dict[str, JSON]) -> None:
        with atomic_write(self.folder / f"{name}.json") as file:
            file.write(json.dumps(value, indent=1, sort_keys=True).encode())

    def start_again(self, dropped_engine: dict[str, JSON]) -> None:
        """Discard all segments, since the engine that made them is not used any more."""
        shutil.rmtree(self.segments)  # first: a kill in between must not leave them
        self.segments.mkdir()
        (self.folder / "produced_by.json").unlink(missing_ok=True)
        self.write_note("dropped_engine", dropped_engine)


def target_of(folder: str | Path) -> Path:
    """Where a store will be, with every link followed."""
    refuse_url(
        folder,
        "the folder of the store",
        instead="to build to a URL use shardmill.build, or shardmill.remote.build_to around this",
    )
    try:
        return Path(folder).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise OptionError(
            f"{str(folder)!r:.300}: cannot be the folder of a store: {error}"
        ) from error


def workplace_of(store: Path) -> Path:
    return store.parent / f".{store.name}.building"


def has_unfinished_build(store: Path) -> bool:
    """True when an earlier build of this store did not finish; False while one is running."""
    folder = workplace_of(target_of(store))
    if not (folder / "plan.json").exists():
        return False
    try:
        lock = LockedFile(folder / "lock")
    except OSError:
        return True
    with closing(lock):
        return _take(lock)


@contextmanager
def open_workplace(
    store: Path, plan: dict[str, JSON], *, stamps: list[JSON], resume: bool
) -> Iterator[Workplace]:
    """Lock the workplace; keep what an earlier run left only with `resume` and an equal plan.

    `stamps` identify the input as it is on this machine. The workplace is removed when the block
    succeeds, or fails before a segment was sealed; else it is kept.
    """
    folder = workplace_of(store)
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", store) as lock:
        found = folder / "plan.json"
        resumed = resume and found.exists()
        asked: dict[str, JSON] = {"plan": plan, "stamps": stamps}
        if resumed:
            _check_plan(store, _read_json(found), asked)
        else:
            _clear(folder, announce=found.exists())
        work = Workplace(folder, plan, resumed=resumed, lock=lock)
        work.segments.mkdir(exist_ok=True)
        if not resumed:
            work.write_note("plan", asked)
        try:
            yield work
        except BaseException:
            if not any(work.segments.glob("*/*.json")):
                shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)


def remove_workplace(store: Path, plan: dict[str, JSON]) -> None:
    """Clean up after a build that was killed after its store was published.

    A workplace without a plan is one whose removal was killed: nothing in it can be resumed.
    """
    folder = workplace_of(store)
    if not folder.exists():
        return
    _refuse_foreign(folder)
    with _locked(folder / "lock", store):
        left = _read_json(folder / "plan.json")
        earlier = None if left is None else left.get("plan")
        if isinstance(earlier, dict):
            earlier.pop("continues", None)  # which store an append continues
        if left is None or earlier == _as_read(plan):
            shutil.rmtree(folder)


def _read_json(path: Path) -> dict[str, JSON] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BuildError(
            f"{path}: damaged ({error}), so this build cannot be resumed: start again with "
            "{overwrite}",
            overwrite=True,
        ) from error
    return cast(dict[str, JSON], value)


def _as_read(value: dict[str, JSON]) -> dict[str, JSON]:
    """As it comes back from disk: tuples are lists there."""
    return cast(dict[str, JSON], json.loads(json.dumps(value)))


def _check_plan(store: Path, earlier: JSON, asked: dict[str, JSON]) -> None:
    changes = describe_difference(earlier, _as_read(asked))
    if changes:
        shown = "\n  ".join(change.removeprefix("plan.") for change in changes[:8])
        raise UnfinishedBuildError(
            f"{store}: the unfinished build had other options or input, so it cannot be resumed "
            f"(before -> now):\n  {shown}\n"
            "Repeat the first command to resume it, or start again with {overwrite}.",
            overwrite=True,
        )


def _refuse_foreign(folder: Path) -> None:
    """Only what a build made is ever deleted."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise BuildError(f"{folder}: a link or file where a build needs a folder: move it away")
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        is_ours = path.is_dir() if path.name in _FOLDERS else path.is_file()
        is_named = path.name in (*_FOLDERS, *_FILES) or is_temporary(path.name)
        if not (is_ours and is_named) or path.is_symlink():
            raise BuildError(
                f"{path}: not made by a build, but this folder is for unfinished builds: move it "
                "away"
            )


def _clear(folder: Path, *, announce: bool) -> None:
    if announce:
        log.warning("%s: discarding the unfinished work of an earlier build", folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


@contextmanager
def _locked(path: Path, store: Path) -> Iterator[int]:
    """Hold `path` exclusively. Retries if its last holder removed it in between."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(LockedFile(path, create=True)) as lock:
            if not _take(lock):
                raise BuildLockedError(
                    f"{store}: another process is building this store (it holds {path}); wait for "
                    "it or build elsewhere"
                )
            if lock.is_at(path):
                yield lock.fileno()
                return


def _take(lock: LockedFile) -> bool:
    """Whether the lock could be taken, if need be after a dying holder."""
    deadline = time.monotonic() + _DYING_SECONDS
    while not lock.try_exclusive():
        if time.monotonic() > deadline:
            return False
        time.sleep(_DYING_SECONDS / 50)
    return True


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
    line = _BatchLine(
        num_read=batch.num_read,
        num_given=batch.num_given,
        num_bytes=batch.num_bytes,
        num_documents=batch.num_documents,
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
    batches = [msgspec.json.decode(line, type=_BatchLine) for line in lines]
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


def _decoded(batches: list[_BatchLine], documents: Ragged, **others: Any) -> EncodedBatch:
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
        counts=sum((Counter(batch.counts) for batch in batches), Counter()),
        num_rows=sum(batch.num_rows for batch in batches),
        starts_file=any(batch.starts_file for batch in batches),
        chunk=batches[0].chunk if batches else 0,
        **others,
    )


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
