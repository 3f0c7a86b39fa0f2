"""Who does which unit, in which order, and how far a build is.

Every unit reaches the store in the order of the plan: from the journal, from a worker, or made
here. A segment is read only if its hashes are right; a damaged one is made again here. An error
appears as it would in one process: the first in the order of the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from shardmill.building.assembly import Assembly
from shardmill.building.pool import UnitFailedError, UnitRun, WorkerPool
from shardmill.building.resources import out_of_memory
from shardmill.building.segments import (
    DamagedSegmentError,
    EncodedBatch,
    Receipt,
    keep_receipts,
    load_segment,
)
from shardmill.building.spec import Progress
from shardmill.building.units import FeedChunks, Unit, WorkPlan
from shardmill.building.worker import UnitTask, write_unit
from shardmill.records import Cursor

log = logging.getLogger(__name__)

EncodeUnit = Callable[[Unit, "Cursor | None", int], Generator[EncodedBatch, None, None]]
"""(unit, cursor, number of texts of the feed before it) -> the batches after the cursor."""


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class _FeedProgress:
    source: str
    size: int | None  # bytes of input, about; None when unknown
    max_tokens: int | None
    edges: list[int]  # bytes before each chunk, and in all
    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    reached: dict[int, int] = field(default_factory=dict)  # first chunk of a unit -> chunk

    def share(self) -> float | None:
        """Of the wanted tokens or of the input, whichever ends the feed first."""
        parts = [self.tokens / self.max_tokens] if self.max_tokens else []
        if len(self.edges) > 2 and self.edges[-1]:
            done = sum(
                self.edges[chunk] - self.edges[start] for start, chunk in self.reached.items()
            )
            parts.append(done / self.edges[-1])
        elif self.size and self.num_bytes < self.size:
            parts.append(self.num_bytes / self.size)
        return min(1.0, max(parts)) if parts else None


class ProgressMeter:
    """Sums the work of all workers and earlier runs, and calls `on_progress`. Numbers never fall.

    The share of a source comes from its chunks, whose sizes are known, because text has another
    size in every format; for a source of one chunk it comes from the text, while that can be right.
    """

    def __init__(
        self,
        feeds: Sequence[FeedChunks],
        limits: Sequence[int | None],
        on_progress: OnProgress | None,
    ) -> None:
        """`limits` are the most tokens of each feed."""
        self._on_progress = on_progress
        self._feeds = [
            _FeedProgress(
                feed.source.name, feed.source.size_hint(), limit, [0, *accumulate(feed.sizes)]
            )
            for feed, limit in zip(feeds, limits, strict=True)
        ]

    def count_batch(self, unit: Unit, batch: EncodedBatch) -> None:
        """A batch that this process made."""
        feed = self._feeds[unit.key.feed]
        feed.documents += batch.num_given
        feed.tokens += len(batch.documents.values)
        feed.num_bytes += batch.num_bytes
        self._reach(unit.key.feed, unit.key.start, batch.cursor)
        self.show(unit.key.feed)

    def count_receipt(self, receipt: Receipt) -> None:
        """A segment that a worker or an earlier run made."""
        feed = self._feeds[receipt.feed]
        feed.documents += receipt.num_given
        feed.tokens += receipt.num_tokens
        feed.num_bytes += receipt.num_bytes
        self._reach(receipt.feed, receipt.start, receipt.cursor)
        self.finish_unit(receipt)

    def finish_unit(self, receipt: Receipt) -> None:
        """The unit is done, if this is its last receipt."""
        if receipt.last:
            self._feeds[receipt.feed].reached[receipt.start] = receipt.stop

    def show(self, feed: int) -> None:
        if self._on_progress is None:
            return
        found = self._feeds[feed]
        self._on_progress(
            Progress(
                source=found.source,
                feed=feed,
                documents=found.documents,
                tokens=found.tokens,
                share=found.share(),
            )
        )

    def _reach(self, feed: int, start: int, cursor: Cursor) -> None:
        """The unit that begins with chunk `start` has come to a cursor of its chunks."""
        number = cursor.get("grain")
        reached = self._feeds[feed].reached
        chunk = start + number if isinstance(number, int) else start
        reached[start] = max(chunk, reached.get(start, start))


MakeTask = Callable[[Unit, Path], UnitTask]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """Brings every unit of a plan into the store, in order."""

    plan: WorkPlan
    pool: WorkerPool
    assembly: Assembly
    meter: ProgressMeter
    journal: Path
    dtype: str
    encode: EncodeUnit  # makes the batches of a unit in this process

    def run(
        self, feeds: Sequence[FeedChunks], limits: Sequence[int | None], make_task: MakeTask
    ) -> None:
        """All units. `limits` are the most tokens of each feed; `make_task` gives the task of a
        unit for a worker."""
        for receipts in self.plan.done.values():
            for receipt in receipts:
                self.meter.count_receipt(receipt)
        # A feed that can become full, or that only this process can read, is a group of its own.
        alone = [
            limit is not None or not feed.is_portable
            for limit, feed in zip(limits, feeds, strict=True)
        ]
        for units in _groups(self.plan.units, alone):
            tasks = [
                make_task(unit, self.journal / unit.key.folder)
                for unit in units
                if unit.is_portable
                and not self.plan.is_finished(unit)
                and limits[unit.key.feed] != 0
            ]
            with self.pool.run(tasks, self._count_receipt) as run:
                for unit in units:
                    self._finish_unit(unit, run)

    def _count_receipt(self, receipt: Receipt) -> None:
        """Of a worker, which first repeats those of earlier runs."""
        if receipt.number >= len(self.plan.done.get(receipt.key.folder, ())):
            self.meter.count_receipt(receipt)
            self.meter.show(receipt.feed)

    def _finish_unit(self, unit: Unit, run: UnitRun) -> None:
        if self.assembly.is_full(unit.key.feed):
            return
        done = self._add_segments(unit, run)
        if not self.assembly.is_full(unit.key.feed) and not (done and done[-1].last):
            self._make_here(unit, done)

    def _add_segments(self, unit: Unit, run: UnitRun) -> list[Receipt]:
        """Add what is sealed, waiting for a worker; the receipts whose segments were added."""
        folder, feed = self.journal / unit.key.folder, unit.key.feed
        in_worker = run.has(unit)
        found = run.receipts(unit) if in_worker else iter(self.plan.done.get(folder.name, []))
        done: list[Receipt] = []
        try:
            for receipt in found:
                for batch in load_segment(folder, receipt, self.dtype):
                    self.assembly.add(feed, batch, start=receipt.start)
                    if self.assembly.is_full(feed):
                        return [*done, receipt]
                done.append(receipt)
        except UnitFailedError as failed:
            log.info("%s: failed in a worker, trying it here: %s", unit.name, failed)
        except DamagedSegmentError as damage:
            log.warning("%s; it is made again", damage)
            if in_worker:
                run.wait_for(unit)
            keep_receipts(folder, done)
        return done

    def _make_here(self, unit: Unit, done: Sequence[Receipt]) -> None:
        """Make the rest of a unit in this process: batches go to journal and store at once."""
        folder, feed = self.journal / unit.key.folder, unit.key.feed
        folder.mkdir(exist_ok=True)

        def add(batch: EncodedBatch) -> bool:
            self.assembly.add(feed, batch, start=unit.key.start)
            self.meter.count_batch(unit, batch)
            return self.assembly.is_full(feed)

        def sealed(receipt: Receipt, _parts: Mapping[str, bytearray]) -> None:
            self.meter.finish_unit(receipt)
            self.meter.show(feed)

        cursor = done[-1].cursor if done else None
        try:
            with closing(self.encode(unit, cursor, self.assembly.given(feed))) as batches:
                write_unit(unit, folder, batches, done, add=add, sealed=sealed)
        except MemoryError as error:
            raise out_of_memory(unit.name) from error


def _groups(units: Sequence[Sequence[Unit]], alone: Sequence[bool]) -> Iterator[list[Unit]]:
    """Units that may be at work together."""
    group: list[Unit] = []
    for mine, is_alone in zip(units, alone, strict=True):
        if is_alone:
            if group:
                yield group
            yield list(mine)
            group = []
        else:
            group += mine
    if group:
        yield group
