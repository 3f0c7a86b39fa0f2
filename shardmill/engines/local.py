"""Tasks in processes of this machine.

In: tasks.  Out: reports.
Promise: as `protocols.Engine`. Workers are fresh interpreters, started when there is work and used
again; nothing large crosses but the tools, once for each. A task whose worker dies three times,
with nothing new noted in between, is reported as lost. Closing a run kills the workers at work.
Not here: what happens inside a worker (worker.py).
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from shardmill.closing import Closing
from shardmill.engines.travel import pack
from shardmill.errors import BuildError
from shardmill.protocols import Task, TaskReport, Usage

MOST_DEATHS = 3
_STDERR = 2

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardmill.engines.worker import main; main(*map(int, sys.argv[2:]))"
)


@dataclass(slots=True)
class _Job:
    """One task on its way."""

    number: int
    name: str
    data: bytes
    notes: int = 0  # in this attempt
    best: int = 0  # in any attempt
    deaths: int = 0  # since an attempt noted more than those before it


class LocalEngine(Closing):
    """Up to `workers` processes."""

    def __init__(
        self,
        workers: int,
        *,
        environ: Mapping[str, str] | None = None,
        keep_open: Sequence[int] = (),
        memory: int | None = None,
    ) -> None:
        """`environ` is added to the environment of workers; `keep_open` are files they hold open
        with this process, such as a lock; each may use `memory` bytes."""
        self._most = workers
        self._environ = {**os.environ, **(environ or {})}
        self._keep_open = tuple(keep_open)
        self._memory = memory or 0
        self._workers: list[_Worker] = []
        self._used: list[Usage] = []  # of workers that are gone

    @property
    def slots(self) -> int:
        return self._most

    def run(self, tools: Any, tasks: Iterator[Task]) -> Generator[TaskReport, None, None]:
        packed = pack(tools)
        again: deque[_Job] = deque()
        queue = enumerate(tasks)
        try:
            while self._hand_out(again, queue, packed):
                for worker in self._ready():
                    yield from self._hear(worker, again)
        finally:
            self._end([worker for worker in self._workers if worker.job is not None])

    def usage(self) -> Usage:
        used = [*self._used, *(worker.usage for worker in self._workers)]
        return Usage(
            cpu_seconds=sum(usage.cpu_seconds for usage in used),
            peak_bytes=max((usage.peak_bytes for usage in used), default=0),
        )

    def close(self) -> None:
        self._end(list(self._workers))

    def _hand_out(
        self, again: deque[_Job], queue: Iterator[tuple[int, Task]], tools: bytes
    ) -> bool:
        """Give work to every worker that has none; whether anybody works."""
        chosen: list[_Worker] = []
        while self._num_busy() < self._most:
            job = again.popleft() if again else _next_job(queue)
            if job is None:
                break
            worker = self._idle_worker()
            worker.job = job
            chosen.append(worker)
        # All are started before the first is given anything: sending waits until it listens.
        for worker in chosen:
            worker.send(tools)
        return self._num_busy() > 0

    def _num_busy(self) -> int:
        return sum(worker.job is not None for worker in self._workers)

    def _idle_worker(self) -> _Worker:
        for worker in [worker for worker in self._workers if worker.job is None]:
            if worker.lives():
                return worker
            self._end([worker])
        worker = _Worker(self._environ, self._keep_open, self._memory)
        self._workers.append(worker)
        return worker

    def _ready(self) -> list[_Worker]:
        """The workers that have something to say; waits for one."""
        busy = {worker.connection: worker for worker in self._workers if worker.job is not None}
        return [busy[connection] for connection in wait(list(busy))]  # type: ignore[index]

    def _hear(self, worker: _Worker, again: deque[_Job]) -> Iterator[TaskReport]:
        """The reports in one message of a worker, or in its death."""
        job = worker.job
        assert job is not None, "only busy workers are heard"
        try:
            kind, _, value, worker.usage = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            code = self._end([worker])
            yield from self._died(job, code, again)
            return
        if kind == "log":
            name, level, message = value
            logging.getLogger(name).log(level, "%s", message)
        elif kind == "note":
            job.notes += 1
            if job.notes > job.best:
                job.best, job.deaths = job.notes, 0
            yield TaskReport(task=job.number, note=value)
        else:
            worker.job = None
            yield TaskReport(task=job.number, ended=kind == "ended", error=value)

    def _died(self, job: _Job, code: int, again: deque[_Job]) -> Iterator[TaskReport]:
        job.notes = 0
        job.deaths += 1
        if job.deaths < MOST_DEATHS:
            logging.getLogger(__name__).warning(
                "%s: its worker died (%s); it is done again", job.name, _words(code)
            )
            again.append(job)
            return
        error = BuildError(
            f"{job.name}: {job.deaths} workers died of it, the last one {_words(code)}; what the "
            "others did is kept: look for an input that takes too much memory there, build with "
            "fewer workers, and go on with --resume"
        )
        yield TaskReport(task=job.number, error=error, lost=True)

    def _end(self, workers: Sequence[_Worker]) -> int:
        """Kill some workers and wait for them; gives the exit code of the last."""
        code = 0
        for worker in workers:
            worker.kill()
        for worker in workers:
            code = worker.wait()
            self._used.append(worker.usage)
            self._workers.remove(worker)
        return code


class _Worker:
    """One process and the socket to it."""

    def __init__(self, environ: Mapping[str, str], keep_open: tuple[int, ...], memory: int) -> None:
        self.connection, theirs = Pipe(duplex=True)
        self.job: _Job | None = None
        self.usage = Usage(cpu_seconds=0.0, peak_bytes=0)
        self._tools: bytes | None = None
        with theirs:
            numbers = [theirs.fileno(), os.getpid(), memory]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # what a task prints must not mix with a receipt
                env=dict(environ),
                pass_fds=(theirs.fileno(), *keep_open),
            )

    def lives(self) -> bool:
        return self._process.poll() is None

    def send(self, tools: bytes) -> None:
        """Its task, and before the first one the tools."""
        job = self.job
        assert job is not None, "a worker is chosen for a task"
        with suppress(OSError):  # it died: that is heard when it is listened to
            if self._tools is not tools:
                self.connection.send_bytes(pickle.dumps(("tools", None, tools)))
                self._tools = tools
            self.connection.send_bytes(pickle.dumps(("task", job.number, job.data)))

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        code = self._process.wait()
        self.connection.close()
        return code


def _next_job(queue: Iterator[tuple[int, Task]]) -> _Job | None:
    found = next(queue, None)
    if found is None:
        return None
    number, task = found
    return _Job(number=number, name=task.name, data=pack(task))


def _words(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
