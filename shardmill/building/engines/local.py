"""Workers of this machine: fresh interpreters, started when there is work and reused.

They die with their parent, also when it is killed, and leave Ctrl-C to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from shardmill.building.engines.engine import (
    Engine,
    Task,
    TaskRunner,
    Worker,
    WorkerDiedError,
    pack,
)
from shardmill.machine import limit_memory

_STDERR = 2
_PR_SET_PDEATHSIG = 1
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardmill.building.engines.local import worker_main; "
    "worker_main(*map(int, sys.argv[2:]))"
)


class LocalEngine(Engine):
    """Up to `workers` processes."""

    start_advice = "its stderr says why: allow more {memory}, use fewer {workers}"

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
        super().__init__(workers)
        self._environ = {**os.environ, **(environ or {})}
        self._keep_open = tuple(keep_open)
        self._memory = memory or 0
        self._ready = DefaultSelector()  # kept: the work for a message does not grow with workers

    def _start(self, tools: bytes) -> LocalWorker:
        worker = LocalWorker(self._environ, self._keep_open, self._memory, tools)
        self._ready.register(worker.connection, EVENT_READ, worker)
        return worker

    def _wait(self, _workers: Collection[LocalWorker]) -> list[LocalWorker]:
        return [key.data for key, _ in self._ready.select()]

    def _kill(self, workers: Sequence[LocalWorker]) -> None:
        for worker in workers:
            self._ready.unregister(worker.connection)
            worker.process.kill()
        for worker in workers:
            worker.process.wait()
            worker.sending.join()
            worker.connection.close()


class LocalWorker(Worker):
    """One process and the socket to it."""

    def __init__(
        self, environ: Mapping[str, str], keep_open: tuple[int, ...], memory: int, tools: bytes
    ) -> None:
        super().__init__()
        self.connection, theirs = Pipe(duplex=True)
        with theirs:
            numbers = [theirs.fileno(), os.getpid(), memory]
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # what a task prints must not mix with a command's output
                env=dict(environ),
                pass_fds=(theirs.fileno(), *keep_open),
            )

        # They are more than the socket holds, and the process reads it when it has started.
        self.sending = threading.Thread(target=self._send, args=(None, tools), daemon=True)
        self.sending.start()

    def send(self, task: Task, tools: bytes | None) -> None:
        self.sending.join()
        self._send(pack(task), tools)

    def _send(self, task: bytes | None, tools: bytes | None) -> None:
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps((task, tools)))

    def receive(self) -> tuple[str, Any]:
        try:
            kind, value, self.usage = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as gone:
            self.process.kill()
            code = self.process.wait()
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            raise WorkerDiedError(how) from gone
        return kind, value


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
    orders: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    threading.Thread(target=listen, daemon=True).start()
    _, tools = orders.get()
    runner.load(tools)
    runner.report("started", None)
    while True:
        task, tools = orders.get()
        runner.report("accepted", None)
        runner.run(task, tools)
