"""Who works on what, in what order, and how far a build is.

Every unit reaches the store in the order of the plan: from the journal, from a worker, or made in
this process, the coordinator. A segment is read only if its hashes are right; a damaged one is made
again. An error appears as it would in one process: the first in the order of the plan. Nothing here
changes the bytes of a store. What cannot travel to another process is done in the coordinator, or
refused when the user asked for workers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from pickle import PicklingError
from typing import TypeAlias

from shardmill.building.assembly import Assembly
from shardmill.building.engines import Engine, LocalEngine, Task, TaskReport, pack
from shardmill.building.journal import (
    DamagedSegmentError,
    EncodedBatch,
    Receipt,
    Segment,
    UnitKey,
    keep_receipts,
    keep_segment,
    load_segment,
)
from shardmill.building.plan import FeedChunks, Unit, WorkPlan, read_chunks
from shardmill.building.resources import Resources, cores_of, out_of_memory, worker_environ
from shardmill.building.worker import EncoderChoice, UnitEncoder, UnitTask, WorkerTools
from shardmill.errors import BuildError, EngineMismatchError, OptionError
from shardmill.machine import num_cores, usage_of_this_process
from shardmill.protocols import Closing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """Brings every unit of a plan into the store, in order."""

    plan: WorkPlan
    pool: WorkerPool
    encoder: UnitEncoder
    assembly: Assembly
    progress: Sequence[FeedProgress]  # of each feed
    journal: Path

    def run(self) -> None:
        for receipts in self.plan.done.values():
            for receipt in receipts:
                self.progress[receipt.feed].count(receipt.key, receipt)
        for units in _groups(self.plan.units):
            tasks = [
                self._task(unit)
                for unit in units
                if unit.is_portable and not self.plan.is_finished(unit) and unit.max_tokens != 0
            ]
            with self.pool.run(tasks, self._count_receipt) as run:
                for unit in units:
                    self._finish_unit(unit, run)

    def _task(self, unit: Unit) -> UnitTask:
        return UnitTask(unit=unit, folder=self.journal / unit.key.folder, encoder=self.encoder)

    def _count_receipt(self, receipt: Receipt) -> None:
        """Of a worker, which first repeats those of earlier runs."""
        if receipt.number >= len(self.plan.done.get(receipt.key.folder, ())):
            self.progress[receipt.feed].count(receipt.key, receipt)
            self.progress[receipt.feed].show()

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
                for batch in load_segment(folder, receipt, self.encoder.rules.dtype):
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
        feed, progress = unit.key.feed, self.progress[unit.key.feed]

        def add(batch: EncodedBatch) -> bool:
            self.assembly.add(feed, batch, start=unit.key.start)
            progress.count(unit.key, batch)
            progress.show()
            return self.assembly.is_full(feed)

        def sealed(segment: Segment) -> None:
            progress.finish_unit(segment.receipt)
            progress.show()

        try:
            task = replace(self._task(unit), done=tuple(done))
            task.run(self.pool.choice, sealed, add=add, given=self.assembly.given(feed))
        except MemoryError as error:
            raise out_of_memory(unit.name) from error


def _groups(units: Sequence[Sequence[Unit]]) -> Iterator[list[Unit]]:
    """Units that may be at work together. A feed that can become full, or that only this process
    can read, is a group by itself."""
    group: list[Unit] = []
    for mine in units:
        if all(unit.max_tokens is None and unit.is_portable for unit in mine):
            group += mine
        else:
            yield group
            yield list(mine)
            group = []
    yield group


class UnitFailedError(Exception):
    """A task raised. Caught inside this package."""


class UnitRun(Closing):
    """Some units at work in an engine, and the receipts of each as they come.

    Tasks are handed out in order, and no more of a feed than it can need. Receipts of a unit come
    in order and once, also when its worker died in between. A mismatch of the tokenizer engine is
    raised as soon as it is known. Without tasks it has no unit.
    """

    def __init__(
        self,
        tasks: Sequence[UnitTask] = (),
        *,
        engine: Engine | None = None,
        tools: WorkerTools | None = None,
        on_receipt: Callable[[Receipt], None] = lambda _: None,
    ) -> None:
        self._tasks, self._on_receipt = tasks, on_receipt
        self._receipts: dict[UnitKey, list[Receipt]] = {task.unit.key: [] for task in tasks}
        self._ends: dict[UnitKey, TaskReport] = {}  # the last report of a unit
        self._tokens: Counter[int] = Counter()  # sealed, by feed
        self._reports = engine.run(tools, self._needed_tasks()) if engine else None

    def has(self, unit: Unit) -> bool:
        return unit.key in self._receipts

    def receipts(self, unit: Unit) -> Iterator[Receipt]:
        """The receipts of a unit in order, waiting for them; ends when the unit has ended."""
        number, receipts = 0, self._receipts[unit.key]
        while True:
            if number < len(receipts):
                yield receipts[number]
                number += 1
            elif unit.key in self._ends:
                break
            else:
                self._wait()
        end = self._ends[unit.key]
        if end.lost:
            assert isinstance(end.error, BuildError), "engines say why a task is lost"
            raise end.error
        if isinstance(end.error, MemoryError):
            raise out_of_memory(unit.name)
        if end.error is not None:
            raise UnitFailedError(f"{type(end.error).__name__}: {end.error}")

    def wait_for(self, unit: Unit) -> None:
        """Wait until no worker works on a unit."""
        while unit.key not in self._ends:
            self._wait()

    def close(self) -> None:
        """Stop what is still at work."""
        if self._reports is not None:
            self._reports.close()

    def _needed_tasks(self) -> Iterator[Task]:
        """Tasks as the engine asks for them. All earlier ones were handed out before, so a feed
        whose sealed tokens reach its limit needs no more."""
        for task in self._tasks:
            limit = task.unit.max_tokens
            if limit is None or self._tokens[task.unit.key.feed] < limit:
                yield task

    def _wait(self) -> None:
        """Take the next report."""
        assert self._reports is not None
        report = next(self._reports, None)
        assert report is not None, "an engine reports the end of every task it took"
        if isinstance(report.error, EngineMismatchError):
            raise report.error
        task = self._tasks[report.task]
        if report.note is None:
            self._ends[task.unit.key] = report
            return
        assert task.folder is not None, "the coordinator sees the journal"
        receipt, known = keep_segment(task.folder, report.note), self._receipts[task.unit.key]
        if receipt.number == len(known):
            known.append(receipt)
            self._tokens[receipt.feed] += receipt.num_tokens
            self._on_receipt(receipt)
        elif known[receipt.number] != receipt:
            raise BuildError(
                f"segment {receipt.number} of unit {receipt.key.folder} was made twice with "
                "different results: continue with {resume}",
                resume=True,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCost:
    """What a build used."""

    num_workers: int  # processes that encoded at the same time; 1: only this one
    num_cores: int  # that this process may use
    cpu_seconds: float  # of this process and all workers
    peak_bytes: int  # resident memory of the largest process, since it began


class WorkerPool(Closing):
    """The workers of one build. None is started before it has something to do."""

    def __init__(self, choice: EncoderChoice, resources: Resources, *, keep_open: int) -> None:
        """`keep_open` is a file descriptor that workers hold open with this process."""
        self.choice, self.resources = choice, resources
        self._keep_open = keep_open
        self._engine: Engine | None = None
        self._cpu_before = usage_of_this_process().cpu_seconds

    def run(self, tasks: Sequence[UnitTask], on_receipt: Callable[[Receipt], None]) -> UnitRun:
        """Run tasks in workers; a run without units if the coordinator should do them itself.

        Unasked, a worker is started for every two units, because starting one takes a second. Ray
        is used even for one unit.
        """
        resources, on_ray = self.resources, self.resources.cluster is not None
        useful = len(tasks) if resources.is_asked or on_ray else len(tasks) // 2
        if min(resources.workers, useful) < (1 if on_ray else 2):
            return UnitRun()
        tools = self._tools(tasks[0])
        if not self._can_travel(tools, tasks):
            return UnitRun()
        return UnitRun(tasks, engine=self._open_engine(), tools=tools, on_receipt=on_receipt)

    def cost(self) -> BuildCost:
        """So far, including workers that have ended."""
        own = usage_of_this_process()
        cpu, peak, workers = own.cpu_seconds - self._cpu_before, own.peak_bytes, 1
        if self._engine is not None:
            usage, workers = self._engine.usage(), self._engine.slots
            cpu, peak = cpu + usage.cpu_seconds, max(peak, usage.peak_bytes)
        cluster = self.resources.cluster
        cores = cores_of(cluster)
        if cluster is not None and cluster.is_elsewhere:
            cores = max(cores, workers)  # machines that joined later are counted by their workers
        return BuildCost(num_workers=workers, num_cores=cores, cpu_seconds=cpu, peak_bytes=peak)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _tools(self, first: UnitTask) -> WorkerTools:
        """The encoder is chosen by the first texts of the first unit, as in one process."""
        with closing(read_chunks(first.unit.chunks, None)) as batches:
            found = next(batches, None)
        chosen = self.choice.encoder(found.texts if found is not None else [])
        return WorkerTools(
            tokenizer=self.choice.tokenizer,
            produced_by=chosen.produced_by,
            check=self.choice.check,
            # Ray counts every CPU that it gives away, and a worker gets one.
            has_spare_cores=self.resources.cluster is None and self.resources.workers < num_cores(),
        )

    def _can_travel(self, tools: WorkerTools, tasks: Sequence[UnitTask]) -> bool:
        """Tried on the tools and the first unit of each feed."""
        firsts = {task.unit.key.feed: task for task in reversed(tasks)}
        try:
            for what in (tools, *firsts.values()):
                pack(what)
        except PicklingError as error:
            resources = self.resources
            if resources.cluster is None and not resources.is_asked:
                log.info("one process builds this store: %s", error)
                return False
            asked = "{workers}" if resources.cluster is None else "{run_on}"
            raise OptionError(
                f"{asked}: {error}; build in one process on this machine, or define it in a module "
                "that a worker can import",
                workers=resources.workers,
                run_on="ray",
            ) from error
        return True

    def _open_engine(self) -> Engine:
        if self._engine is None:
            workers, cluster = self.resources.workers, self.resources.cluster
            memory = self.resources.limit_bytes if self.resources.is_limited else None
            if cluster is not None:
                from shardmill.building.ray import RayEngine

                # Ray gives a worker one CPU, so its libraries get one thread.
                environ = worker_environ(1)
                self._engine = RayEngine(cluster, workers, environ=environ, memory=memory)
            else:
                self._engine = LocalEngine(
                    workers,
                    environ=worker_environ(max(1, num_cores() // workers)),
                    keep_open=(self._keep_open,),
                    memory=memory,
                )
        return self._engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a build has come, for a progress bar."""

    source: str
    documents: int
    tokens: int
    share: float | None  # of this source that is done, about; None when unknown
    feed: int = 0  # its number: two feeds may have sources of the same name


OnProgress: TypeAlias = Callable[[Progress], None]


class FeedProgress:
    """Sums the work of all workers and earlier runs on one feed. Numbers never fall.

    The share that is done comes from its chunks, whose sizes are known, because text has another
    size in every format; for a source of one chunk it comes from the text, while that can be right.
    """

    def __init__(self, number: int, feed: FeedChunks, on_progress: OnProgress | None) -> None:
        self._number, self._feed, self._on_progress = number, feed, on_progress
        self._size = feed.source.size_hint()
        self._edges = [0, *accumulate(feed.sizes)]  # bytes before each chunk, and in all
        self._documents = self._tokens = self._num_bytes = 0
        self._reached: dict[int, int] = {}  # first chunk of a unit -> chunk

    def count(self, unit: UnitKey, made: EncodedBatch | Receipt) -> None:
        """A batch that this process made, or a segment of a worker or an earlier run."""
        self._documents += made.num_given
        self._tokens += made.num_tokens
        self._num_bytes += made.num_bytes
        number = made.cursor.get("grain")
        chunk = unit.start + number if isinstance(number, int) else unit.start
        self._reached[unit.start] = max(chunk, self._reached.get(unit.start, unit.start))
        if isinstance(made, Receipt):
            self.finish_unit(made)

    def finish_unit(self, receipt: Receipt) -> None:
        """The unit is done, if this is its last receipt."""
        if receipt.last:
            self._reached[receipt.start] = receipt.stop

    def show(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                Progress(
                    source=self._feed.source.name,
                    feed=self._number,
                    documents=self._documents,
                    tokens=self._tokens,
                    share=self._share(),
                )
            )

    def _share(self) -> float | None:
        """Of the wanted tokens or of the input, whichever ends the feed first."""
        limit, edges = self._feed.max_tokens, self._edges
        parts = [self._tokens / limit] if limit else []
        if len(edges) > 2 and edges[-1]:
            done = sum(edges[chunk] - edges[start] for start, chunk in self._reached.items())
            parts.append(done / edges[-1])
        elif self._size and self._num_bytes < self._size:
            parts.append(self._num_bytes / self._size)
        return min(1.0, max(parts)) if parts else None
