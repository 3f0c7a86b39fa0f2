"""How many processes do a build, and how they are brought to work.

In: how the caller wants it done.  Out: crews for groups of units.
Promise: nothing here changes the bytes of a store. The fast engine is proved once, here, before a
worker starts. What cannot travel to another process is done in this one: said aloud when nobody
asked for workers, refused when somebody did.
Not here: processes (engines), what a crew does (crew.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pickle import PicklingError
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from shardmill.build.crew import Crew
from shardmill.build.engine import EngineDesk
from shardmill.build.grains import read_grains
from shardmill.build.journal import WorkPlan
from shardmill.build.memory import MemoryPlan, plan_memory
from shardmill.build.meter import Meter
from shardmill.build.segments import Receipt
from shardmill.build.spec import BuildCost
from shardmill.build.task import TextTask
from shardmill.build.tools import WorkerTools, environ_of_threads, num_cores, worker_environ
from shardmill.build.units import ALONE_BYTES, UNIT_BYTES
from shardmill.closing import Closing
from shardmill.engines import LocalEngine, pack, usage_of_this_process
from shardmill.errors import OptionError
from shardmill.protocols import Engine, Source, Tokenizer
from shardmill.tokenizer import EngineCheck

if TYPE_CHECKING:
    from shardmill.engines.ray_cluster import RayCluster

log = logging.getLogger(__name__)

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
    from shardmill.engines.ray_cluster import RayCluster

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
        self, tasks: Sequence[TextTask], desk: EngineDesk, plan: WorkPlan, meter: Meter
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
    from shardmill.engines.ray_engine import RayEngine

    return RayEngine(cluster, workers, environ=environ_of_threads(1), memory=memory)
