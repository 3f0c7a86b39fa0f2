"""Turn receipts, in the order of the plan, into the store's indexes, ledger and list of drops.

No token passes through here. Every document and token is in exactly one bucket of the ledger. The
table of origins records where each chunk of input begins in each split.

Where a layout prescribes shards of exactly `shard_bytes`, each of them is one task, which copies
ranges of the files of units. Such a file is removed when all shards that need it are durable, so
the disk holds little more than the store. After a kill, shards that are there are hashed again.
"""

from __future__ import annotations

import hashlib
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from shardmill.building.plan import FeedChunks, mark_of
from shardmill.building.scheduler import WorkerPool
from shardmill.building.segments import ChunkLine, DropLine, Segment, SplitPart
from shardmill.building.splits import FillState, HashSplit
from shardmill.building.workplace import FolderOutput
from shardmill.errors import BuildError
from shardmill.records import Drop, OffsetArray
from shardmill.storage.atomic import cannot_write
from shardmill.store import AdoptedTurns, Origins, StoreWriter, WrittenShard
from shardmill.store.branches import num_records
from shardmill.store.layout import shard_name
from shardmill.store.manifest import ChatLedger, DocumentLedger, Ledger, TokenLedger
from shardmill.store.plans import COLUMNS

REPAIRED = ("front_matter", "invalid_utf8")
"""Counts of sources that are of documents that were changed."""
_READ_BYTES = 2**20


class LedgerCounter:
    """Sums what was read and made, and what of it was kept."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def add(
        self,
        *,
        read: int,
        documents: int,
        tokens: int,
        counts: Mapping[str, int],
        drops: Iterable[Drop],
    ) -> None:
        """What was read, encoded and left out."""
        self._made.update(read=read, documents=documents, tokens=tokens)
        self._counts.update(counts)
        self._dropped.update(drop.reason for drop in drops)

    def keep(self, **kept: int) -> None:
        """`documents`, `tokens`; of conversations `turns` and `trained_tokens`."""
        self._kept.update(kept)

    def ledger(self, *, separators: bool = False, chat: bool = False) -> Ledger:
        """Every row read and every token made, each in one bucket."""
        made, kept, counts = self._made, self._kept, self._counts
        num_separators = made["documents"] if separators else 0
        trained = ChatLedger(
            turns=kept["turns"],
            trained_tokens=kept["trained_tokens"],
            repeated_tokens=counts["repeated_tokens"],
        )
        return Ledger(
            documents=DocumentLedger(
                read=made["read"],
                kept=kept["documents"],
                empty=counts["empty"],
                filtered=counts["filtered"],
                over_budget=made["documents"] - kept["documents"],
                dropped=dict(sorted(self._dropped.items())),
            ),
            tokens=TokenLedger(
                encoded=made["tokens"] - num_separators,
                separators=num_separators,
                kept=kept["tokens"],
                over_budget=made["tokens"] - kept["tokens"],
            ),
            repaired={name: counts[name] for name in REPAIRED if counts[name]},
            chat=trained if chat else None,
        )


class UnitEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A unit in the record of a finished store, by which files are added to it later."""

    mark: str
    after: FillState
    lines: list[ChunkLine]
    splits: dict[str, SplitPart]


class OriginLog:
    """The table of origins while it grows."""

    def __init__(self, feeds: Sequence[FeedChunks], splits: Sequence[str]) -> None:
        self._feeds, self._splits = feeds, tuple(sorted(splits))
        self._rows = array("q")  # one after another
        self._next = [0] * len(feeds)  # of each feed, the next chunk without a row

    def note(self, feed: int, chunk: int, rows: int, documents: Mapping[str, int]) -> None:
        """A chunk that gave something comes next, after `rows` rows of its file and so many
        documents of each split."""
        before = [documents[split] for split in self._splits]
        for number in range(self._next[feed], chunk + 1):
            # A chunk that gave nothing begins where the next one does.
            known = rows if number == chunk else 0
            mark = mark_of(self._feeds[feed].chunks[number])
            self._rows.extend((feed, number, mark, known, *before))
        self._next[feed] = max(self._next[feed], chunk + 1)

    def finish(self, units: Sequence[bytes] | None, by_hash: HashSplit | None) -> Origins:
        table = np.array(self._rows, np.int64).reshape(-1, len(COLUMNS) + len(self._splits))
        fill = tuple(tuple(split for split, _ in feed.fill) for feed in self._feeds)
        return Origins(
            fill=fill,
            splits=self._splits,
            table=table,
            by_hash=None if by_hash is None else (by_hash.seed, by_hash.fractions),
            units=None if units is None else b"".join(units),
        )


class Finisher:
    """Takes the segments of all feeds in order."""

    def __init__(
        self,
        feeds: Sequence[FeedChunks],
        out: StoreWriter | JoinedUnits,
        origins: OriginLog | None,
    ) -> None:
        self.counter = LedgerCounter()
        self.units: list[bytes] = []  # of UnitEntry, as JSON
        self._feeds, self._out, self._origins = feeds, out, origins
        self._feed = -1
        self._rows = self._given = 0  # of the current file, and texts of the current feed
        self._documents: Counter[str] = Counter()  # kept, by split

    def add(self, segment: Segment, after: FillState) -> None:
        """The next unit; `after` is the state of the splits of its feed then."""
        if segment.feed != self._feed:
            self._feed, self._rows, self._given = segment.feed, 0, 0
        # Sums of a unit, not of each of its chunks: a Counter takes longer than the arrays.
        lines, counts = list(segment.lines), Counter[str]()
        if self._origins is not None:
            unit = UnitEntry(
                mark=segment.mark, after=after, lines=lines, splits=dict(segment.splits)
            )
            self.units.append(msgspec.json.encode(unit) + b"\n")
        drops = [drop for line in lines for drop in self._add_chunk(line, counts)]
        self.counter.add(
            read=sum(line.num_read for line in lines),
            documents=sum(line.num_documents for line in lines),
            tokens=sum(line.num_tokens for line in lines),
            counts=counts,
            drops=drops,
        )
        self._out.record_drops(drops)
        for split, entry in segment.splits.items():
            lengths, turns = segment.lengths[split], segment.turns.get(split)
            self._out.adopt(split, entry.shards, lengths, turns)
            links = None if turns is None else turns.links
            self.counter.keep(
                documents=entry.documents if links is None else num_records(links),
                tokens=entry.tokens,
                turns=entry.turns,
                trained_tokens=entry.trained_tokens,
            )

    def _add_chunk(self, line: ChunkLine, counts: Counter[str]) -> list[Drop]:
        """Its drops; its counts are added to `counts`."""
        if not line.continues:
            self._rows = 0
        if self._origins is not None:
            self._origins.note(self._feed, line.chunk, self._rows, self._documents)
        drops = [self._numbered(drop) for drop in line.drops]
        for name, count in line.counts.items():
            counts[name] += count
        self._rows += line.num_rows
        self._given += line.num_given
        for (split, _), count in zip(self._feeds[self._feed].fill, line.kept, strict=True):
            self._documents[split] += count
        return drops

    def _numbered(self, drop: DropLine) -> Drop:
        """With its number in its file, or among the texts of its source."""
        if drop.document is not None:
            return Drop(id=f"{drop.id}: document {self._given + drop.document}", reason=drop.reason)
        return Drop(id=drop.id, reason=drop.reason, row=drop.row).numbered(self._rows)


def exact_output(units: FolderOutput) -> FolderOutput:
    """Where the prescribed shards go. Once its store is there, files of units may be gone."""
    return replace(units, store=units.store.with_name("exact"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One prescribed shard. An `engines.Task`, whose note is the sha256."""

    name: str
    ranges: tuple[tuple[str, int, int], ...]  # of bytes: file of a unit, start, stop
    units: FolderOutput
    output: FolderOutput

    @property
    def num_bytes(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges)

    @property
    def is_done(self) -> bool:
        return self.output.has(self.name, self.num_bytes)

    def run(self, _tools: object, emit: Callable[[str], None]) -> None:
        if self.is_done:
            with (self.output.store / self.name).open("rb") as shard:
                emit(hashlib.file_digest(shard, "sha256").hexdigest())
            return
        file = self.output.create(self.name)
        try:
            for name, start, stop in self.ranges:
                for data in _read(self.units.store / name, start, stop):
                    file.write(data)
            sha256 = self.output.keep(file, self.name)
        finally:
            file.abort()
            file.path.unlink(missing_ok=True)
        emit(sha256)

    def after(self, _note: str) -> ShardTask:
        """It is one step; found again, its shard is only hashed."""
        return self


def _read(path: Path, start: int, stop: int) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < stop and (data := file.read(min(stop - start, _READ_BYTES))):
                start += len(data)
                yield data
    except OSError as error:
        raise BuildError(f"{path}: cannot be read: {error.strerror}; check the disk") from error
    if start < stop:
        raise BuildError(f"{path}: ends at byte {start:,}, wanted {stop:,}; start again")


class ExactShards:
    """All shards of a store, each but the last of a split of `shard_bytes`."""

    def __init__(self, units: FolderOutput, *, shard_bytes: int, itemsize: int) -> None:
        self.output = exact_output(units)
        self._units = units
        self._shard_bytes, self._itemsize = shard_bytes, itemsize
        self._shards: dict[str, list[WrittenShard]] = {}  # by split

    def cut(self, units: Iterable[tuple[str, Segment | None]], pool: WorkerPool) -> str | None:
        """Make the shards of all units, each with the name of its receipt; the name of one that is
        damaged or whose files are gone, if any."""
        files: dict[str, dict[str, int]] = {}  # by split, in order: bytes
        receipts: dict[str, str] = {}  # by file
        for name, segment in units:
            if segment is None:
                return name
            for split, part in segment.splits.items():
                for shard in part.shards:
                    files.setdefault(split, {})[shard.file] = shard.tokens * self._itemsize
                    receipts[shard.file] = name
        tasks = [task for split, sizes in files.items() for task in self._tasks(split, sizes)]
        for task in (task for task in tasks if not task.is_done):
            for file, _, _ in task.ranges:
                if not self._units.has(file, files[task.name.partition("/")[0]][file]):
                    return receipts[file]
        self.output.store.mkdir(exist_ok=True)
        self._run(tasks, pool)
        return None

    def _tasks(self, split: str, sizes: dict[str, int]) -> Iterator[ShardTask]:
        # Files of 5 and 4 bytes, shards of 3: [a 0..3] [a 3..5, b 0..1] [b 1..4]
        number, free = 0, self._shard_bytes
        ranges: list[tuple[str, int, int]] = []
        for file, size in sizes.items():
            start = 0
            while start < size:
                stop = min(size, start + free)
                ranges.append((file, start, stop))
                free -= stop - start
                start = stop
                if not free:
                    yield self._task(split, number, ranges)
                    number, free, ranges = number + 1, self._shard_bytes, []
        if ranges:
            yield self._task(split, number, ranges)

    def _task(self, split: str, number: int, ranges: list[tuple[str, int, int]]) -> ShardTask:
        return ShardTask(
            name=shard_name(split, number),
            ranges=tuple(ranges),
            units=self._units,
            output=self.output,
        )

    def _run(self, tasks: Sequence[ShardTask], pool: WorkerPool) -> None:
        waiting = Counter(file for task in tasks for file, _, _ in task.ranges)
        sha256: dict[int, str] = {}

        def done(number: int, found: str) -> None:
            if number in sha256:  # its worker died after the note
                return
            sha256[number] = found
            for file, _, _ in tasks[number].ranges:
                waiting[file] -= 1
                if not waiting[file]:
                    (self._units.store / file).unlink(missing_ok=True)

        engine = pool.copiers(sum(task.num_bytes for task in tasks))
        if engine is None:
            for number, task in enumerate(tasks):
                task.run(None, partial(done, number))
        else:
            reports = engine.run(None, iter(tasks))
            try:
                for report in reports:
                    if report.error is not None:
                        raise report.error
                    if report.note is not None:
                        done(report.task, report.note)
            finally:
                reports.close()
        self._shards = {}
        for number, task in enumerate(tasks):
            tokens = task.num_bytes // self._itemsize
            shard = WrittenShard(file=task.name, tokens=tokens, sha256=sha256[number])
            self._shards.setdefault(task.name.partition("/")[0], []).append(shard)

    def discard(self) -> None:
        """Forget all shards: a unit that is in one of them turned out to be another one."""
        shutil.rmtree(self.output.store)

    def adopter(self, out: StoreWriter) -> JoinedUnits:
        """Lists these shards in a store, in place of those of units."""
        return JoinedUnits(out, self._shards, self._units.store.parent)


class JoinedUnits:
    """What a `Finisher` fills: the lengths of all documents of a split wait in a file, to be
    adopted at once with the shards of the split."""

    def __init__(
        self, out: StoreWriter, shards: Mapping[str, Sequence[WrittenShard]], folder: Path
    ) -> None:
        self._out, self._shards = out, shards
        self._lengths = {split: folder / f"{split}.lengths" for split in shards}
        for path in self._lengths.values():
            path.unlink(missing_ok=True)  # of an earlier try

    def record_drops(self, drops: Iterable[Drop]) -> None:
        self._out.record_drops(drops)

    def adopt(
        self,
        split: str,
        _shards: Sequence[WrittenShard],
        lengths: OffsetArray,
        chat: AdoptedTurns | None = None,
    ) -> None:
        assert chat is None, "only stores of documents have a prescribed layout"
        path = self._lengths[split]
        try:
            with path.open("ab") as file:
                file.write(lengths.astype("<i8", copy=False).tobytes())
        except OSError as error:
            raise cannot_write(path, error) from error

    def finish(self) -> set[str]:
        """The names of the shards."""
        for split, shards in self._shards.items():
            self._out.adopt(split, shards, np.memmap(self._lengths[split], "<i8", "r"))
        return {shard.file for shards in self._shards.values() for shard in shards}
