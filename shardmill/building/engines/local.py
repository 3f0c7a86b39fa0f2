"""Run tasks in processes of this machine.

Workers are fresh interpreters, started when there is work and reused. They die with their parent,
also when it is killed, and leave Ctrl-C to it. Closing a run kills the busy workers.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from shardmill.building.engines.tasks import (
    RunningTask,
    Task,
    TaskReport,
    TaskRunner,
    log_again,
    next_task,
    pack,
)
from shardmill.machine import Usage, limit_memory
from shardmill.protocols import Closing

_STDERR = 2
_PR_SET_PDEATHSIG = 1
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardmill.building.engines.local import worker_main; "
    "worker_main(*map(int, sys.argv[2:]))"
)


class LocalEngine(Closing):
    """Up to `workers` processes. An `Engine`."""

    def __init__(
        self,
        workers: int,
        *,
        environ: Mapping[str, str] | None = None,
        keep_open: Sequence[int] = (),
        memory: int | None = None,
    ) -> None:
        """`environ` is added to the environment of workers. `keep_open` are file descriptors, such
        as a lock, that they hold open with this process. Each may use `memory` bytes."""
        self.slots = workers
        self._environ = {**os.environ, **(environ or {})}
        self._keep_open = tuple(keep_open)
        self._memory = memory or 0
        self._workers: list[_Worker] = []
        self._used: list[Usage] = []  # of workers that have ended

    def run(self, tools: Any, tasks: Iterator[Task]) -> Generator[TaskReport, None, None]:
        packed = pack(tools)
        again: deque[RunningTask] = deque()
        queue = enumerate(tasks)
        try:
            while self._assign(again, queue, packed):
                busy = {worker.connection: worker for worker in self._workers if worker.task}
                for connection in wait(list(busy)):
                    yield from self._receive(busy[connection], again)  # type: ignore[index]
        finally:
            self._end([worker for worker in self._workers if worker.task])

    def usage(self) -> Usage:
        return Usage.total([*self._used, *(worker.usage for worker in self._workers)])

    def close(self) -> None:
        self._end(list(self._workers))

    def _assign(
        self, again: deque[RunningTask], queue: Iterator[tuple[int, Task]], tools: bytes
    ) -> bool:
        """Give a task to every free slot; whether any worker is busy."""
        chosen: list[_Worker] = []
        num_busy = sum(worker.task is not None for worker in self._workers)
        while num_busy + len(chosen) < self.slots:
            task = again.popleft() if again else next_task(queue)
            if task is None:
                break
            worker = self._idle_worker()
            worker.task = task
            chosen.append(worker)
        # Start all of them before sending to the first: sending waits until the worker listens.
        for worker in chosen:
            worker.send_task(tools)
        return num_busy + len(chosen) > 0

    def _idle_worker(self) -> _Worker:
        for worker in [worker for worker in self._workers if worker.task is None]:
            if worker.process.poll() is None:
                return worker
            self._end([worker])
        worker = _Worker(self._environ, self._keep_open, self._memory)
        self._workers.append(worker)
        return worker

    def _receive(self, worker: _Worker, again: deque[RunningTask]) -> Iterator[TaskReport]:
        """The report in one message of a worker, or in its death."""
        task = worker.task
        assert task is not None, "only busy workers are listened to"
        try:
            kind, value, worker.usage = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            code = self._end([worker])
            lost = task.died(f"killed by signal {-code}" if code < 0 else f"exit code {code}")
            if lost is None:
                again.append(task)
            else:
                yield lost
            return
        if kind == "log":
            log_again(value)
        elif kind == "note":
            yield task.note(value)
        else:
            worker.task = None
            yield TaskReport(task=task.number, ended=kind == "ended", error=value)

    def _end(self, workers: Sequence[_Worker]) -> int:
        """Kill some workers and wait for them; the exit code of the last."""
        code = 0
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            code = worker.process.wait()
            worker.connection.close()
            self._used.append(worker.usage)
            self._workers.remove(worker)
        return code


class _Worker:
    """One process and the socket to it."""

    def __init__(self, environ: Mapping[str, str], keep_open: tuple[int, ...], memory: int) -> None:
        self.connection, theirs = Pipe(duplex=True)
        self.task: RunningTask | None = None
        self.usage = Usage()
        self._tools: bytes | None = None
        with theirs:
            numbers = [theirs.fileno(), os.getpid(), memory]
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # what a task prints must not mix with a command's output
                env=dict(environ),
                pass_fds=(theirs.fileno(), *keep_open),
            )

    def send_task(self, tools: bytes) -> None:
        """Its task, and before the first one the tools."""
        assert self.task is not None, "a worker is chosen for a task"
        data = pack(self.task.task)
        with suppress(OSError):  # a death is noticed when its messages are read
            if self._tools is not tools:
                self.connection.send_bytes(pickle.dumps(("tools", tools)))
                self._tools = tools
            self.connection.send_bytes(pickle.dumps(("task", data)))


def worker_main(descriptor: int, parent: int, memory: int) -> None:
    """What a worker runs until its parent closes the socket. `memory` 0: no limit."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    if memory:
        limit_memory(memory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    lock = threading.Lock()  # several threads may log at the same time

    def send(_kind: str, message: bytes) -> None:
        with lock:
            connection.send_bytes(message)

    def listen() -> None:
        """Ends the process when the parent is gone, whatever it is doing."""
        try:
            while True:
                orders.put(pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)

    runner = TaskRunner(send)
    orders: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
    threading.Thread(target=listen, daemon=True).start()
    while True:
        kind, data = orders.get()
        if kind == "tools":
            runner.set_tools(data)
        else:
            runner.run(data)
