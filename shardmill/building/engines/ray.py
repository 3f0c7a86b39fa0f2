"""Run tasks on Ray: on this machine, or on all machines of a cluster.

Workers see the input and nothing else of this machine. Their results come back through Ray, and
this process puts them on disk, so a worker that was given up can do no harm however long it lives.
A task is assigned only to a worker that has started. A worker that dies with its machine is not
held against its task. A Ray started here ends here and leaves no file.
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import shardmill
from shardmill.building.engines.tasks import (
    PortableTask,
    RunningTask,
    Task,
    TaskReport,
    TaskRunner,
    log_again,
    next_task,
    pack,
)
from shardmill.errors import BuildError, OptionError, missing_extra
from shardmill.machine import Usage, limit_memory
from shardmill.protocols import Closing

try:
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError
except ImportError as missing:
    raise missing_extra("ray", "ray") from missing

log = logging.getLogger(__name__)

_ray: Any = ray  # some of its functions have no types
_SOCKET_CHARS = 70
"""Characters of a socket's path below Ray's folder; the kernel allows 107 in all."""
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_CONNECT_SECONDS = 20.0
_INIT_ERRORS = (RayError, ConnectionError, RuntimeError, ValueError, OSError, ImportError)
"""What `ray.init` is known to raise for an address that is wrong or does not answer."""
_TICK_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0
_END_SECONDS = 10.0
_MAX_FAILED_STARTS = 3
_MAX_UNREAD_NOTES = 2
_VERSIONS = {
    "shardmill": shardmill.__version__,
    "Python": ".".join(platform.python_version_tuple()[:2]),
}


class RayCluster(Closing):
    """A connection to a running cluster, or to one that is started on this machine."""

    def __init__(self, address: str | None = None, *, workers: int | None = None) -> None:
        """Without an address a Ray is started here, with CPUs for `workers` (None: those of this
        machine). A Ray that this process has joined already is used and left as it was."""
        self._joined = not ray.is_initialized()
        self._folder: Path | None = None
        self._auth: dict[str, str | None] = {}  # the environment before a Ray was started here
        if not self._joined:
            if address not in (None, "auto", _address()):
                raise OptionError(
                    f"{{ray_address}}: this process has joined the Ray at {_address()} already: "
                    "leave it with ray.shutdown(), or give no address to use it",
                    ray_address=address,
                )
        elif address is None:
            self._start(workers)
        else:
            _join(address)
        self.is_elsewhere = self._folder is None
        """Whether it was running before, so that it may have other machines."""
        if self.is_elsewhere:
            log.info("Ray at %s: %s", _address(), self.describe())
        nodes = _nodes()
        self.num_cpus = sum(cpus for cpus, _ in nodes)
        """Of all nodes, when it was opened."""
        self.memory_per_cpu = min((int(m // c) for c, m in nodes if c and m), default=None)
        """Bytes that every node has for each of its CPUs; None when no node says."""

    def is_alive(self, node: str) -> bool:
        return any(found["NodeID"] == node and found["Alive"] for found in _ray.nodes())

    def describe(self) -> str:
        """What it has, for messages."""
        nodes = _nodes()
        free = _ray.available_resources().get("CPU", 0)
        return f"{len(nodes)} nodes with {sum(c for c, _ in nodes)} CPUs, {free:.0f} of them free"

    def close(self) -> None:
        if self._joined:
            ray.shutdown()
            self._joined = False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._auth:
            _restore_auth(self._auth)
            self._auth = {}

    def _start(self, workers: int | None) -> None:
        try:
            self._folder = _short_folder()
            self._auth = _set_token()
            _init(
                address="local",
                num_cpus=workers,
                include_dashboard=False,
                _temp_dir=str(self._folder),
            )
        except _INIT_ERRORS as error:
            self.close()
            raise BuildError(
                f"Ray could not be started on this machine: {error}; build without it ({{run_on}}),"
                " or give the address of a running one ({ray_address})",
                run_on="local",
                ray_address=...,
            ) from error


def _nodes() -> list[tuple[int, float]]:
    """CPUs and bytes of memory of each living node."""
    found = [node["Resources"] for node in _ray.nodes() if node["Alive"]]
    return [(int(one.get("CPU", 0)), float(one.get("memory", 0))) for one in found]


def _join(address: str) -> None:
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal() and "://" not in host:  # Ray itself would try for ten minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        _init(address=address)
    except _INIT_ERRORS as error:
        ray.shutdown()
        reason = " ".join(str(error).split("\n\n")[0].split())[:400] or type(error).__name__
        raise OptionError(
            f"{{ray_address}}: {reason}; wanted the address of a running Ray with the Python and "
            "Ray of this process: 'auto' on one of its nodes, or host:port of its head; a cluster "
            "that asks for a token needs RAY_AUTH_MODE=token here. `ray status` shows whether it "
            "answers",
            ray_address=address,
        ) from error


def _init(**options: Any) -> None:
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _set_token() -> dict[str, str | None]:
    """Set a token for a Ray that is started here; returns the environment before.

    Without one Ray makes a token and leaves it in ~/.ray, where later clusters of this user find it
    and ask for it.
    """
    before = {name: os.environ.get(name) for name in _AUTH}
    known = before["RAY_AUTH_TOKEN"] or before["RAY_AUTH_TOKEN_PATH"]
    if not known and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return before


def _restore_auth(before: dict[str, str | None]) -> None:
    """Undo what `_set_token` and Ray changed, and let Ray forget the token it has read."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with suppress(AttributeError):  # a Ray that is older than its tokens
        _ray._raylet.Config.initialize("")
        _ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _address() -> str:
    """Of the Ray that this process has joined."""
    return str(ray.get_runtime_context().gcs_address)


def _short_folder() -> Path:
    """A new folder whose path is short enough for Ray's sockets."""
    usual = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=usual))
    if len(str(folder)) + _SOCKET_CHARS <= 107:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))


class RayWorker:
    """The actor: runs tasks one at a time in a thread. Ray calls its methods one after another.

    A task starts when its first message is asked for, and pauses when two of its notes were not
    read. Nothing is written but what the task itself writes.
    """

    def __init__(self, environ: Mapping[str, str], paths: Sequence[str], memory: int) -> None:
        """`environ` must be set before a tokenizer is imported. `paths` extend the module search
        path. `memory` bytes may be used beyond what Ray itself took; 0: no limit."""
        os.environ.update(environ)
        sys.path += [path for path in paths if path not in sys.path]
        if memory:
            limit_memory(memory, beyond_current=True)
        self._task: bytes | None = None
        self._messages: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
        self._unread = threading.Semaphore(_MAX_UNREAD_NOTES)
        self._runner = TaskRunner(self._send)

    def start(self) -> dict[str, str]:
        """Who this is: plain strings, which a worker of another version can send too."""
        node = ray.get_runtime_context().get_node_id()
        return {**_VERSIONS, "host": socket.gethostname(), "node": node}

    def assign(self, task: bytes, tools: bytes | None) -> None:
        """The next task, and tools when they are new. Nothing starts yet."""
        if tools is not None:
            self._runner.set_tools(tools)
        self._task = task

    def next_message(self) -> bytes:
        """The next message; waits for it."""
        if self._task is not None:
            threading.Thread(target=self._run, args=(self._task,), daemon=True).start()
            self._task = None
        kind, message = self._messages.get()
        if kind == "note":
            self._unread.release()
        return message

    def _run(self, task: bytes) -> None:
        try:
            self._runner.run(task)
        except BaseException:  # noqa: BLE001 - ends the process, as in a local worker
            traceback.print_exc()
            os._exit(1)

    def _send(self, kind: str, message: bytes) -> None:
        if kind == "note":
            self._unread.acquire()
        self._messages.put((kind, message))


class RayEngine(Closing):
    """Up to `workers` actors of one CPU each. An `Engine`."""

    def __init__(
        self,
        cluster: RayCluster,
        workers: int,
        *,
        environ: Mapping[str, str] | None = None,
        memory: int | None = None,
    ) -> None:
        """`environ` is added to the environment of workers. Each is placed where `memory` bytes
        are free, and may use that much."""
        self.slots = workers
        self._cluster = cluster
        self._environ, self._memory = dict(environ or {}), memory or 0
        self._actors: list[_Actor] = []
        self._used: list[Usage] = []  # of workers that have ended
        self._failed_starts = 0  # in a row
        self._no_worker_since: float | None = None
        self._warned = False

    def run(self, tools: Any, tasks: Iterator[Task]) -> Generator[TaskReport, None, None]:
        packed = ray.put(pack(tools))
        waiting: deque[RunningTask] = deque()
        queue = enumerate(tasks)
        try:
            while self._assign(waiting, queue, packed):
                for actor in self._ready():
                    yield from self._receive(actor, waiting)
        finally:
            self._end([actor for actor in self._actors if actor.task])

    def usage(self) -> Usage:
        return Usage.total([*self._used, *(actor.usage for actor in self._actors)])

    def close(self) -> None:
        self._end(list(self._actors))

    def _assign(
        self, waiting: deque[RunningTask], queue: Iterator[tuple[int, Task]], tools: Any
    ) -> bool:
        """Take tasks for all slots, assign them to idle actors, start missing actors; whether there
        is anything to wait for."""
        busy = sum(actor.task is not None for actor in self._actors)
        while busy + len(waiting) < self.slots and (task := next_task(queue)) is not None:
            waiting.append(task)
        for actor in self._actors:
            if waiting and actor.state == "idle":
                actor.assign(waiting.popleft(), tools)
                busy += 1
        for _ in range(min(self.slots, busy + len(waiting)) - len(self._actors)):
            self._actors.append(_Actor(self._environ, self._memory))
        return busy + len(waiting) > 0

    def _ready(self) -> list[_Actor]:
        """The actors that have an answer; waits for one."""
        asked = {actor.answer: actor for actor in self._actors if actor.answer is not None}
        while True:
            found, _ = ray.wait(list(asked), timeout=_TICK_SECONDS)
            if found:
                more, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
                return [asked[answer] for answer in more]
            self._warn_if_stuck()

    def _receive(self, actor: _Actor, waiting: deque[RunningTask]) -> Iterator[TaskReport]:
        """The report in one answer of an actor, or in its failure."""
        try:
            answer = ray.get(actor.answer)
        except RayError as error:
            lost = self._gone(actor, error, waiting)
            if lost is not None:
                yield lost
            return
        if actor.state == "starting":
            self._failed_starts = 0
            actor.check_versions(answer)
            return
        if actor.state == "assigned":
            actor.ask()
            return
        task = actor.task
        assert task is not None, "only actors with a task are asked"
        kind, value, actor.usage = pickle.loads(answer)
        if kind in ("log", "note"):
            actor.ask()  # it continues while this process writes
        if kind == "log":
            log_again(value)
        elif kind == "note":
            yield task.note(task.task.keep(value) if isinstance(task.task, PortableTask) else value)
        else:
            actor.rest()
            if kind == "failed":
                log.warning("%s: failed on %s: %s", task.name, actor.host, value)
            yield TaskReport(task=task.number, ended=kind == "ended", error=value)

    def _gone(
        self, actor: _Actor, error: RayError, waiting: deque[RunningTask]
    ) -> TaskReport | None:
        """Give up an actor that does not answer, whether it lives or not."""
        self._end([actor])
        if actor.state == "starting":
            self._failed_starts += 1
            failed = isinstance(error, RayActorError) and error.actor_init_failed
            if failed or self._failed_starts >= _MAX_FAILED_STARTS:
                raise BuildError(
                    f"a worker on Ray cannot start: {_reason(error)}; every node needs shardmill "
                    f"{_VERSIONS['shardmill']} and Python {_VERSIONS['Python']} with the extras of "
                    "this one: install them there, and continue with {resume}",
                    resume=True,
                ) from error
            return None
        task = actor.task
        assert task is not None, "an actor without a task is asked nothing"
        lost = None
        if actor.state == "working":  # else the task had not started
            if isinstance(error, ActorUnavailableError) or not self._cluster.is_alive(actor.node):
                lost = task.died(f"with its machine, {actor.host}", with_machine=True)
            else:
                lost = task.died(f"on {actor.host}: {_reason(error)}")
        if lost is None:
            waiting.appendleft(task)
        return lost

    def _warn_if_stuck(self) -> None:
        """Say once that no worker could be placed for a while."""
        if any(actor.state != "starting" for actor in self._actors):
            self._no_worker_since = None
            return
        now = time.monotonic()
        self._no_worker_since = self._no_worker_since or now
        if now - self._no_worker_since > _PATIENCE_SECONDS and not self._warned:
            self._warned = True
            log.warning(
                "no worker could be placed for %.0f s: Ray has %s, and a worker needs 1 CPU%s; "
                "waiting (Ctrl-C ends the build; it can be resumed)",
                now - self._no_worker_since,
                self._cluster.describe(),
                f" and {self._memory:,} bytes" if self._memory else "",
            )

    def _end(self, actors: Sequence[_Actor]) -> None:
        """Kill some actors and wait a while until Ray says that they are gone."""
        answers = [actor.kill() for actor in actors]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=_END_SECONDS)
        for actor in actors:
            self._used.append(actor.usage)
            self._actors.remove(actor)


class _Actor:
    """One actor as the coordinator sees it, and what it was asked last."""

    def __init__(self, environ: Mapping[str, str], memory: int) -> None:
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
        }
        if memory:
            options["memory"] = memory
        remote: Any = ray.remote(RayWorker)
        self._actor = remote.options(**options).remote(dict(environ), list(sys.path), memory)
        self.state: Literal["starting", "idle", "assigned", "working"] = "starting"
        self.answer: Any = self._actor.start.remote()
        self.task: RunningTask | None = None
        self.host = self.node = ""
        self.usage = Usage()
        self._tools: Any = None

    def check_versions(self, found: dict[str, str]) -> None:
        """It has started. Bytes depend on versions, so it must have those of this process."""
        for name, version in _VERSIONS.items():
            if found[name] != version:
                raise BuildError(
                    f"{found['host']}: a worker there has {name} {found[name]}, this process has "
                    f"{version}: install the same on all nodes, and continue with {{resume}}",
                    resume=True,
                )
        self.host, self.node = found["host"], found["node"]
        self.rest()

    def assign(self, task: RunningTask, tools: Any) -> None:
        """A task, and before the first one the tools. Nothing starts before `ask`."""
        work = task.task.detached() if isinstance(task.task, PortableTask) else task.task
        new = None if tools is self._tools else tools
        self.task, self.state, self._tools = task, "assigned", tools
        self.answer = self._actor.assign.remote(pack(work), new)

    def ask(self) -> None:
        self.state, self.answer = "working", self._actor.next_message.remote()

    def rest(self) -> None:
        self.task, self.state, self.answer = None, "idle", None

    def kill(self) -> Any:
        """Returns an answer that comes when the actor is gone."""
        ray.kill(self._actor)
        return self._actor.start.remote()


def _reason(error: RayError) -> str:
    """The one sentence that matters in Ray's pages about a failure."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return lines[-1]
    found = " ".join(line for line in lines if line.startswith(("The actor", "Worker", "Task")))
    what, _, detail = (found or lines[0]).partition("Worker exit detail:")
    return (detail or what).strip().partition(" Some common causes")[0].rstrip(".")[:300]
