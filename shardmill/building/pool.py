"""The worker processes of a build: how many, where, and what they report.

Nothing here changes the bytes of a store. The encoder is chosen once, in the coordinator, before a
worker starts. What cannot travel to another process is done in the coordinator, or refused when the
user asked for workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pickle import PicklingError
from typing import TYPE_CHECKING, Literal, TypeAlias

from shardmill.building.engines import (
    Engine,
    LocalEngine,
    Task,
    TaskReport,
    pack,
    usage_of_this_process,
)
from shardmill.building.resources import (
    MemoryPlan,
    num_cores,
    out_of_memory,
    plan_memory,
    worker_environ,
)
from shardmill.building.segments import Receipt
from shardmill.building.spec import BuildCost
from shardmill.building.units import SINGLE_PROCESS_UNIT_BYTES, UNIT_BYTES, Unit, read_chunks
from shardmill.building.worker import EncoderProvider, UnitTask, WorkerTools
from shardmill.errors import BuildError, EngineMismatchError, OptionError
from shardmill.protocols import Closing, Tokenizer
from shardmill.tokenizers import EngineCheck

if TYPE_CHECKING:
    from shardmill.building.engines.ray import RayCluster

log = logging.getLogger(__name__)

_UNKNOWN_SHARE = 2 * 2**30
"""Bytes assumed for a worker on machines that are not there yet."""

RunOn: TypeAlias = Literal["local", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How the work is divided. Changes no byte of the store."""

    workers: int | None = None  # processes; None: one for each core; 1: only this process
    unit_bytes: int | None = None  # of input for a worker at a time; None: chosen here
    memory: int | None = None  # bytes that all processes may use together; None: what is free
    cluster: RayCluster | None = None  # where workers run; None: on this machine

    def __post_init__(self) -> None:
        for name in ("workers", "unit_bytes", "memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{{{name}}}: wanted 1 or more", **{name: value})

    @property
    def num_cores(self) -> int:
        """Of this machine, or of all that Ray has."""
        return self.cluster.num_cpus if self.cluster and self.cluster.is_elsewhere else num_cores()

    def memory_plan(self) -> MemoryPlan:
        memory, workers = self.memory, self.workers or self.num_cores
        if memory is None and self.cluster is not None:
            # What is free here says nothing about the other machines.
            memory = (self.cluster.memory_per_cpu or _UNKNOWN_SHARE) * (workers + 1)
        return plan_memory(workers, memory, required=self.workers is not None)

    def size_of_units(self) -> int:
        """A single process needs no small units; what it began stays one unit when others join."""
        single = (self.workers or self.num_cores) == 1 and self.cluster is None
        return self.unit_bytes or (SINGLE_PROCESS_UNIT_BYTES if single else UNIT_BYTES)


@contextmanager
def open_workers(
    *,
    workers: int | None = None,
    unit_bytes: int | None = None,
    memory: int | None = None,
    run_on: RunOn = "local",
    ray_address: str | None = None,
) -> Iterator[WorkerOptions]:
    """Check the options, and connect to Ray if the workers run there."""
    options = WorkerOptions(workers=workers, unit_bytes=unit_bytes, memory=memory)
    if run_on not in ("local", "ray"):
        raise OptionError("{run_on}: wanted 'local' or 'ray'", run_on=run_on)
    if run_on == "local" and ray_address is not None:
        raise OptionError(
            "{ray_address}: only with {run_on}", ray_address=ray_address, run_on="ray"
        )
    with _open_cluster(workers, ray_address) if run_on == "ray" else nullcontext() as cluster:
        yield replace(options, cluster=cluster)


def _open_cluster(workers: int | None, address: str | None) -> RayCluster:
    from shardmill.building.engines.ray import RayCluster

    cluster = RayCluster(address, workers=workers or num_cores())
    if workers is None and not cluster.num_cpus:
        with cluster:
            raise OptionError(
                f"Ray has {cluster.describe()} now: start a node, or say how many {{workers}} it "
                "will have space for",
                workers=...,
            )
    return cluster


class UnitFailedError(Exception):
    """A task raised. Caught inside this package."""


@dataclass(slots=True)
class _UnitState:
    receipts: list[Receipt] = field(default_factory=list)
    ended: bool = False
    failure: TaskReport | None = None


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
        self._states = {task.unit.key: _UnitState() for task in tasks}
        self._tokens: dict[int, int] = {}  # sealed, by feed
        self._reports: Generator[TaskReport, None, None] | None = None
        if tasks:
            assert engine is not None, "tasks need an engine"
            self._reports = engine.run(tools, self._needed_tasks())

    def has(self, unit: Unit) -> bool:
        return unit.key in self._states

    def receipts(self, unit: Unit) -> Iterator[Receipt]:
        """The receipts of a unit in order, waiting for them; ends when the unit has ended."""
        state = self._states[unit.key]
        given = 0
        while True:
            while given < len(state.receipts):
                given += 1
                yield state.receipts[given - 1]
            if state.failure is not None:
                raise self._error_of(state.failure)
            if state.ended:
                return
            self._wait()

    def wait_for(self, unit: Unit) -> None:
        """Wait until no worker works on a unit."""
        while not self._states[unit.key].ended:
            self._wait()

    def close(self) -> None:
        """Stop what is still at work."""
        if self._reports is not None:
            self._reports.close()

    def _needed_tasks(self) -> Iterator[Task]:
        """Tasks as the engine asks for them. All earlier ones were handed out before, so a feed
        whose sealed tokens reach its limit needs no more."""
        for task in self._tasks:
            sealed = self._tokens.get(task.unit.key.feed, 0)
            if task.max_tokens is None or sealed < task.max_tokens:
                yield task

    def _wait(self) -> None:
        """Take the next report."""
        assert self._reports is not None
        report = next(self._reports, None)
        assert report is not None, "an engine reports the end of every task it took"
        if isinstance(report.error, EngineMismatchError):
            raise report.error
        state = self._states[self._tasks[report.task].unit.key]
        if report.note is not None:
            self._add_receipt(state, report.note)
        elif report.error is not None:
            state.failure, state.ended = report, True
        elif report.ended:
            state.ended = True

    def _add_receipt(self, state: _UnitState, receipt: Receipt) -> None:
        if receipt.number < len(state.receipts):
            if state.receipts[receipt.number] != receipt:
                raise BuildError(
                    f"segment {receipt.number} of unit {receipt.key.folder} was made twice with "
                    "different results: continue with {resume}",
                    resume=True,
                )
            return
        assert receipt.number == len(state.receipts), "receipts of a unit come in order"
        state.receipts.append(receipt)
        self._tokens[receipt.feed] = self._tokens.get(receipt.feed, 0) + receipt.num_tokens
        self._on_receipt(receipt)

    def _error_of(self, report: TaskReport) -> Exception:
        error = report.error
        if report.lost:
            assert isinstance(error, BuildError), "engines say why a task is lost"
            return error
        if isinstance(error, MemoryError):
            return out_of_memory(self._tasks[report.task].name)
        return UnitFailedError(f"{type(error).__name__}: {error}")


class WorkerPool(Closing):
    """The workers of one build. None is started before it has something to do."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        provider: EncoderProvider,
        check: EngineCheck,
        options: WorkerOptions,
        *,
        keep_open: int,
    ) -> None:
        """`keep_open` is a file descriptor that workers hold open with this process."""
        self.options = options
        self._tokenizer, self._provider, self._check = tokenizer, provider, check
        self._keep_open = keep_open
        self._engine: Engine | None = None
        self._cpu_before = usage_of_this_process().cpu_seconds

    def run(self, tasks: Sequence[UnitTask], on_receipt: Callable[[Receipt], None]) -> UnitRun:
        """Run tasks in workers; a run without units if the coordinator should do them itself.

        Unasked, a worker is started for every two units, because starting one takes a second. Ray
        is used even for one unit.
        """
        options = self.options
        asked = options.workers is not None or options.cluster is not None
        useful = len(tasks) if asked else len(tasks) // 2
        num_workers = min(options.memory_plan().workers, useful)
        if num_workers < (2 if options.cluster is None else 1):
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
        cores = self.options.num_cores
        if self.options.cluster is not None and self.options.cluster.is_elsewhere:
            cores = max(cores, workers)  # machines that joined later are counted by their workers
        return BuildCost(num_workers=workers, num_cores=cores, cpu_seconds=cpu, peak_bytes=peak)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _tools(self, first: UnitTask) -> WorkerTools:
        """The encoder is chosen by the first texts of the first unit, as in one process."""
        with closing(read_chunks(first.unit.chunks, None)) as batches:
            found = next(batches, None)
        chosen = self._provider.encoder(found.batch.texts if found is not None else [])
        return WorkerTools(
            self._tokenizer,
            produced_by=chosen.produced_by,
            check=self._check,
            # Ray counts every CPU that it gives away, and a worker gets one.
            has_spare_cores=self.options.cluster is None
            and self.options.memory_plan().workers < num_cores(),
        )

    def _can_travel(self, tools: WorkerTools, tasks: Sequence[UnitTask]) -> bool:
        """Tried on the tools and the first unit of each feed."""
        firsts = {task.unit.key.feed: task for task in reversed(tasks)}
        try:
            for what in (tools, *firsts.values()):
                pack(what)
        except PicklingError as error:
            options = self.options
            if options.cluster is not None:
                raise OptionError(
                    f"{{run_on}}: {error}; build on this machine with {{workers}}, or define it in "
                    "a module that a worker can import",
                    run_on="ray",
                    workers=1,
                ) from error
            if options.workers is not None:
                raise OptionError(
                    f"{{workers}}: {error}; build with 1, or define it in a module that a worker "
                    "can import",
                    workers=options.workers,
                ) from error
            log.info("one process builds this store: %s", error)
            return False
        return True

    def _open_engine(self) -> Engine:
        if self._engine is None:
            plan, cluster = self.options.memory_plan(), self.options.cluster
            memory = plan.limit_bytes if self.options.memory is not None else None
            if cluster is not None:
                from shardmill.building.engines.ray import RayEngine

                # Ray gives a worker one CPU, so its libraries get one thread.
                environ = worker_environ(1)
                self._engine = RayEngine(cluster, plan.workers, environ=environ, memory=memory)
            else:
                self._engine = LocalEngine(
                    plan.workers,
                    environ=worker_environ(max(1, num_cores() // plan.workers)),
                    keep_open=(self._keep_open,),
                    memory=memory,
                )
        return self._engine
