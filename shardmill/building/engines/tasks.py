"""Tasks that run in other processes: the contract, the worker's side, and when to give up.

An engine runs tasks in workers and reports what happens to each. Engines know nothing of builds.
Local processes and Ray share everything in this module.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardmill.errors import BuildError
from shardmill.machine import Usage, usage_of_this_process
from shardmill.urls import scrub

MAX_DEATHS = 3
MAX_LOSSES = 10


class Task(Protocol):
    """Work that any process can do. It is pickled."""

    @property
    def name(self) -> str:
        """What it reads, for messages."""

    def run(self, tools: Any, emit: Callable[[Any], None]) -> None:
        """Do the work, and emit a small picklable note after each step that is durable, in order.

        After its process died it runs again: it first emits the notes of the steps that are done,
        equal to before, and continues. It never runs twice at the same time.
        """


@runtime_checkable
class PortableTask(Task, Protocol):
    """A task that can also run in a process which sees none of this machine's disks."""

    def detached(self) -> Task:
        """The same task for such a process: its notes carry the results."""

    def keep(self, note: Any) -> Any:
        """Make the results in such a note durable; returns the note that `run` would emit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """A note of one task, its end, or its failure."""

    task: int  # its number in the run, from 0
    note: Any = None  # notes of a task come in order; after a death they come again
    ended: bool = False
    error: BaseException | None = None
    lost: bool = False  # with an error: its workers kept dying, so do not try it elsewhere


class Engine(Protocol):
    """Where tasks run."""

    @property
    def slots(self) -> int:
        """How many tasks run at the same time."""

    def run(self, tools: Any, tasks: Iterator[Task]) -> Generator[TaskReport, None, None]:
        """Run the tasks and yield reports until all have ended.

        `tools` are pickled to each worker once and passed to every task. A task is taken from
        `tasks` only when a slot is free, in order, so `tasks` may depend on earlier reports. A
        worker that dies is replaced, and its task runs again. Closing the generator stops the
        running tasks and returns when they have stopped; what was reported stays done.
        """

    def usage(self) -> Usage: ...

    def close(self) -> None:
        """End every worker; may be called again."""


@dataclass(slots=True)
class RunningTask:
    """A task in an engine, over all its attempts.

    An attempt that emits more notes than any before resets the counts. Without progress the task
    is lost when `MAX_DEATHS` workers died of it, or `MAX_LOSSES` disappeared with their machine.
    """

    number: int
    task: Task
    notes: int = 0  # in this attempt
    most_notes: int = 0  # in any attempt
    deaths: int = 0
    losses: int = 0

    @property
    def name(self) -> str:
        return self.task.name

    def note(self, value: Any) -> TaskReport:
        self.notes += 1
        if self.notes > self.most_notes:
            self.most_notes, self.deaths, self.losses = self.notes, 0, 0
        return TaskReport(task=self.number, note=value)

    def died(self, reason: str, *, with_machine: bool = False) -> TaskReport | None:
        """Its worker died, perhaps because of it, or was lost with its machine through no fault of
        the task. None: run it again."""
        self.deaths += not with_machine
        self.losses += with_machine
        if self.deaths < MAX_DEATHS and self.losses < MAX_LOSSES:
            self.notes = 0
            logging.getLogger(__name__).warning(
                "%s: its worker died (%s); it runs again", self.name, reason
            )
            return None
        what = f"{self.deaths} workers died of it"
        if with_machine:
            what = f"{self.losses} workers were lost while running it"
        error = BuildError(
            f"{self.name}: {what}, the last one {reason}; finished work is kept: look for an input "
            "that takes too much memory there, build with fewer {workers}, and continue with "
            "{resume}",
            workers=...,
            resume=True,
        )
        return TaskReport(task=self.number, error=error, lost=True)


def next_task(queue: Iterator[tuple[int, Task]]) -> RunningTask | None:
    """The next of the numbered tasks; None when there is no other."""
    found = next(queue, None)
    return None if found is None else RunningTask(number=found[0], task=found[1])


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
    is sent, never raised. What the program logs is sent too.
    """

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send = send
        self._packed: bytes | None = None
        self._tools: Any = None
        logging.basicConfig(level=logging.INFO, handlers=[_LogForwarder(self._report)], force=True)

    def set_tools(self, packed: bytes) -> None:
        """The tools of the next tasks. They are opened when a task needs them."""
        self._packed = packed

    def run(self, data: bytes) -> None:
        """Run one packed task to its end or failure."""
        try:
            if self._packed is not None:
                self._tools, self._packed = pickle.loads(self._packed), None
            task: Task = pickle.loads(data)
            task.run(self._tools, lambda note: self._report("note", note))
        except Exception as error:  # noqa: BLE001 - the coordinator decides
            error.add_note(scrub("".join(traceback.format_exception(error))))
            self._report("failed", _portable(error))
        else:
            self._report("ended", None)

    def _report(self, kind: str, value: Any) -> None:
        self._send(kind, pack((kind, value, usage_of_this_process())))


class _LogForwarder(logging.Handler):
    """Sends log records to the coordinator, which has the handlers."""

    def __init__(self, report: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._report = report
        self.addFilter(lambda record: record.name.partition(".")[0] != "ray")

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the coordinator is gone, and this process soon is
            self._report("log", (record.name, record.levelno, record.getMessage()))


def log_again(value: tuple[str, int, str]) -> None:
    """Log in the coordinator what a worker logged."""
    name, level, message = value
    logging.getLogger(name).log(level, "%s", message)


def _portable(error: Exception) -> Exception:
    """The error itself if it survives a pickle, else its text."""
    try:
        if str(pickle.loads(pack(error))) == str(error):
            return error
    except Exception:  # noqa: BLE001 - any user's class may fail here in any way
        pass
    return BuildError(f"{type(error).__name__}: {error}")
