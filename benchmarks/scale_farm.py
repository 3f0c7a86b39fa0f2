"""A thousand workers in one process, which only wait: the other side of `scale_model.py`.

A worker here is a connection to the coordinator, with a speed of its own. It takes tasks as the
coordinator pickled them, waits as long as their input would take, and answers with the messages of
a real worker, receipts included. Some tasks take ten times as long as others, and some workers die:
their connection ends, in the middle of a task.
"""

from __future__ import annotations

import contextlib
import heapq
import pickle
import random
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardmill.building.engines.engine import Worker, pack
from shardmill.building.engines.local import LocalEngine, LocalWorker
from shardmill.building.segments import Receipt
from shardmill.building.splits import Filler
from shardmill.building.worker import UnitTask
from shardmill.machine import Usage

SPEED_SIGMA = 0.3  # of a worker: lognormal, so that one in 20 is slower than 0.6 of the median
STRAGGLERS = 0.01  # of tasks
STRAGGLER_TIMES = 10.0
TOKENS_PER_BYTE = 0.25


class FarmCounts(msgspec.Struct):
    """What the workers did."""

    tasks: int = 0
    receipts: int = 0
    stragglers: int = 0
    deaths: int = 0
    cpu_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Farm:
    """Plays workers until the coordinator closes the last connection."""

    address: str
    bytes_per_second: float  # of an average worker, on the clock of this machine
    deaths: float  # share of tasks that a worker does not survive
    counts: FarmCounts = field(default_factory=FarmCounts)
    _random: random.Random = field(default_factory=lambda: random.Random(18))
    _due: list[tuple[float, int, _Played, bytes | None]] = field(default_factory=list)
    _number: int = 0

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(4096)
            selector.register(listener, selectors.EVENT_READ)
            alive = 0
            while alive or not self._number:
                wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
                for key, _ in selector.select(wait):
                    if key.data is None:
                        played = _Played(listener.accept()[0], self._random)
                        selector.register(played.connection, selectors.EVENT_READ, played)
                        alive += 1
                        played.send("started", None)
                    elif not self._take(key.data):
                        alive -= 1
                        self._end(selector, key.data)
                alive -= self._answer(selector)
        self.counts.cpu_seconds = time.process_time()

    def _take(self, played: _Played) -> bool:
        """A task, or the end of the connection."""
        try:
            data, _tools = pickle.loads(played.connection.recv_bytes())
        except (EOFError, OSError):
            return False
        played.send("accepted", None)
        task: UnitTask = pickle.loads(data)
        self.counts.tasks += 1
        speed = played.speed * self.bytes_per_second / self._random.uniform(0.9, 1.1)
        if self._random.random() < STRAGGLERS:
            self.counts.stragglers += 1
            speed /= STRAGGLER_TIMES
        at = time.monotonic()
        is_last = self._random.random() < self.deaths
        for receipt, num_bytes in receipts_of(task):
            if is_last:
                self._at(at + self._random.random() * num_bytes / speed, played, None)
                return True
            at += num_bytes / speed
            self.counts.receipts += 1
            self._at(at, played, played.message("note", receipt))
        self._at(at, played, played.message("ended", None))
        return True

    def _at(self, due: float, played: _Played, message: bytes | None) -> None:
        self._number += 1
        heapq.heappush(self._due, (due, self._number, played, message))

    def _answer(self, selector: selectors.BaseSelector) -> int:
        """Send what is due; how many workers died."""
        now, died = time.monotonic(), 0
        while self._due and self._due[0][0] <= now:
            _, _, played, message = heapq.heappop(self._due)
            if played.connection.closed:
                continue
            if message is None:
                self.counts.deaths += 1
                died += 1
                self._end(selector, played)
            else:
                played.write(message)
        return died

    def _end(self, selector: selectors.BaseSelector, played: _Played) -> None:
        selector.unregister(played.connection)
        played.connection.close()


class _Played:
    """One worker."""

    def __init__(self, sock: socket.socket, numbers: random.Random) -> None:
        self.connection: Connection[Any, Any] = Connection(sock.detach())
        self.speed = numbers.lognormvariate(0, SPEED_SIGMA)

    def message(self, kind: str, value: object) -> bytes:
        return pack((kind, value, Usage(cpu_seconds=1.0, peak_bytes=2**28)))

    def send(self, kind: str, value: object) -> None:
        self.write(self.message(kind, value))

    def write(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it was given up; the selector says so next
            self.connection.send_bytes(message)


def receipts_of(task: UnitTask) -> Iterator[tuple[Receipt, int]]:
    """The receipts of a task, and the input bytes of each unit."""
    before = task.before
    for unit in task.units:
        tokens = int(unit.num_bytes * TOKENS_PER_BYTE)
        filler = Filler(task.fill, before)
        for _ in filler.place(np.array([tokens])):
            pass
        yield (
            Receipt(
                feed=unit.feed,
                unit=unit.number,
                plan=unit.plan,
                inputs=unit.inputs,
                mark=unit.mark,
                before=before,
                after=filler.after,
                num_given=tokens // 1000,
                num_tokens=tokens,
                num_bytes=unit.num_bytes,
                cursor=None,
            ),
            unit.num_bytes,
        )
        before = filler.after


class FarmEngine(LocalEngine):
    """The engine of this machine, whose workers are all in one other process."""

    def __init__(self, workers: int, address: str) -> None:
        super().__init__(workers)
        self._address = address

    def _start(self, tools: bytes) -> LocalWorker:
        worker = FarmWorker(self._address, tools)
        self._ready.register(worker.connection, selectors.EVENT_READ, worker)
        return worker


class FarmWorker(LocalWorker):
    """A connection in place of a process."""

    def __init__(self, address: str, _tools: bytes) -> None:
        Worker.__init__(self)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        self.connection = Connection(sock.detach())
        self.process = _NoProcess()  # type: ignore[assignment]
        self.sending = threading.Thread()  # of nothing: no process loads tools
        self.sending.start()


class _NoProcess:
    def kill(self) -> None:
        """The farm sees the end of the connection."""

    def wait(self) -> int:
        return -9


def main() -> None:
    address, bytes_per_second, deaths, out = sys.argv[1:]
    farm = Farm(address=address, bytes_per_second=float(bytes_per_second), deaths=float(deaths))
    farm.run()
    Path(out).write_bytes(msgspec.json.encode(farm.counts))


if __name__ == "__main__":
    main()
