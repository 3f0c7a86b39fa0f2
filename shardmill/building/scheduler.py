"""Who works on what, in what order, and how far a build is.

Units are handed out in order, several to a task. The split of a document may depend on those before
it (budgets of tokens), so a unit is made for a state of its splits: known when everything before it
is settled, else guessed. Receipts are settled in the order of the plan; a unit that was made for
another state is made again. An error appears as it would in one process: the first in the order of
the plan. Nothing here changes the bytes of a store. What cannot travel to another process is done
in this one, the coordinator, or refused when the user asked for workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pickle import PicklingError
from typing import TypeAlias

from shardmill.building.engines.engine import Engine, TaskReport, pack
from shardmill.building.engines.local import LocalEngine
from shardmill.building.plan import FeedChunks, Unit
from shardmill.building.resources import Resources, cores_of, out_of_memory, worker_environ
from shardmill.building.segments import EncodedBatch, Output, Receipt
from shardmill.building.splits import FillState, open_state, state_after
from shardmill.building.worker import (
    EncoderChoice,
    UnitEncoder,
    UnitTask,
    WorkerTools,
)
from shardmill.building.workplace import NotSharedError
from shardmill.errors import EngineMismatchError, OptionError
from shardmill.machine import num_cores, usage_of_this_process
from shardmill.protocols import Closing
from shardmill.records import JSON

log = logging.getLogger(__name__)

_TOKENS_PER_BYTE = 0.25
"""Of input, until some of it is encoded."""
_HELD_PER_WORKER = 2
"""Units that were read here: at work, or made before one ahead of them."""
_TASKS_LEFT = 2
"""For each worker in what is left: tasks get smaller, so that all workers end at the same time."""


class FeedWork(Closing):
    """The units of one feed: which are made, at work, settled."""

    def __init__(self, feed: FeedChunks) -> None:
        self.feed = feed
        self.num_bytes = sum(feed.sizes) if feed.is_cut else 0
        self.states: list[FillState] = [open_state(feed.fill)]  # before and after settled units
        self._units: dict[int, Unit] = {}  # read, not settled
        self._source: Iterator[Unit] = iter(())
        self._num_read = 0
        self._starts: dict[int, int] = {}  # input bytes before each unit, of those not settled
        self._bytes_read = 0
        self._made: dict[int, Receipt] = {}  # not settled
        self._at_work: set[int] = set()
        self._next = 0  # every unit before it is made, at work or settled
        self._num_bytes = self._num_tokens = 0  # of input, and what it gave, to guess by

    @property
    def num_settled(self) -> int:
        return len(self.states) - 1

    @property
    def state(self) -> FillState:
        return self.states[-1]

    @property
    def is_full(self) -> bool:
        return self.state[0] == len(self.feed.fill)

    @property
    def is_done(self) -> bool:
        return self.is_full or self.unit(self.num_settled) is None

    @property
    def bytes_left(self) -> int:
        """Of input that no task has, about."""
        return self.num_bytes - self._starts.get(self._next, self._bytes_read)

    def accept(self, after: FillState) -> None:
        """The next unit is settled."""
        self._units.pop(self.num_settled, None)
        self._starts.pop(self.num_settled, None)
        self.states.append(after)

    def begin(self, units: Iterator[Unit]) -> None:
        """Take the units after those that are settled; they may be read as they are asked for."""
        self._source, self._num_read = units, self.num_settled

    def close(self) -> None:
        """Stop reading ahead."""
        if isinstance(self._source, Generator):
            self._source.close()

    def unit(self, number: int) -> Unit | None:
        """A unit that is not settled; None: there is none of this number."""
        while self._num_read <= number and (unit := next(self._source, None)) is not None:
            self._units[unit.number] = unit
            self._num_read += 1
            self._starts[unit.number] = self._bytes_read
            self._bytes_read += unit.num_bytes
        return self._units.get(number)

    def take(self, most_bytes: int, most_held: int) -> tuple[tuple[Unit, ...], FillState] | None:
        """The next units to make, of about `most_bytes`, and the state before them; None: there is
        none, or it must wait. A unit of a source that cannot be cut holds its text until it is
        settled, so no more are read while there are `most_held`."""
        first = max(self._next, self.num_settled)
        while not self._is_open(first) and first < self._num_read:
            first += 1
        self._next = first
        must_read = first >= self._num_read and not self.feed.is_cut
        if (
            self.is_full
            or (must_read and len(self._units) >= most_held)
            or self.unit(first) is None
            or (before := self._state_before(first)) is None
        ):
            return None
        units = [self._units[first]]
        num_bytes = units[0].num_bytes
        while self.feed.is_cut and (unit := self.unit(first + len(units))) is not None:
            num_bytes += unit.num_bytes
            if num_bytes > most_bytes or not unit.num_bytes or not self._is_open(unit.number):
                break
            units.append(unit)
        self._at_work.update(unit.number for unit in units)
        self._next = first + len(units)
        return tuple(units), before

    def _is_open(self, number: int) -> bool:
        return number not in self._made and number not in self._at_work

    def receive(self, receipt: Receipt) -> None:
        """A unit is made. Receipts are settled in order; the first that was made for another state
        is forgotten, so that its unit is made again."""
        self._at_work.discard(receipt.unit)
        self._made[receipt.unit] = receipt
        if (unit := self._units.get(receipt.unit)) is not None:
            self._num_bytes += unit.num_bytes
            self._num_tokens += receipt.num_tokens
        while not self.is_full and (found := self._made.pop(self.num_settled, None)) is not None:
            after = state_after(self.feed.fill, self.state, found)
            if after is None:
                self._next = self.num_settled
                return
            self.accept(after)

    def give_back(self, units: Sequence[Unit]) -> Unit | None:
        """Their task has ended; the first of them that it did not make."""
        left = [unit for unit in units if unit.number in self._at_work]
        self._at_work.difference_update(unit.number for unit in left)
        if left:
            self._next = min(self._next, left[0].number)
        return left[0] if left else None

    def _state_before(self, number: int) -> FillState | None:
        """The state before a unit, or a guess; None: wait until more is known."""
        fill, (split, tokens) = self.feed.fill, self.state
        if number == self.num_settled or fill[split][1] is None:
            return self.state
        if not self._units[number].num_bytes:
            return None
        # Not a sum over units: a slow worker may have thousands of them ahead of it.
        ahead = self._starts[number] - self._starts[self.num_settled]
        density = self._num_tokens / self._num_bytes if self._num_bytes else _TOKENS_PER_BYTE
        guess = int(ahead * density) + (tokens or 0)
        for position in range(split, len(fill)):
            limit = fill[position][1]
            if limit is None:
                return position, 0
            if guess < limit:
                return position, None
            guess -= limit
        return None


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Makes every unit of a build that is needed."""

    works: Sequence[FeedWork]
    pool: WorkerPool
    encoder: UnitEncoder
    output: Output
    shard_tokens: int
    progress: Sequence[FeedProgress]  # of each feed
    _failed: dict[tuple[int, int], BaseException] = field(default_factory=dict)
    _produced_by: Mapping[str, JSON] | None = None  # the engine of workers

    def run(self) -> None:
        while not all(work.is_done for work in self.works):
            if self._failed:
                self._make_failed()
            else:
                first = self._next_task()
                assert first is not None, "the first unit that is not settled can be made"
                self._run_from(first)

    def _run_from(self, first: UnitTask) -> None:
        """Run tasks, in workers or here, until none is left for now."""
        started = self.pool.start(first, self.works)
        if started is None:
            task: UnitTask | None = first
            while task is not None:
                self._make_here(task)
                task = self._next_task()
            return
        engine, tools, self._produced_by = started
        tasks = _Tasks(replace(first, produced_by=self._produced_by), self._next_task)
        reports = engine.run(tools, tasks)
        try:
            for report in reports:
                self._take(tasks, report)
        finally:
            reports.close()

    def _next_task(self) -> UnitTask | None:
        """The next task in the order of the plan; after a failure none."""
        for work in self.works:
            most_held = _HELD_PER_WORKER * self.pool.resources.workers
            found = None if self._failed else work.take(self._task_bytes(work), most_held)
            if found is not None:
                units, before = found
                return UnitTask(
                    feed=units[0].feed,
                    units=units,
                    fill=work.feed.fill,
                    before=before,
                    is_guess=units[0].number != work.num_settled,
                    encoder=self.encoder,
                    output=self.output,
                    shard_tokens=self.shard_tokens,
                    produced_by=self._produced_by,
                )
        return None

    def _task_bytes(self, work: FeedWork) -> int:
        resources = self.pool.resources
        share = work.bytes_left // (_TASKS_LEFT * resources.workers)
        return max(1, min(resources.unit_bytes, share))

    def _take(self, tasks: _Tasks, report: TaskReport) -> None:
        """Of a worker."""
        if isinstance(report.error, EngineMismatchError | NotSharedError):
            raise report.error
        task = tasks.given.pop(report.task)
        if report.note is not None:
            tasks.given[report.task] = task.after(report.note)
            self._receive(report.note)
            return
        left = self.works[task.feed].give_back(task.units)
        if report.lost:
            assert report.error is not None, "engines say why a task is lost"
            raise report.error
        if report.error is not None:
            if isinstance(report.error, MemoryError):
                raise out_of_memory(task.name)
            self._failed[left.key if left else (task.feed, 0)] = report.error

    def _receive(self, receipt: Receipt, *, by_batches: bool = False) -> None:
        work, progress = self.works[receipt.feed], self.progress[receipt.feed]
        if (unit := work.unit(receipt.unit)) is not None:  # else it is settled
            progress.count_unit(receipt, unit.num_bytes, by_batches=by_batches)
        work.receive(receipt)

    def _make_failed(self) -> None:
        """Try what failed in a worker here: the first error in the order of the plan is raised."""
        _, error = min(self._failed.items(), key=itemgetter(0))
        self._failed.clear()
        log.info("failed in a worker, trying it here: %s: %s", type(error).__name__, error)
        task = self._next_task()
        assert task is not None, "what failed is not made"
        self._make_here(task)

    def _make_here(self, task: UnitTask) -> None:
        receive = partial(self._receive, by_batches=True)
        try:
            task.run(self.pool.choice, receive, self.progress[task.feed].count_batch)
        except MemoryError as error:
            raise out_of_memory(task.name) from error
        self.works[task.feed].give_back(task.units)


class _Tasks:
    """Tasks as an engine asks for them. It may ask again after there was none."""

    def __init__(self, first: UnitTask, more: Callable[[], UnitTask | None]) -> None:
        self.given: dict[int, UnitTask] = {}  # by number: what is left of those at work
        self._num_given = 0
        self._first: UnitTask | None = first
        self._more = more

    def __iter__(self) -> Iterator[UnitTask]:
        return self

    def __next__(self) -> UnitTask:
        task, self._first = self._first or self._more(), None
        if task is None:
            raise StopIteration
        self.given[self._num_given] = task
        self._num_given += 1
        return task


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

    def start(
        self, first: UnitTask, works: Sequence[FeedWork]
    ) -> tuple[Engine, WorkerTools, Mapping[str, JSON]] | None:
        """Workers for a task and those after it, their tools and the engine that encodes; None if
        the coordinator should do them itself."""
        tools = WorkerTools(
            tokenizer=self.choice.tokenizer,
            check=self.choice.check,
            may_be_fast=self.choice.may_be_fast,
            # Ray counts every CPU that it gives away, and a worker gets one.
            has_spare_cores=self.resources.cluster is None and self.resources.workers < num_cores(),
        )
        cut = [work.feed for work in works if work.feed.is_cut]
        # Of Parquet what it holds counts: the same text is the same work.
        text = sum(feed.source.size_hint() or sum(feed.sizes) for feed in cut)
        chunks = [feed.chunks[0] for feed in cut]
        if not self._is_worth(text) or not self._can_travel(tools, first, *chunks):
            return None
        engine = self._open_engine()
        engine.start(tools)  # beside the choice, which may take seconds
        # By the first texts of the first unit, as in one process.
        chosen = self.choice.encoder(first.encoder.first_texts(first.units[0]))
        return engine, tools, chosen.produced_by

    def copiers(self, num_bytes: int) -> Engine | None:
        """Workers for tasks that need no encoder: those that are there, or new ones."""
        if self._engine is not None or self._is_worth(num_bytes):
            return self._open_engine()
        return None

    def _is_worth(self, num_bytes: int) -> bool:
        return self.resources.cluster is not None or self.resources.workers_for(num_bytes) > 1

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

    def _can_travel(self, *needed: object) -> bool:
        try:
            for what in needed:
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
                from shardmill.building.engines.ray import RayEngine

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

    The share that is done comes from the sizes of units, because text has another size in every
    format; for a source that cannot be cut it comes from the text, while that can be right.
    """

    def __init__(self, number: int, feed: FeedChunks, on_progress: OnProgress | None) -> None:
        self._number, self._feed, self._on_progress = number, feed, on_progress
        self._size = feed.source.size_hint()
        self._in_all = sum(feed.sizes) if feed.is_cut else 0
        self._documents = self._tokens = self._num_bytes = 0
        self._counted: set[int] = set()  # units, also those that are made again later
        self._done = 0  # input bytes of these

    def count_batch(self, unit: Unit, batch: EncodedBatch) -> None:
        """A batch that this process made."""
        if unit.number not in self._counted:
            self._add(batch.num_given, len(batch.documents.values), batch.num_bytes)
            self.show()

    def count_unit(self, receipt: Receipt, num_bytes: int, *, by_batches: bool) -> None:
        """A unit of `num_bytes` of input is made; `by_batches`: its batches were counted."""
        if receipt.unit in self._counted:
            return
        self._counted.add(receipt.unit)
        self._done += num_bytes
        if not by_batches:
            self._add(receipt.num_given, receipt.num_tokens, receipt.num_bytes)
        self.show()

    def _add(self, documents: int, tokens: int, num_bytes: int) -> None:
        self._documents += documents
        self._tokens += tokens
        self._num_bytes += num_bytes

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
        limit = self._feed.max_tokens
        parts = [self._tokens / limit] if limit else []
        if len(self._feed.sizes) > 1 and self._in_all:
            parts.append(self._done / self._in_all)
        elif self._size and self._num_bytes < self._size:
            parts.append(self._num_bytes / self._size)
        return min(1.0, max(parts)) if parts else None
