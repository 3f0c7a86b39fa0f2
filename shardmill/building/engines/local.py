"""Tasks in processes of this machine.

In: tasks.  Out: reports.
Promise: as `protocols.Engine`. Workers are fresh interpreters, started when there is work and used
again; nothing large crosses but the tools, once for each. A task whose worker dies three times,
with nothing new noted in between, is reported as lost. Closing a run kills the workers at work.
Not here: what happens inside a worker (worker.py).
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from shardmill.building.engines.tasks import TaskAttempt, log_again, next_job, pack
from shardmill.protocols import Closing, Task, TaskReport, Usage

_STDERR = 2

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardmill.building.engines.worker_process import main; main(*map(int, sys.argv[2:]))"
)


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
        again: deque[TaskAttempt] = deque()
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
        self, again: deque[TaskAttempt], queue: Iterator[tuple[int, Task]], tools: bytes
    ) -> bool:
        """Give work to every worker that has none; whether anybody works."""
        chosen: list[_Worker] = []
        while self._num_busy() < self._most:
            job = again.popleft() if again else next_job(queue)
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

    def _hear(self, worker: _Worker, again: deque[TaskAttempt]) -> Iterator[TaskReport]:
        """The reports in one message of a worker, or in its death."""
        job = worker.job
        assert job is not None, "only busy workers are heard"
        try:
            kind, value, worker.usage = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            lost = job.died(_words(self._end([worker])))
            if lost is None:
                again.append(job)
            else:
                yield lost
            return
        if kind == "log":
            log_again(value)
        elif kind == "note":
            job.noted()
            yield TaskReport(task=job.number, note=value)
        else:
            worker.job = None
            yield TaskReport(task=job.number, ended=kind == "ended", error=value)

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
        self.job: TaskAttempt | None = None
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
        data = pack(job.task)
        with suppress(OSError):  # it died: that is heard when it is listened to
            if self._tools is not tools:
                self.connection.send_bytes(pickle.dumps(("tools", tools)))
                self._tools = tools
            self.connection.send_bytes(pickle.dumps(("task", data)))

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        code = self._process.wait()
        self.connection.close()
        return code


def _words(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
