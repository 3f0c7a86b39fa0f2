"""Shards of exactly `shard_bytes`, for layouts that prescribe it, cut from the files of units.

Every prescribed shard is one task, which copies ranges of these files. A file is removed when all
shards that need it are durable, so the disk holds little more than the store. Where shards are cut
follows from the tokens alone. After a kill, shards that are there are hashed again.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from shardmill.building.scheduler import WorkerPool
from shardmill.building.segments import Segment
from shardmill.building.workplace import FolderOutput
from shardmill.errors import BuildError
from shardmill.records import Drop, OffsetArray
from shardmill.storage.atomic import cannot_write
from shardmill.store import AdoptedTurns, StoreWriter, WrittenShard
from shardmill.store.layout import shard_name

_READ_BYTES = 2**20


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
