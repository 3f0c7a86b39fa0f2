"""Tasks on Ray: on this machine, or on all machines of a cluster.

In: tasks.  Out: reports.
Promise: as `protocols.Engine`. Workers see the input and nothing else of this machine: what they
make comes back through Ray, and this process puts it on disk. So a worker that was given up can do
no harm, however long it lives. A task is given only to a worker that has come to life; one that
cannot be placed is waited for, and the others do its work. A worker that dies with its machine is
not held against its task.
Not here: what happens inside a worker (ray_worker.py), how Ray is found (ray_cluster.py).

One worker on Ray: an actor that does tasks, one at a time, and is asked what became of them.

In: a task as bytes.  Out: messages (kind, value, usage) as bytes, one for each `hear`.
Promise: a task begins when it is first asked for, goes on in a thread, and waits when two of its
notes were not heard; nothing is written but what the task itself writes.
Not here: which task comes next (ray_engine.py), what is told of one (telling.py). Ray starts this
process, and ends it with the one that asked for it.
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

import shardmill
from shardmill.building.engines.ray_cluster import RayCluster
from shardmill.building.engines.tasks import (
    Logs,
    TaskAttempt,
    Tools,
    allow_memory,
    do_task,
    log_again,
    next_job,
    pack,
    usage_of_this_process,
)
from shardmill.errors import BuildError
from shardmill.protocols import Closing, PortableTask, Task, TaskReport, Usage

log = logging.getLogger(__name__)


_UNHEARD = 2


class RayWorker:
    """Ray calls its methods one after the other, in one thread."""

    def __init__(self, environ: Mapping[str, str], paths: Sequence[str], memory: int) -> None:
        """`environ` counts before a tokenizer is imported; modules are also looked for in `paths`;
        `memory` bytes may be used beyond what Ray itself took, 0: no limit."""
        os.environ.update(environ)
        sys.path += [path for path in paths if path not in sys.path]
        if memory:
            allow_memory(memory)
        self._tools = Tools()
        self._task: bytes | None = None
        self._messages: SimpleQueue[tuple[bool, bytes]] = SimpleQueue()  # a note?, the message
        self._room = threading.Semaphore(_UNHEARD)
        logs = Logs(self._tell)
        logs.addFilter(lambda record: not record.name.startswith("ray"))
        logging.basicConfig(level=logging.INFO, handlers=[logs], force=True)

    def greet(self) -> dict[str, str]:
        """Who this is; plain strings, since another version must be able to read them."""
        return {
            "shardmill": shardmill.__version__,
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "host": socket.gethostname(),
            "node": ray.get_runtime_context().get_node_id(),
        }

    def take(self, task: bytes, tools: bytes | None) -> None:
        """The next task, and tools when they are new. Nothing begins."""
        if tools is not None:
            self._tools.bring(tools)
        self._task = task

    def hear(self) -> bytes:
        """The next message; waits for it."""
        if self._task is not None:
            threading.Thread(target=self._work, args=(self._task,), daemon=True).start()
            self._task = None
        is_note, message = self._messages.get()
        if is_note:
            self._room.release()
        return message

    def _work(self, task: bytes) -> None:
        try:
            do_task(task, self._tools, self._tell)
        except BaseException:  # noqa: BLE001 - as in a process of its own, it ends the process
            traceback.print_exc()
            os._exit(1)

    def _tell(self, kind: str, value: Any) -> None:
        if kind == "note":
            self._room.acquire()
        self._messages.put((kind == "note", pack((kind, value, usage_of_this_process()))))


_TICK_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0
_END_SECONDS = 10.0
_STILLBORN = 3
_VERSIONS = {
    "shardmill": shardmill.__version__,
    "Python": ".".join(platform.python_version_tuple()[:2]),
}


class RayEngine(Closing):
    """Up to `workers` actors of one CPU each."""

    def __init__(
        self,
        cluster: RayCluster,
        workers: int,
        *,
        environ: Mapping[str, str] | None = None,
        memory: int | None = None,
    ) -> None:
        """`environ` is added to the environment of workers; each is placed where `memory` bytes
        are free, and may use so many."""
        self._cluster, self._most = cluster, workers
        self._environ, self._memory = dict(environ or {}), memory or 0
        self._hands: list[_Hand] = []
        self._used: list[Usage] = []  # of workers that are gone
        self._stillborn = 0  # workers that died before they greeted, one after the other
        self._idle_since: float | None = None  # that nobody has greeted
        self._told = False

    @property
    def slots(self) -> int:
        return self._most

    def run(self, tools: Any, tasks: Iterator[Task]) -> Generator[TaskReport, None, None]:
        packed = ray.put(pack(tools))
        waiting: deque[TaskAttempt] = deque()
        queue = enumerate(tasks)
        try:
            while self._hand_out(waiting, queue, packed):
                for hand in self._ready():
                    yield from self._hear(hand, waiting)
        finally:
            self._end([hand for hand in self._hands if hand.job is not None])

    def usage(self) -> Usage:
        used = [*self._used, *(hand.usage for hand in self._hands)]
        return Usage(
            cpu_seconds=sum(usage.cpu_seconds for usage in used),
            peak_bytes=max((usage.peak_bytes for usage in used), default=0),
        )

    def close(self) -> None:
        self._end(list(self._hands))

    def _hand_out(
        self, waiting: deque[TaskAttempt], queue: Iterator[tuple[int, Task]], tools: Any
    ) -> bool:
        """Take tasks for all slots, give them to those who can work, call for more who can; whether
        there is anything to wait for."""
        busy = sum(hand.job is not None for hand in self._hands)
        while busy + len(waiting) < self._most and (job := next_job(queue)) is not None:
            waiting.append(job)
        for hand in self._hands:
            if waiting and hand.state == "idle":
                hand.give(waiting.popleft(), tools)
                busy += 1
        for _ in range(min(self._most, busy + len(waiting)) - len(self._hands)):
            self._hands.append(_Hand(self._environ, self._memory))
        return busy + len(waiting) > 0

    def _ready(self) -> list[_Hand]:
        """Those who have an answer; waits for one."""
        asked = {hand.answer: hand for hand in self._hands if hand.answer is not None}
        while True:
            found, _ = ray.wait(list(asked), timeout=_TICK_SECONDS)
            if found:
                more, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
                return [asked[answer] for answer in more]
            self._say_if_stuck()

    def _hear(self, hand: _Hand, waiting: deque[TaskAttempt]) -> Iterator[TaskReport]:
        """What comes of one answer, or of its failure."""
        try:
            answer = ray.get(hand.answer)
        except RayError as error:
            yield from self._gone(hand, error, waiting)
            return
        if hand.state == "called":
            self._stillborn = 0
            hand.greeted(answer)
        elif hand.state == "given":
            hand.ask()
        else:
            yield from self._told_by(hand, answer)

    def _told_by(self, hand: _Hand, message: bytes) -> Iterator[TaskReport]:
        job = hand.job
        assert job is not None, "only those at work are asked"
        kind, value, hand.usage = pickle.loads(message)
        if kind in ("log", "note"):
            hand.ask()  # it goes on while this process writes
        if kind == "log":
            log_again(value)
        elif kind == "note":
            note = job.task.keep(value) if isinstance(job.task, PortableTask) else value
            job.noted()
            yield TaskReport(task=job.number, note=note)
        else:
            hand.rest()
            if kind == "failed":
                log.warning("%s: failed on %s: %s", job.name, hand.host, value)
            yield TaskReport(task=job.number, ended=kind == "ended", error=value)

    def _gone(
        self, hand: _Hand, error: RayError, waiting: deque[TaskAttempt]
    ) -> Iterator[TaskReport]:
        """A worker that does not answer is given up, whether it lives or not."""
        self._end([hand])
        if hand.state == "called":
            self._check_birth(error)
            return
        job = hand.job
        assert job is not None, "who has no task is asked nothing"
        lost = None
        if hand.state == "working":  # else nothing of the task had begun
            if isinstance(error, ActorUnavailableError) or not self._cluster.lives(hand.node):
                lost = job.parted(f"with its machine, {hand.host}")
            else:
                lost = job.died(f"on {hand.host}: {_words(error)}")
        if lost is None:
            waiting.appendleft(job)
        else:
            yield lost

    def _check_birth(self, error: RayError) -> None:
        """Workers that never come to life are an error, not something to try for ever."""
        self._stillborn += 1
        failed = isinstance(error, RayActorError) and error.actor_init_failed
        if failed or self._stillborn >= _STILLBORN:
            raise BuildError(
                f"a worker on Ray cannot start: {_words(error)}; every node needs shardmill "
                f"{_VERSIONS['shardmill']} and Python {_VERSIONS['Python']} with the extras of "
                "this one: install them there, and go on with resume=True"
            ) from error

    def _say_if_stuck(self) -> None:
        if any(hand.state != "called" for hand in self._hands):
            self._idle_since = None
            return
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        if now - self._idle_since > _PATIENCE_SECONDS and not self._told:
            self._told = True
            memory = f" and {self._memory:,} bytes" if self._memory else ""
            log.warning(
                "no worker could be placed for %.0f s: Ray has %s, and a worker wants 1 CPU%s; "
                "waiting (Ctrl-C ends the build; it can be resumed)",
                now - self._idle_since,
                self._cluster.describe(),
                memory,
            )

    def _end(self, hands: Sequence[_Hand]) -> None:
        """Kill some workers and wait, a while, until Ray says that they are gone."""
        answers = [hand.kill() for hand in hands]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=_END_SECONDS)
        for hand in hands:
            self._used.append(hand.usage)
            self._hands.remove(hand)


class _Hand:
    """One actor, and what it was asked last."""

    def __init__(self, environ: Mapping[str, str], memory: int) -> None:
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
        }
        if memory:
            options["memory"] = memory
        actor: Any = ray.remote(RayWorker)
        self._actor = actor.options(**options).remote(dict(environ), list(sys.path), memory)
        self.state: Literal["called", "idle", "given", "working"] = "called"
        self.answer: Any = self._actor.greet.remote()
        self.job: TaskAttempt | None = None
        self.host = self.node = ""
        self.usage = Usage(cpu_seconds=0.0, peak_bytes=0)
        self._tools: Any = None

    def greeted(self, found: dict[str, str]) -> None:
        """It lives. Bytes depend on versions, so it must have those of this process."""
        for name, version in _VERSIONS.items():
            if found[name] != version:
                raise BuildError(
                    f"{found['host']}: a worker there has {name} {found[name]}, this process has "
                    f"{version}: install the same on all nodes, and go on with resume=True"
                )
        self.host, self.node = found["host"], found["node"]
        self.rest()

    def give(self, job: TaskAttempt, tools: Any) -> None:
        """A task, and before the first one the tools. Nothing begins before it is asked."""
        task = job.task.elsewhere() if isinstance(job.task, PortableTask) else job.task
        new = None if tools is self._tools else tools
        self.job, self.state, self._tools = job, "given", tools
        self.answer = self._actor.take.remote(pack(task), new)

    def ask(self) -> None:
        self.state, self.answer = "working", self._actor.hear.remote()

    def rest(self) -> None:
        self.job, self.state, self.answer = None, "idle", None

    def kill(self) -> Any:
        """Gives an answer that comes when it is gone."""
        ray.kill(self._actor)
        return self._actor.greet.remote()


def _words(error: RayError) -> str:
    """What happened, of Ray's pages about it."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return lines[-1]
    told = " ".join(line for line in lines if line.startswith(("The actor", "Worker", "Task")))
    what, _, detail = (told or lines[0]).partition("Worker exit detail:")
    return (detail or what).strip().partition(" Some common causes")[0].rstrip(".")[:300]
