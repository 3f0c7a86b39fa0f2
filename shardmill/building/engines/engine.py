"""Tasks that run in other processes: the engine, when it gives up, and the worker's side.

An `Engine` runs tasks in workers and reports what happens to each. It knows nothing of builds. A
subclass brings the processes: `engines.local` those of this machine, `engines.ray` Ray's. Closing a
run kills the busy workers.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from shardmill.errors import BuildError
from shardmill.machine import Usage, usage_of_this_process
from shardmill.protocols import Closing
from shardmill.threads import StoppedError
from shardmill.urls import scrub

log = logging.getLogger(__name__)

MAX_DEATHS = 3
MAX_LOSSES = 10


class Task(Protocol):
    """Work that any process can do. It is pickled."""

    @property
    def name(self) -> str:
        """What it reads, for messages."""

    def run(self, tools: Any, emit: Callable[[Any], None]) -> None:
        """Do the work, and emit a small picklable note after each step that is durable, in order.

        After its process died, what is left of it runs again. A step may have been done without a
        note that was heard: it is repeated, or found and noted. It never runs twice at the same
        time.
        """

    def after(self, note: Any) -> Task:
        """What is left of it after this note: a step that was noted is never done again, since
        others may have built on it, or have been told to do it differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """A note of one task, its end, or its failure."""

    task: int  # its number in the run, from 0
    note: Any = None  # notes of a task come in order, each once
    ended: bool = False
    error: BaseException | None = None
    lost: bool = False  # with an error: its workers kept dying, so do not try it elsewhere


@dataclass(slots=True)
class RunningTask:
    """A task in an engine, over all its attempts.

    Every note resets the counts. Without progress the task is lost when `MAX_DEATHS` workers died
    of it, or `MAX_LOSSES` disappeared with their machine.
    """

    number: int
    task: Task  # what is left of it
    deaths: int = 0
    losses: int = 0

    def note(self, value: Any) -> TaskReport:
        self.task, self.deaths, self.losses = self.task.after(value), 0, 0
        return TaskReport(task=self.number, note=value)

    def died(self, death: WorkerDiedError) -> TaskReport | None:
        """Its worker died, perhaps because of it, or was lost with its machine through no fault of
        the task. None: run it again."""
        self.deaths += not death.with_machine
        self.losses += death.with_machine
        if self.deaths < MAX_DEATHS and self.losses < MAX_LOSSES:
            log.warning("%s: its worker died (%s); it runs again", self.task.name, death)
            return None
        what = f"{self.deaths} workers died of it"
        if death.with_machine:
            what = f"{self.losses} workers were lost while running it"
        error = BuildError(
            f"{self.task.name}: {what}, the last one {death}; finished work is kept: look for an "
            "input that takes too much memory there, build with fewer {workers}, and continue with "
            "{resume}",
            workers=...,
            resume=True,
        )
        return TaskReport(task=self.number, error=error, lost=True)


class WorkerDiedError(Exception):
    """How a worker ended, in words that follow "the last one". Caught inside this package."""

    def __init__(self, reason: str, *, with_machine: bool = False, cannot_start: bool = False):
        super().__init__(reason)
        self.with_machine = with_machine
        self.cannot_start = cannot_start  # another one would fail in the same way


class Worker(ABC):
    """A process as the engine sees it. It runs one task at a time.

    It is given a task only when it has started, and begins with it only when this process knows
    that it has accepted it: a task is never blamed for a worker that was dead before.
    """

    def __init__(self) -> None:
        self.state: Literal["starting", "idle", "assigned", "working"] = "starting"
        self.task: RunningTask | None = None
        self.tools: Any = None
        self.usage = Usage()

    @abstractmethod
    def send(self, task: Task, tools: Any) -> None:
        """A task, and tools when they are new. Never raises: a death shows in `receive`."""

    @abstractmethod
    def receive(self) -> tuple[str, Any]:
        """Kind and value of its next message, which is there; WorkerDiedError if it is gone.

        Kinds: started, accepted, and those of `TaskRunner`.
        """


class Engine(Closing):
    """Runs tasks in up to `slots` workers at the same time."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._workers: list[Worker] = []
        self._active: dict[Worker, None] = {}  # those that are not idle, in order of assignment
        self._idle: list[Worker] = []
        self._num_tasks = 0  # that workers have
        self._packed, self._tools = b"", None  # tools, and their form for workers
        self._used: list[Usage] = []  # of workers that have ended
        self._failed_starts = 0  # in a row

    start_advice: str  # what to do when workers cannot start

    @abstractmethod
    def _start(self, tools: Any) -> Worker:
        """A new worker, which loads shared tools while it starts."""

    @abstractmethod
    def _wait(self, workers: Collection[Any]) -> Sequence[Any]:
        """Those of the active workers that have a message or are gone; waits for one. An idle one
        that is gone may be among them."""

    @abstractmethod
    def _kill(self, workers: Sequence[Any]) -> None:
        """Kill some workers and wait until they are gone."""

    def _share(self, tools: bytes) -> Any:
        """Packed tools in the form that workers of this engine take."""
        return tools

    def start(self, tools: Any) -> None:
        """Start every worker now, though there is no task yet."""
        self._start_workers(self.slots, self._shared(tools))

    def run(self, tools: Any, tasks: Iterator[Task]) -> Generator[TaskReport, None, None]:
        """Run the tasks and yield reports until all have ended.

        `tools` are pickled to each worker once and passed to every task. A task is taken from
        `tasks` only when a slot is free, in order, so `tasks` may depend on earlier reports. A
        worker that dies is replaced, and its task runs again. Closing the generator stops the
        running tasks and returns when they have stopped; what was reported stays done.
        """
        shared = self._shared(tools)
        waiting: deque[RunningTask] = deque()
        queue = enumerate(tasks)
        try:
            while self._assign(waiting, queue, shared):
                for worker in self._wait(self._active):
                    yield from self._receive(worker, waiting)
        finally:
            self._end([worker for worker in self._workers if worker.task])

    def usage(self) -> Usage:
        return Usage.total([*self._used, *(worker.usage for worker in self._workers)])

    def close(self) -> None:
        """End every worker; may be called again."""
        self._end(list(self._workers))

    def _shared(self, tools: Any) -> Any:
        packed = pack(tools)
        if packed != self._packed:
            self._packed, self._tools = packed, self._share(packed)
        return self._tools

    def _start_workers(self, wanted: int, tools: Any) -> None:
        for _ in range(min(self.slots, wanted) - len(self._workers)):
            worker = self._start(tools)
            worker.tools = tools
            self._workers.append(worker)
            self._active[worker] = None

    def _assign(
        self, waiting: deque[RunningTask], queue: Iterator[tuple[int, Task]], tools: Any
    ) -> bool:
        """Take tasks for all slots, give them to idle workers, start missing workers; whether there
        is anything to wait for."""
        while (
            self._num_tasks + len(waiting) < self.slots and (found := next(queue, None)) is not None
        ):
            waiting.append(RunningTask(*found))
        while waiting and self._idle:
            worker, task = self._idle.pop(), waiting.popleft()
            worker.task, worker.state = task, "assigned"
            self._active[worker] = None
            self._num_tasks += 1
            worker.send(task.task, None if tools is worker.tools else tools)
            worker.tools = tools
        wanted = self._num_tasks + len(waiting)
        self._start_workers(wanted, tools)
        return wanted > 0

    def _receive(self, worker: Worker, waiting: deque[RunningTask]) -> Iterator[TaskReport]:
        """The report in one message of a worker, or in its death."""
        task = worker.task
        try:
            kind, value = worker.receive()
        except WorkerDiedError as death:
            self._end([worker])
            if worker.state == "idle":
                return
            if task is None:
                self._failed_starts += 1
                if death.cannot_start or self._failed_starts >= MAX_DEATHS * self.slots:
                    raise BuildError(
                        f"a worker cannot start: {death}; {self.start_advice}, and continue with "
                        "{resume}",
                        memory=...,
                        workers=...,
                        resume=True,
                    ) from death
                return
            lost = task.died(death) if worker.state == "working" else None
            if lost is None:
                waiting.appendleft(task)
            else:
                yield lost
            return
        if kind == "started":
            self._failed_starts = 0
            self._rest(worker)
        elif kind == "accepted":
            worker.state = "working"
        elif kind == "log":
            name, level, message = value
            logging.getLogger(name).log(level, "%s", message)
        elif task is not None and kind == "note":
            yield task.note(value)
        elif task is not None:
            worker.task = None
            self._num_tasks -= 1
            self._rest(worker)
            yield TaskReport(task=task.number, ended=kind == "ended", error=value)

    def _rest(self, worker: Worker) -> None:
        worker.state = "idle"
        del self._active[worker]
        self._idle.append(worker)

    def _end(self, workers: Sequence[Worker]) -> None:
        self._kill(workers)
        for worker in workers:
            self._used.append(worker.usage)
            self._workers.remove(worker)
            if worker.state == "idle":
                self._idle.remove(worker)
            else:
                del self._active[worker]
            self._num_tasks -= worker.task is not None


class _Pickler(pickle.Pickler):
    """Refuses what was defined in the started script, which a worker does not run."""

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__"):
            raise pickle.PicklingError(
                f"{value.__qualname__} is defined in the script that was started, where no other "
                "process can find it"
            )
        return NotImplemented


def pack(value: Any) -> bytes:
    """Pickle a value for a fresh interpreter; PicklingError with the reason if that cannot work."""
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except pickle.PicklingError:
        raise
    except Exception as error:  # a class may refuse to be pickled in any way
        raise pickle.PicklingError(
            f"{type(value).__name__} cannot travel to another process: {error}"
        ) from error
    return file.getvalue()


class TaskRunner:
    """Runs tasks inside a worker, and sends messages (kind, value, usage) about them.

    Kinds: log, note, ended, failed. `send` gets the kind and the packed message. An error of a task
    is sent, never raised, but for a StoppedError: it says that the process is ending. What the
    program logs is sent too.
    """

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send = send
        self._packed: bytes | None = None
        self._tools: Any = None
        logging.basicConfig(level=logging.INFO, handlers=[_LogForwarder(self.report)], force=True)

    def load(self, tools: bytes) -> None:
        """Tools for the tasks to come, whose method `prepare` is called, if there is one. What is
        wrong with them, the first task reports."""
        self._packed = tools
        with contextlib.suppress(Exception):
            found = pickle.loads(tools)
            if hasattr(found, "prepare"):
                found.prepare()
            self._tools, self._packed = found, None

    def run(self, data: bytes, tools: bytes | None) -> None:
        """Run one packed task to its end or failure, with new tools or those of the last one."""
        self._packed = tools or self._packed
        try:
            if self._packed is not None:
                self._tools, self._packed = pickle.loads(self._packed), None
            task: Task = pickle.loads(data)
            task.run(self._tools, lambda note: self.report("note", note))
        except StoppedError:  # the process is ending, which is no failure of the task
            raise
        except Exception as error:  # noqa: BLE001 - the coordinator decides
            error.add_note(scrub("".join(traceback.format_exception(error))))
            self.report("failed", _portable(error))
        else:
            self.report("ended", None)

    def report(self, kind: str, value: Any) -> None:
        self._send(kind, pack((kind, value, usage_of_this_process())))


class _LogForwarder(logging.Handler):
    """Sends log records to the coordinator, which has the handlers."""

    def __init__(self, report: Callable[[str, Any], None]) -> None:
        super().__init__()
        self.report = report
        self.addFilter(lambda record: record.name.partition(".")[0] != "ray")

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the coordinator is gone, and this process soon is
            self.report("log", (record.name, record.levelno, record.getMessage()))


def _portable(error: Exception) -> Exception:
    """The error itself if it survives a pickle, else its text."""
    try:
        if str(pickle.loads(pack(error))) == str(error):
            return error
    except Exception:  # noqa: BLE001 - any user's class may fail here in any way
        pass
    return BuildError(f"{type(error).__name__}: {error}")
