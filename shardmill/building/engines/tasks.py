"""A task on its way through an engine: what it noted, and how many processes it took with it.

In: what becomes of one attempt after the other.  Out: whether there is another.
Promise: an attempt that notes more than all before it begins the counts anew; without that a task
is lost at the third death of a worker, and at the tenth loss of one that need not be its fault.
Alike in every engine.
Not here: how a death is noticed.

What a process tells of a task that it does: alike in every engine.

In: a task and its tools, as bytes.  Out: (kind, value): log, note, ended, failed.
Promise: an error of a task is told, not died of, and comes out of a pickle on the other side; what
the program logs is told too.
Not here: the way back (worker.py, ray_worker.py).

Values on their way to another process.

In: a value.  Out: bytes, which `pickle.loads` of a fresh interpreter takes.
Promise: what a fresh interpreter could not import is refused here, where the caller can still act.
Not here: trust. These bytes go to processes that this one started, and come back from them.

What this process has used of its machine, and may use.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import re
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from shardmill.errors import BuildError
from shardmill.protocols import Task, TaskReport, Usage
from shardmill.urls import scrub

MOST_DEATHS = 3
MOST_LOSSES = 10


@dataclass(slots=True)
class TaskAttempt:
    """One task on its way."""

    number: int
    task: Task
    notes: int = 0  # in this attempt
    best: int = 0  # in any attempt
    deaths: int = 0  # of workers, since an attempt noted more than those before it
    losses: int = 0  # of workers that went with their machine, since then

    @property
    def name(self) -> str:
        return self.task.name

    def noted(self) -> None:
        self.notes += 1
        if self.notes > self.best:
            self.best, self.deaths, self.losses = self.notes, 0, 0

    def died(self, words: str) -> TaskReport | None:
        """Its worker died, perhaps of it; None: it is to be done again."""
        self.deaths += 1
        if self.deaths >= MOST_DEATHS:
            return self._lost(f"{self.deaths} workers died of it, the last one {words}")
        self._say_again(words)
        return None

    def parted(self, words: str) -> TaskReport | None:
        """Its worker went for a reason of its own; None: it is to be done again."""
        self.losses += 1
        if self.losses >= MOST_LOSSES:
            return self._lost(f"{self.losses} workers were lost at it, the last one {words}")
        self._say_again(words)
        return None

    def _say_again(self, words: str) -> None:
        self.notes = 0
        logging.getLogger(__name__).warning(
            "%s: its worker died (%s); it is done again", self.name, words
        )

    def _lost(self, words: str) -> TaskReport:
        error = BuildError(
            f"{self.name}: {words}; what the others did is kept: look for an input that takes too "
            "much memory there, build with fewer workers, and go on with resume=True"
        )
        return TaskReport(task=self.number, error=error, lost=True)


def next_job(queue: Iterator[tuple[int, Task]]) -> TaskAttempt | None:
    """The next of the numbered tasks; None: there is no other."""
    found = next(queue, None)
    return None if found is None else TaskAttempt(number=found[0], task=found[1])


class _Packer(pickle.Pickler):
    """Refuses what was defined in a script: a worker does not run the script again."""

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__"):
            raise pickle.PicklingError(
                f"{value.__qualname__} is defined in the script that was started, where no other "
                "process can find it"
            )
        return NotImplemented


def pack(value: Any) -> bytes:
    """The value as bytes; PicklingError, with the reason, when it cannot travel."""
    file = io.BytesIO()
    try:
        _Packer(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except pickle.PicklingError:
        raise
    except Exception as error:  # a class may refuse to be pickled in any words
        raise pickle.PicklingError(
            f"{type(value).__name__} cannot travel to another process: {error}"
        ) from error
    return file.getvalue()


Tell: TypeAlias = Callable[[str, Any], None]


class Tools:
    """The tools of a process, opened when the first task needs them."""

    def __init__(self) -> None:
        self._packed: bytes | None = None
        self._opened: Any = None

    def bring(self, packed: bytes) -> None:
        self._packed = packed

    def open(self) -> Any:
        if self._packed is not None:
            self._opened, self._packed = pickle.loads(self._packed), None
        return self._opened


def do_task(data: bytes, tools: Tools, tell: Tell) -> None:
    """Run one task to its end, or to its failure."""
    try:
        opened = tools.open()
        task = pickle.loads(data)
        task.run(opened, lambda note: tell("note", note))
    except Exception as error:  # noqa: BLE001 - told to the other side, which decides
        error.add_note(scrub("".join(traceback.format_exception(error))))
        tell("failed", _portable(error))
    else:
        tell("ended", None)


class Logs(logging.Handler):
    """Records are told; the handlers are on the other side."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the other side is gone, and so are we in a moment
            self._tell("log", (record.name, record.levelno, record.getMessage()))


def log_again(value: tuple[str, int, str]) -> None:
    """On the other side: what a `Logs` told."""
    name, level, message = value
    logging.getLogger(name).log(level, "%s", message)


def _portable(error: Exception) -> Exception:
    """The error itself if it comes out of a pickle alike, else its words."""
    try:
        if str(pickle.loads(pack(error))) == str(error):
            return error
    except Exception:  # noqa: BLE001 - any class of a user may fail to travel in any way
        pass
    return BuildError(f"{type(error).__name__}: {error}")


_STATUS = Path("/proc/self/status")


def usage_of_this_process() -> Usage:
    """CPU seconds of all its threads, and its peak resident memory."""
    return Usage(cpu_seconds=time.process_time(), peak_bytes=_peak_bytes())


def limit_memory(num_bytes: int) -> None:
    """From here on an allocation that goes beyond fails in this process, and kills no other."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def allow_memory(num_bytes: int) -> None:
    """As `limit_memory`, beyond what this process holds already."""
    limit_memory((_status("VmData") or 0) + num_bytes)


def _peak_bytes() -> int:
    """The kernel's own mark where there is one: getrusage counts the parent's memory too, as it was
    when this process was started."""
    return _status("VmHWM") or _peak_of_getrusage()


def _status(name: str) -> int | None:
    """Bytes that the kernel counts under this name; None where it does not."""
    if not _STATUS.exists():
        return None
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    return int(found[1]) * 1024 if found is not None else None


def _peak_of_getrusage() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
