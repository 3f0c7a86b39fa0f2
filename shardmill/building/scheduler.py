"""How many processes do a build, and how they are brought to work.

In: how the caller wants it done.  Out: crews for groups of units.
Promise: nothing here changes the bytes of a store. The fast engine is proved once, here, before a
worker starts. What cannot travel to another process is done in this one: said aloud when nobody
asked for workers, refused when somebody did.
Not here: processes (engines), what a crew does (crew.py).

Units at work in an engine: what was reported of each, in order.

In: tasks in the order of the plan, an engine.  Out: the receipts of a unit, as they come.
Promise: receipts of a unit come in order and once, also when its worker died in between; units are
handed out in order, and no more of a feed than it can need. A mismatch of the tokenizer engine is
raised as soon as it is known.
Not here: reading segments, errors of a unit (stage.py does it again and meets them).

What an earlier run left in the journal, and the units of this one around it.

In: the folder of segments, the grains of each feed.  Out: units in order, and what of them is done.
Promise: receipts count only for the same plan and unchanged input; units that were begun keep their
borders, whatever the size of a unit is now; every grain is in one unit.
Not here: whether the segments are whole; that shows when they are read (stage.py).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from shardmill.building.encode import EngineDesk, MemoryPlan, no_memory, plan_memory
from shardmill.building.engines import LocalEngine, pack, usage_of_this_process
from shardmill.building.progress import ProgressMeter
from shardmill.building.segments import Receipt, UnitKey, read_receipts
from shardmill.building.spec import BuildCost
from shardmill.building.units import (
    ALONE_BYTES,
    UNIT_BYTES,
    FeedGrains,
    Unit,
    make_unit,
    read_grains,
    unit_ranges,
)
from shardmill.building.worker import (
    TextTask,
    WorkerTools,
    environ_of_threads,
    num_cores,
    worker_environ,
)
from shardmill.errors import BuildError, EngineMismatchError, OptionError
from shardmill.protocols import Closing, Engine, Source, Task, TaskReport, Tokenizer
from shardmill.tokenizers import EngineCheck

if TYPE_CHECKING:
    from shardmill.building.engines.ray_cluster import RayCluster

log = logging.getLogger(__name__)


class UnitFailedError(Exception):
    """A task raised; never leaves this room."""


@dataclass(slots=True)
class _State:
    """What is known of one unit."""

    receipts: list[Receipt] = field(default_factory=list)
    ended: bool = False
    report: TaskReport | None = None  # of its failure


class Crew(Closing):
    """The tasks of some units. One without tasks has no unit."""

    def __init__(
        self,
        tasks: Sequence[TextTask] = (),
        *,
        engine: Engine | None = None,
        tools: Any = None,
        on_receipt: Callable[[Receipt], None] = lambda _: None,
    ) -> None:
        self._tasks, self._on_receipt = tasks, on_receipt
        self._numbers = {task.unit.key: number for number, task in enumerate(tasks)}
        self._states = [_State() for _ in tasks]
        self._tokens: dict[int, int] = {}  # sealed, by feed
        self._reports: Generator[TaskReport, None, None] | None = None
        if tasks:
            assert engine is not None, "tasks need an engine"
            self._reports = engine.run(tools, self._handed_out())

    def has(self, unit: Unit) -> bool:
        return unit.key in self._numbers

    def receipts(self, unit: Unit) -> Iterator[Receipt]:
        """The receipts of a unit in order, waiting for them; ends when the unit has ended."""
        state = self._state(unit.key)
        given = 0
        while True:
            while given < len(state.receipts):
                given += 1
                yield state.receipts[given - 1]
            if state.report is not None:
                raise self._failure(state.report)
            if state.ended:
                return
            self._wait()

    def settle(self, unit: Unit) -> None:
        """Wait until nobody works on a unit."""
        state = self._state(unit.key)
        while not state.ended:
            self._wait()

    def close(self) -> None:
        """Stop what is still at work."""
        if self._reports is not None:
            self._reports.close()

    def _state(self, key: UnitKey) -> _State:
        return self._states[self._numbers[key]]

    def _handed_out(self) -> Iterator[Task]:
        """Tasks as the engine asks for them. All before one are out when it is, so a feed whose
        sealed tokens reach its limits needs no more."""
        for task in self._tasks:
            if task.most is None or self._tokens.get(task.unit.key.feed, 0) < task.most:
                yield task

    def _wait(self) -> None:
        """Take the next report."""
        assert self._reports is not None
        report = next(self._reports, None)
        assert report is not None, "an engine tells the end of every task it took"
        if isinstance(report.error, EngineMismatchError):
            raise report.error
        state = self._states[report.task]
        if report.note is not None:
            self._note(state, report.note)
        elif report.error is not None:
            state.report, state.ended = report, True
        elif report.ended:
            state.ended = True

    def _note(self, state: _State, receipt: Receipt) -> None:
        if receipt.number < len(state.receipts):
            known = state.receipts[receipt.number]
            if known != receipt:
                raise BuildError(
                    f"segment {receipt.number} of unit {receipt.key.folder} was made twice, and "
                    "not alike: go on with resume=True"
                )
            return
        assert receipt.number == len(state.receipts), "receipts of a unit come in order"
        state.receipts.append(receipt)
        feed = receipt.feed
        self._tokens[feed] = self._tokens.get(feed, 0) + receipt.num_tokens
        self._on_receipt(receipt)

    def _failure(self, report: TaskReport) -> Exception:
        error = report.error
        if report.lost:
            assert isinstance(error, BuildError), "engines say why a task is lost"
            return error
        if isinstance(error, MemoryError):
            return no_memory(self._tasks[report.task].name)
        return UnitFailedError(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPlan:
    """All the work of a build."""

    units: tuple[tuple[Unit, ...], ...]  # of each feed, in order
    begun: dict[str, list[Receipt]]  # what is sealed already, by the folder of the unit

    def is_done(self, unit: Unit) -> bool:
        receipts = self.begun.get(unit.key.folder)
        return bool(receipts and receipts[-1].last)


def plan_work(folder: Path, feeds: Sequence[FeedGrains], *, plan: str, unit_bytes: int) -> WorkPlan:
    """The units of a build; what is in the journal and does not belong there is removed."""
    begun: dict[str, list[Receipt]] = {}
    borders: list[dict[int, int]] = [{} for _ in feeds]
    for path in sorted(folder.iterdir()):
        receipts = _usable(path, feeds, plan)
        if not receipts or _crosses(borders[receipts[0].feed], receipts[0]):
            shutil.rmtree(path)
            continue
        begun[path.name] = receipts
        borders[receipts[0].feed][receipts[0].start] = receipts[0].stop
    units = tuple(
        tuple(
            make_unit(feed, number, start, stop, plan=plan)
            for start, stop in unit_ranges(feed.sizes, unit_bytes, borders[number])
        )
        for number, feed in enumerate(feeds)
    )
    check_cover(units, feeds)
    return WorkPlan(units=units, begun=begun)


def check_cover(units: Sequence[Sequence[Unit]], feeds: Sequence[FeedGrains]) -> None:
    """No grain missing, none twice: the last line of defence of a resumed build."""
    for mine, feed in zip(units, feeds, strict=True):
        edges = [0, *(unit.key.stop for unit in mine)]
        if [unit.key.start for unit in mine] != edges[:-1] or edges[-1] != len(feed.grains):
            raise BuildError(
                f"source {feed.source.name!r}: its units do not cover its {len(feed.grains):,} "
                "grains once each: start again with overwrite=True"
            )


def _usable(path: Path, feeds: Sequence[FeedGrains], plan: str) -> list[Receipt]:
    """The receipts of a unit's folder, if they are of this plan and this input."""
    receipts = read_receipts(path)
    if not receipts:
        return []
    key = receipts[0].key
    known = 0 <= key.feed < len(feeds) and 0 <= key.start < key.stop
    if not known or key.stop > len(feeds[key.feed].grains) or key.plan != plan:
        return []
    unit = make_unit(feeds[key.feed], key.feed, key.start, key.stop, plan=plan)
    return receipts if unit.key == key and path.name == key.folder else []


def _crosses(borders: dict[int, int], receipt: Receipt) -> bool:
    """Whether a unit shares grains with one that is kept. Folders come in the order of starts."""
    return any(start <= receipt.start < stop for start, stop in borders.items())


_UNKNOWN_SHARE = 2 * 2**30
"""Bytes that a worker counts with on machines which are not there yet."""

RunOn: TypeAlias = Literal["local", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the work is done. Changes no byte of the store."""

    workers: int | None = None  # processes; None: as many as there are cores; 1: no other process
    unit_bytes: int | None = None  # of input, what a worker gets at a time; None: as it fits
    memory: int | None = None  # bytes that all processes together may use; None: what is free
    cluster: RayCluster | None = None  # where workers run; None: processes of this machine

    def __post_init__(self) -> None:
        for name in ("workers", "unit_bytes", "memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value}: wanted 1 or more")

    @property
    def most_workers(self) -> int:
        return self.workers or self.num_cores

    @property
    def num_cores(self) -> int:
        """Of this machine, or of all that Ray has."""
        return self.cluster.num_cpus if self.cluster and self.cluster.is_elsewhere else num_cores()

    def memory_plan(self) -> MemoryPlan:
        memory = self.memory
        if memory is None and self.cluster is not None:
            # What is free here says nothing of the other machines.
            share = self.cluster.memory_per_cpu or _UNKNOWN_SHARE
            memory = share * (self.most_workers + 1)
        return plan_memory(self.most_workers, memory, asked=self.workers is not None)

    def size_of_units(self) -> int:
        """Alone, a process needs no small units; what it began stays one when others join."""
        alone = self.most_workers == 1 and self.cluster is None
        return self.unit_bytes or (ALONE_BYTES if alone else UNIT_BYTES)


@contextmanager
def open_manner(
    *,
    workers: int | None = None,
    unit_bytes: int | None = None,
    memory: int | None = None,
    run_on: RunOn = "local",
    ray_address: str | None = None,
) -> Iterator[Manner]:
    """How the work is done, with Ray at hand when it is done there."""
    manner = Manner(workers=workers, unit_bytes=unit_bytes, memory=memory)
    if run_on not in ("local", "ray"):
        raise OptionError(f"run_on={run_on!r}: wanted 'local' or 'ray'")
    if run_on == "local" and ray_address is not None:
        raise OptionError(f"ray_address={ray_address!r}: only with run_on='ray'")
    with _open_cluster(workers, ray_address) if run_on == "ray" else nullcontext() as cluster:
        yield replace(manner, cluster=cluster)


def _open_cluster(workers: int | None, address: str | None) -> RayCluster:
    from shardmill.building.engines.ray_cluster import RayCluster

    cluster = RayCluster(address, workers=workers or num_cores())
    if workers is None and not cluster.num_cpus:
        with cluster:
            raise OptionError(
                f"Ray has {cluster.describe()} now: start a node, or say how many workers it will "
                "have room for (workers=)"
            )
    return cluster


class Hands(Closing):
    """The processes of one build. None is started before it has something to do."""

    def __init__(
        self, tokenizer: Tokenizer, check: EngineCheck, manner: Manner, *, keep_open: int
    ) -> None:
        """`keep_open` is a file that workers hold open with this process."""
        self.manner = manner
        self._tokenizer, self._check, self._keep_open = tokenizer, check, keep_open
        self._engine: Engine | None = None
        self._before = usage_of_this_process().cpu_seconds

    def crew(
        self, tasks: Sequence[TextTask], desk: EngineDesk, plan: WorkPlan, meter: ProgressMeter
    ) -> Crew:
        """A crew for some tasks; one without tasks when this process does them itself."""
        if self._num_workers(len(tasks)) < (2 if self.manner.cluster is None else 1):
            return Crew()
        tools = self._tools(tasks[0], desk)
        if not self._can_travel(tools, tasks):
            return Crew()

        def count(receipt: Receipt) -> None:
            known = plan.begun.get(receipt.key.folder, ())
            if receipt.number >= len(known):
                meter.count_receipt(receipt)
                meter.tell(receipt.feed)

        return Crew(tasks, engine=self._open(), tools=tools, on_receipt=count)

    def _num_workers(self, num_tasks: int) -> int:
        """Unasked, a worker is started for two units or more: starting one takes a second. Ray is
        asked for as such, also for one unit."""
        fits = self.manner.memory_plan().workers
        asked = self.manner.workers is not None or self.manner.cluster is not None
        return min(fits, num_tasks if asked else num_tasks // 2)

    def cost(self) -> BuildCost:
        """So far, with workers that have ended."""
        own = usage_of_this_process()
        cpu, peak, workers = own.cpu_seconds - self._before, own.peak_bytes, 1
        if self._engine is not None:
            usage, workers = self._engine.usage(), self._engine.slots
            cpu, peak = cpu + usage.cpu_seconds, max(peak, usage.peak_bytes)
        cores = self.manner.num_cores
        if self.manner.cluster is not None and self.manner.cluster.is_elsewhere:
            cores = max(cores, workers)  # machines that came later are counted by their workers
        return BuildCost(num_workers=workers, num_cores=cores, cpu_seconds=cpu, peak_bytes=peak)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _tools(self, first: TextTask, desk: EngineDesk) -> WorkerTools:
        """The engine is chosen by the first texts of the first unit, as in one process."""
        grains = cast(Sequence[Source], first.unit.grains)
        with closing(read_grains(grains, None)) as batches:
            found = next(batches, None)
        chosen = desk.encoder(found.batch.texts if found is not None else [])
        return WorkerTools(
            self._tokenizer,
            produced_by=chosen.produced_by,
            check=self._check,
            # Ray counts every CPU that it gives away, and a worker gets one.
            has_spare_cores=self.manner.cluster is None
            and self.manner.memory_plan().workers < num_cores(),
        )

    def _can_travel(self, tools: WorkerTools, tasks: Sequence[TextTask]) -> bool:
        """Tried on the tools and the first unit of each feed."""
        firsts = {task.unit.key.feed: task for task in reversed(tasks)}
        try:
            for what in (tools, *firsts.values()):
                pack(what)
        except PicklingError as error:
            if self.manner.workers is not None or self.manner.cluster is not None:
                far = self.manner.cluster is not None
                asked = "run_on='ray'" if far else f"workers={self.manner.workers}"
                raise OptionError(
                    f"{asked}: {error}; build {'on this machine ' if far else ''}with workers=1, "
                    "or define it in a module that a worker can import"
                ) from error
            log.info("one process builds this store: %s", error)
            return False
        return True

    def _open(self) -> Engine:
        if self._engine is None:
            plan = self.manner.memory_plan()
            memory = plan.limit_bytes if self.manner.memory is not None else None
            if self.manner.cluster is not None:
                self._engine = _ray_engine(self.manner.cluster, plan.workers, memory)
            else:
                self._engine = LocalEngine(
                    plan.workers,
                    environ=worker_environ(plan.workers),
                    keep_open=(self._keep_open,),
                    memory=memory,
                )
        return self._engine


def _ray_engine(cluster: RayCluster, workers: int, memory: int | None) -> Engine:
    """Ray gives a worker one CPU, so its libraries get one thread."""
    from shardmill.building.engines.ray_engine import RayEngine

    return RayEngine(cluster, workers, environ=environ_of_threads(1), memory=memory)
