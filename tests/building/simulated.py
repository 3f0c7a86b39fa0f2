"""Workers as threads that run one at a time, in an order drawn from a seed, and die as it says.

The real `Engine`, scheduler and tasks; only processes are simulated. A run is a function of its
seed, so a failure is found again, and thousands of orders are tried in the time of one real build.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from shardmill.building.engines.engine import Engine, Task, Worker, WorkerDiedError, pack
from shardmill.records import Ragged
from shardmill.tokenizers import ByteTokenizer


class Killed(BaseException):
    """Ends the thread of a worker, as a signal ends a process."""


class Draws:
    """What happens next."""

    def __init__(
        self, seed: int, *, deaths: float = 0.0, errors: float = 0.0, losses: float = 0.0
    ) -> None:
        """Shares of the moments at which a worker dies, fails, or is lost and lives on."""
        self.random = random.Random(seed)
        self.deaths, self.errors, self.losses = deaths, errors, losses

    def dies(self) -> bool:
        return self.random.random() < self.deaths

    def fails(self) -> bool:
        return self.random.random() < self.errors

    def is_lost(self) -> bool:
        return self.random.random() < self.losses


_current: Draws | None = None


class Mortal(ByteTokenizer):
    """Kills its worker, or fails in it, when the draws of the simulation say so."""

    def encode_batch(self, texts: Any) -> Ragged:
        if _current is not None and getattr(_worker, "is_one", False):
            if _current.dies():
                raise Killed
            if _current.fails():
                raise OSError(5, "Input/output error", "somewhere")
        return super().encode_batch(texts)


_worker = threading.local()


class SimulatedWorker(Worker):
    """A thread that runs only while `receive` waits for its next message."""

    def __init__(self, draws: Draws, tools: bytes) -> None:
        super().__init__()
        self._draws = draws
        self._thread: threading.Thread | None = None
        self._go = threading.Semaphore(0)
        self._said = threading.Semaphore(0)
        self._message: tuple[str, Any] = ("", None)
        self._is_killed = False
        self._unpacked = pickle.loads(tools)
        self.is_lost = False

    def send(self, task: Task, tools: Any) -> None:
        if tools is not None:
            self._unpacked = pickle.loads(tools)
        copy = pickle.loads(pack(task))
        self._thread = threading.Thread(target=self._run, args=(copy,), daemon=True)

    def receive(self) -> tuple[str, Any]:
        if self.state == "starting":
            return "started", None
        assert self._thread is not None
        if self.state == "assigned":
            self._thread.start()
            return "accepted", None
        if self._draws.is_lost():
            self.is_lost = True
            raise WorkerDiedError("with its machine", with_machine=True)
        if self._draws.dies():
            raise WorkerDiedError("killed before a unit")
        self._step()
        if self._message[0] == "killed":
            raise WorkerDiedError("killed in a unit")
        if self._draws.dies():
            raise WorkerDiedError("killed after a unit, before it could be heard")
        return self._message

    def kill(self) -> None:
        self._is_killed = True
        if self._thread is not None and self._thread.is_alive():
            self._step()
            self._thread.join()

    def live_on(self) -> None:
        """Do one more unit, though nobody listens."""
        if self._thread is not None and self._thread.is_alive():
            self._step()

    def _step(self) -> None:
        self._go.release()
        self._said.acquire()

    def _run(self, task: Task) -> None:
        _worker.is_one = True
        try:
            self._pause()
            task.run(self._unpacked, self._emit)
            self._message = ("ended", None)
        except Killed:
            self._message = ("killed", None)
        except Exception as error:  # noqa: BLE001 - the coordinator decides
            self._message = ("failed", error)
        self._said.release()

    def _emit(self, note: Any) -> None:
        self._message = ("note", pickle.loads(pack(note)))
        self._said.release()
        self._pause()

    def _pause(self) -> None:
        self._go.acquire()
        if self._is_killed:
            raise Killed


class SimulatedEngine(Engine):
    start_advice = "none"

    def __init__(self, slots: int, draws: Draws) -> None:
        super().__init__(slots)
        self._draws = draws
        self._lost: list[SimulatedWorker] = []

    def _start(self, tools: Any) -> SimulatedWorker:
        return SimulatedWorker(self._draws, tools)

    def close(self) -> None:
        super().close()
        for worker in self._lost:
            worker.kill()

    def _wait(self, workers: Sequence[Any]) -> Sequence[Any]:
        if self._lost and self._draws.random.random() < 0.15:
            self._draws.random.choice(self._lost).live_on()
        return [self._draws.random.choice(list(workers))]

    def _kill(self, workers: Sequence[Any]) -> None:
        for worker in workers:
            if worker.is_lost:
                self._lost.append(worker)
            else:
                worker.kill()


@contextmanager
def simulated(draws: Draws) -> Iterator[None]:
    """Builds inside of this block have such workers."""
    global _current  # a tokenizer is pickled, so it cannot hold the draws
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "shardmill.building.scheduler.LocalEngine",
            lambda workers, **_options: SimulatedEngine(workers, draws),
        )
        _current = draws
        try:
            yield
        finally:
            _current = None
