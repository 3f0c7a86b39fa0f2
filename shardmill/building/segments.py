"""What a worker makes of a unit: shards in the store, and a receipt with everything else.

The tokens of a unit are written once, to shards of their own. The receipt is one sealed file beside
the store, written last and atomically: counts and drops of each chunk, the names and hashes of the
shards, the lengths of documents, and of conversations mask bits, turns and roles. It counts only
for the plan and input that it was made from. `FORMAT.md` does not know it: it is gone when the
store is finished.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.building.plan import AnyBatch, Unit
from shardmill.building.splits import Fill, Filler, FillState
from shardmill.errors import DamagedStoreError, ManifestError
from shardmill.protocols import Closing, continues
from shardmill.records import BoolArray, ChatExamples, Drop, IntArray, OffsetArray, Ragged
from shardmill.storage.atomic import HashedFile
from shardmill.store import AdoptedTurns, WrittenShard
from shardmill.store.branches import links_of, num_records
from shardmill.store.layout import decode_sealed, encode_sealed, shard_name

NO_TOKENS = "no_tokens"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedBatch:
    """Documents or conversations of one batch, in the dtype of the store."""

    unit: int  # number in its feed
    chunk: int  # number in its feed
    read: AnyBatch
    num_given: int  # texts or conversations, including those without a token
    num_bytes: int  # of text, about
    documents: Ragged
    void: tuple[int, ...] = ()  # positions, among those given, of those without a token
    drops: tuple[Drop, ...] = ()
    examples: ChatExamples | None = None  # of conversations; its ids are `documents`
    splits: npt.NDArray[np.uint8] | None = None  # number of the split of each, when a hash decides
    links: OffsetArray | None = None  # of preferences, whose documents are prompts and answers


class DropLine(msgspec.Struct, frozen=True, array_like=True):
    """A row that gave no document."""

    id: str
    reason: str
    row: int | None = None  # as in `Drop`, from the first row of the chunk
    document: int | None = None  # of a text without a token: its number in the chunk


class ChunkLine(msgspec.Struct, array_like=True, kw_only=True):
    """What one chunk gave."""

    chunk: int  # number in its feed
    continues: bool  # its rows continue those of the chunk before it
    num_rows: int = 0
    num_read: int = 0
    num_given: int = 0
    num_documents: int = 0  # with a token
    num_tokens: int = 0
    kept: list[int] = msgspec.field(default_factory=list)  # documents, by split of the feed
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    drops: list[DropLine] = msgspec.field(default_factory=list)


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A unit is made: what from, and the sums of what it gave."""

    feed: int
    unit: int
    plan: str
    inputs: str
    mark: str  # of its chunks
    before: FillState  # of the splits of its feed
    after: FillState
    num_given: int
    num_tokens: int  # encoded; some may be over budget
    num_bytes: int
    cursor: dict[str, Any] | None  # as in `Unit`

    def is_of(self, unit: Unit) -> bool:
        return (self.feed, self.unit, self.plan, self.inputs) == (
            *unit.key,
            unit.plan,
            unit.inputs,
        )


class SplitPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a unit gave to one split."""

    documents: int
    tokens: int
    shards: list[WrittenShard]
    turns: int = 0  # of conversations
    trained_tokens: int = 0


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["shardmill-receipt"] = "shardmill-receipt"
    version: Literal[1] = 1
    receipt: Receipt
    parts: list[int]  # bytes of each part of the body: splits and lines as JSON, then arrays
    preference: bool = False  # whether there is one more array for each split, of branches


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Everything of a unit but its tokens."""

    feed: int
    mark: str
    receipt: Receipt | None = None  # None: the unit is in the store that is appended to
    lines: Sequence[ChunkLine]
    splits: Mapping[str, SplitPart]
    lengths: Mapping[str, OffsetArray]  # of documents, by split
    turns: Mapping[str, AdoptedTurns] = field(default_factory=dict)  # of conversations, by split


class Output(Protocol):
    """Where workers put what they make. It is pickled."""

    def create(self, name: str) -> HashedFile:
        """A new file for the store's file `name`."""

    def keep(self, file: HashedFile, name: str) -> str:
        """Give a file its name, durably; its sha256."""

    def write_receipt(self, name: str, data: bytes, shards: Collection[str]) -> None:
        """Of these files of the store, which are kept. Durable, and whole or not at all; over an
        earlier one."""

    def read_receipt(self, name: str) -> bytes | None:
        """None if there is none."""

    def has(self, name: str, num_bytes: int) -> bool:
        """Whether a file of the store is there with this size."""

    def holds(self, shard: WrittenShard, num_bytes: int) -> bool:
        """Whether a shard is there as it was written. May read all of it."""


_LINES = msgspec.json.Decoder(ChunkLine)
_SPLITS = msgspec.json.Decoder(dict[str, SplitPart])


def receipt_name(feed: int, unit: int) -> str:
    return f"{feed:03d}-{unit:08d}.receipt"


class _SplitWriter:
    """The shards of one unit in one split, and what its receipt says of them."""

    def __init__(self, split: str, unit: Unit, output: Output, shard_tokens: int) -> None:
        self._split, self._unit, self._output = split, unit, output
        self._shard_tokens = shard_tokens
        self._file: HashedFile | None = None
        self._in_file = 0
        self._shards: list[WrittenShard] = []
        self._tokens = self._trained = 0
        self._lengths: list[OffsetArray] = []
        self._mask: list[npt.NDArray[np.uint8]] = []
        self._bits: BoolArray = np.empty(0, np.bool_)  # up to 7 tokens that fill no byte yet
        self._turns: list[OffsetArray] = []
        self._roles: list[npt.NDArray[np.uint8]] = []
        self._links: list[OffsetArray] = []
        self._documents = self._records = 0

    def append(
        self,
        documents: Ragged,
        examples: ChatExamples | None = None,
        links: OffsetArray | None = None,
    ) -> None:
        if links is not None:
            moved = np.add(links, (self._documents, self._documents, self._records, 0))
            self._links.append(moved)
            self._records += num_records(links)
        self._documents += len(documents)
        self._lengths.append(documents.lengths)
        if examples is not None:
            bits = np.concatenate((self._bits, examples.mask))
            whole = len(bits) // 8 * 8
            self._mask.append(np.packbits(bits[:whole], bitorder="little"))
            self._bits = bits[whole:].copy()
            self._trained += int(np.count_nonzero(examples.mask))
            self._turns.append(examples.turn_starts + self._tokens)
            self._roles.append(examples.turn_roles)
        self._write(documents.values)

    def _write(self, values: IntArray) -> None:
        start = 0
        while start < len(values):
            if self._file is None:
                self._file, self._in_file = self._output.create(self._name()), 0
            part = values[start : start + self._shard_tokens - self._in_file]
            self._file.write(np.ascontiguousarray(part).view(np.uint8).data)
            start += len(part)
            self._in_file += len(part)
            self._tokens += len(part)
            if self._in_file == self._shard_tokens:
                self._close(self._file)

    def _name(self) -> str:
        unit = self._unit
        return shard_name(self._split, unit.number, part=len(self._shards), feed=unit.feed)

    def _close(self, file: HashedFile) -> None:
        name = self._name()
        sha256 = self._output.keep(file, name)
        self._shards.append(WrittenShard(file=name, tokens=self._in_file, sha256=sha256))
        self._file = None

    def finish(self) -> tuple[SplitPart, list[bytes]]:
        if self._file is not None:
            self._close(self._file)
        lengths = _joined(self._lengths, "<i8")
        parts, num_turns = [lengths.tobytes()], 0
        if self._roles:
            mask = _joined([*self._mask, np.packbits(self._bits, bitorder="little")], "u1")
            turns, roles = _joined(self._turns, "<i8"), _joined(self._roles, "u1")
            parts += [mask.tobytes(), turns.tobytes(), roles.tobytes()]
            num_turns = len(roles)
        if self._links:
            parts.append(_joined(self._links, "<i8").tobytes())
        entry = SplitPart(
            documents=len(lengths),
            tokens=self._tokens,
            shards=self._shards,
            turns=num_turns,
            trained_tokens=self._trained,
        )
        return entry, parts

    def abort(self) -> None:
        """Leave nothing of the shard that is not finished."""
        if self._file is not None:
            self._file.abort()
            self._file.path.unlink(missing_ok=True)


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: str) -> npt.NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


class SegmentWriter(Closing):
    """Writes the batches of one unit. It counts once it is sealed."""

    def __init__(
        self, unit: Unit, output: Output, *, fill: Fill, before: FillState, shard_tokens: int
    ) -> None:
        self._unit, self._output, self._before = unit, output, before
        self._filler = Filler(fill, before)
        self._names = [split for split, _ in fill]
        self._splits = [_SplitWriter(name, unit, output, shard_tokens) for name in self._names]
        self._has_links = False
        self._line: ChunkLine | None = None  # of the chunk at work
        self._lines: list[bytes] = []  # of those before it, as JSON: a chunk may drop many rows
        self._num_given = self._num_tokens = self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more of the feed would be kept."""
        return self._filler.is_full

    @property
    def after(self) -> FillState:
        """The state of the splits after the batches so far."""
        return self._filler.after

    def add(self, batch: EncodedBatch) -> None:
        line, read = self._line_of(batch.chunk), batch.read
        drops = [DropLine(drop.id, drop.reason, drop.row) for drop in batch.drops]
        drops += [
            DropLine(self._unit.source, NO_TOKENS, None, line.num_given + position)
            for position in batch.void
        ]
        line.drops += drops
        for name, count in read.counts.items():
            line.counts[name] = line.counts.get(name, 0) + count
        line.num_rows += read.num_rows
        line.num_read += read.num_read
        line.num_given += batch.num_given
        self._has_links |= batch.links is not None
        line.num_documents += (
            len(batch.documents) if batch.links is None else num_records(batch.links)
        )
        line.num_tokens += len(batch.documents.values)
        self._num_given += batch.num_given
        self._num_tokens += len(batch.documents.values)
        self._num_bytes += batch.num_bytes
        if batch.splits is not None:
            self._add_chosen(batch, batch.splits, line)
            return
        for placement in self._filler.place(batch.documents.lengths):
            if placement.split is not None:
                part = placement.take(batch.documents)
                self._splits[placement.split].append(part)
                line.kept[placement.split] += len(part)

    def _add_chosen(
        self, batch: EncodedBatch, splits: npt.NDArray[np.uint8], line: ChunkLine
    ) -> None:
        """Documents and conversations whose splits a hash has chosen."""
        for number, count in enumerate(np.bincount(splits, minlength=len(self._names)).tolist()):
            documents, examples, links = batch.documents, batch.examples, batch.links
            if not count:
                continue
            if count < len(splits):
                chosen = np.equal(splits, number)
                if links is not None:
                    links = links_of(links, chosen)
                if examples is not None:
                    examples = examples.keep(chosen)
                    documents = examples.ids
                else:
                    documents = documents.keep(chosen)
            self._splits[number].append(documents, examples, links)
            line.kept[number] += count if links is None else num_records(links)

    def _line_of(self, chunk: int) -> ChunkLine:
        if self._line is None or self._line.chunk != chunk:
            self._end_line()
            piece = self._unit.chunks[chunk - self._unit.first_chunk]
            kept = [0] * len(self._names)
            self._line = ChunkLine(chunk=chunk, continues=continues(piece), kept=kept)
        return self._line

    def _end_line(self) -> None:
        if self._line is not None:
            self._lines.append(msgspec.json.encode(self._line) + b"\n")

    def seal(self) -> Receipt:
        """Finish the shards, then write the receipt."""
        self._end_line()
        splits: dict[str, SplitPart] = {}
        parts: list[bytes] = []
        for name, writer in zip(self._names, self._splits, strict=True):
            entry, found = writer.finish()
            if entry.documents:
                splits[name] = entry
                parts += found
        unit = self._unit
        receipt = Receipt(
            feed=unit.feed,
            unit=unit.number,
            plan=unit.plan,
            inputs=unit.inputs,
            mark=unit.mark,
            before=self._before,
            after=self.after,
            num_given=self._num_given,
            num_tokens=self._num_tokens,
            num_bytes=self._num_bytes,
            cursor=unit.cursor,
        )
        parts = [msgspec.json.encode(splits), b"".join(self._lines), *parts]
        header = _Header(
            receipt=receipt, parts=[len(part) for part in parts], preference=self._has_links
        )
        data = encode_sealed(header, b"".join(parts))
        shards = [shard.file for shard in _shards_of(splits)]
        self._output.write_receipt(receipt_name(*unit.key), data, shards)
        return receipt

    def close(self) -> None:
        """Leave nothing of shards that are not finished."""
        for split in self._splits:
            split.abort()


def find_receipt(output: Output, feed: int, unit: int, *, itemsize: int | None) -> Receipt | None:
    """The receipt of a unit, if it is whole and its shards are there, as they were written;
    `itemsize`: of a token, None: the shards may be used up."""
    data = output.read_receipt(receipt_name(feed, unit))
    found = None if data is None else _decode(data)
    if found is None:
        return None
    shards = _shards_of(found[1])
    is_made = itemsize is None or all(output.holds(one, one.tokens * itemsize) for one in shards)
    return found[0].receipt if is_made else None


def read_segment(data: bytes, output: Output, *, itemsize: int | None) -> Segment | None:
    """Everything that a receipt seals; None as in `find_receipt`, but only sizes are looked at."""
    found = _decode(data)
    if found is None:
        return None
    header, splits, body = found
    if itemsize is not None and not all(
        output.has(shard.file, shard.tokens * itemsize) for shard in _shards_of(splits)
    ):
        return None
    parts = iter(np.split(np.frombuffer(body, np.uint8), np.cumsum(header.parts[1:])[:-1]))
    lines = _LINES.decode_lines(next(parts).tobytes())
    lengths: dict[str, OffsetArray] = {}
    turns: dict[str, AdoptedTurns] = {}
    for split, entry in splits.items():
        lengths[split] = next(parts).view("<i8")
        if entry.turns:
            turns[split] = AdoptedTurns(
                mask_bits=next(parts),
                turn_starts=next(parts).view("<i8"),
                turn_roles=next(parts),
                links=next(parts).view("<i8").reshape(-1, 4) if header.preference else None,
            )
    return Segment(
        feed=header.receipt.feed,
        mark=header.receipt.mark,
        receipt=header.receipt,
        lines=lines,
        splits=splits,
        lengths=lengths,
        turns=turns,
    )


def _shards_of(splits: Mapping[str, SplitPart]) -> list[WrittenShard]:
    return [shard for entry in splits.values() for shard in entry.shards]


def _decode(data: bytes) -> tuple[_Header, dict[str, SplitPart], memoryview] | None:
    """Header, splits and the rest of the body; None if it is damaged or of another version."""
    try:
        header, body, _ = decode_sealed(
            memoryview(data),
            _Header,
            "shardmill-receipt",
            where="a receipt",
            what="a receipt",
            advice="the unit is made again",
        )
        splits = _SPLITS.decode(body[: header.parts[0]])
    except (ManifestError, DamagedStoreError, msgspec.MsgspecError):
        return None
    return header, splits, body[header.parts[0] :]
