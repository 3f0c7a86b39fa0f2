"""Run tasks on Ray: on this machine, or on all machines of a cluster.

Workers read the input and write the output themselves; small notes come back through Ray. So a
worker that was given up can do no harm however long it lives: it writes what the next one writes.
A task is assigned only to a worker that has started. A worker that dies with its machine is not
held against its task. A Ray started here ends here and leaves no file.
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import shardmill
from shardmill.building.engines.engine import (
    Engine,
    Task,
    TaskRunner,
    Worker,
    WorkerDiedError,
    pack,
)
from shardmill.errors import BuildError, OptionError, missing_extra
from shardmill.machine import limit_memory
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
_HEAD_SECONDS = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60")) / 3  # noqa: SIM112
"""A head may be silent for so long. After three times that Ray itself ends this process."""
_INIT_ERRORS = (RayError, ConnectionError, RuntimeError, ValueError, OSError, ImportError)
"""What `ray.init` is known to raise for an address that is wrong or does not answer."""
_TICK_SECONDS = 1.0
_HOLD_SECONDS = 2.0
"""That a worker may keep messages, to send several at once."""
_PATIENCE_SECONDS = 30.0
_END_SECONDS = 10.0
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
        self.is_lost = False  # its head has gone, and with it all that Ray could do
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
        self._head: str | None = _address()
        if not _answers(self._head):  # Ray Client knows an address that is not for this machine
            self._head = None
        nodes = _nodes()
        self.num_cpus = sum(cpus for cpus, _ in nodes)
        """Of all nodes, when it was opened."""
        self.memory_per_cpu = min((int(m // c) for c, m in nodes if c and m), default=None)
        """Bytes that every node has for each of its CPUs; None when no node says."""

    def check_head(self) -> None:
        """Raise if the head does not answer for a while. Without it, asking about nodes would not
        return before Ray ends this process."""
        deadline = time.monotonic() + _HEAD_SECONDS
        while self._head is not None and not _answers(self._head):
            if time.monotonic() > deadline:
                self.is_lost = True
                raise BuildError(
                    f"Ray's head at {self._head} does not answer any more; finished work is kept: "
                    "start a Ray again, and continue with {resume} (also without Ray)",
                    resume=True,
                )
            time.sleep(_TICK_SECONDS / 4)

    def is_alive(self, node: str) -> bool:
        self.check_head()
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
        if re.fullmatch(r"[^/]+:\d+", address):  # Ray itself would try for ten minutes
            _connect(address, _CONNECT_SECONDS)
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


def _connect(address: str, seconds: float) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def _answers(head: str) -> bool:
    """Whether it takes connections; a kernel does that for a head that is only busy."""
    try:
        _connect(head, _TICK_SECONDS)
    except (OSError, ValueError):
        return False
    return True


def _init(**options: Any) -> None:
    # How long Ray waits for a host that is cut off, also when it is shut down: else two minutes.
    os.environ.setdefault("RAY_grpc_client_keepalive_timeout_ms", "30000")
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


class ShardmillWorker:
    """The actor: runs tasks one at a time in a thread. Ray calls its methods one after another.

    A task starts when its first message is asked for, and pauses when two of its notes were not
    read: one that nobody listens to any more does not go on to its end.
    """

    def __init__(self, environ: Mapping[str, str], paths: Sequence[str], memory: int) -> None:
        """`environ` must be set before a tokenizer is imported. `paths` extend the module search
        path. `memory` bytes may be used beyond what Ray itself took; 0: no limit."""
        os.environ.update(environ)
        sys.path += [path for path in paths if path not in sys.path]
        if memory:
            limit_memory(memory, beyond_current=True)
        self._task: tuple[bytes, bytes | None] | None = None
        self._messages: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
        self._unread = threading.Semaphore(_MAX_UNREAD_NOTES)
        self._runner = TaskRunner(self._send)

    def start(self, tools: bytes) -> dict[str, str]:
        """Who this is: plain strings, which a worker of another version can send too."""
        self._runner.load(tools)
        node = ray.get_runtime_context().get_node_id()
        return {**_VERSIONS, "host": socket.gethostname(), "node": node}

    def assign(self, task: bytes, tools: bytes | None) -> None:
        """The next task, and tools when they are new. Nothing starts yet."""
        self._task = task, tools

    def next_messages(self) -> list[bytes]:
        """The messages of the next seconds, at least one, up to the end of the task. An answer for
        each of them would cost the coordinator a millisecond of CPU."""
        if self._task is not None:
            threading.Thread(target=self._run, args=self._task, daemon=True).start()
            self._task = None
        found: list[bytes] = []
        end = time.monotonic() + _HOLD_SECONDS
        with suppress(Empty):
            while True:
                left = max(end - time.monotonic(), 0.0)
                kind, message = self._messages.get(timeout=left if found else None)
                found.append(message)
                if kind == "note":
                    self._unread.release()
                elif kind in ("ended", "failed"):
                    break
        return found

    def _run(self, task: bytes, tools: bytes | None) -> None:
        try:
            self._runner.run(task, tools)
        except BaseException:  # noqa: BLE001 - ends the process, as in a local worker
            traceback.print_exc()
            os._exit(1)

    def _send(self, kind: str, message: bytes) -> None:
        if kind == "note":
            self._unread.acquire()
        self._messages.put((kind, message))


_remote_worker: Any = _ray.remote(ShardmillWorker)  # once: Ray pickles the class, which takes 30 ms


class RayEngine(Engine):
    """Up to `workers` actors of one CPU each."""

    start_advice = (
        f"every node needs shardmill {_VERSIONS['shardmill']} and Python {_VERSIONS['Python']} "
        "with the extras of this one: install them there"
    )

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
        super().__init__(workers)
        self._cluster = cluster
        self._environ, self._memory = dict(environ or {}), memory or 0
        self._answered: SimpleQueue[RayActor] = SimpleQueue()
        self._next_check = 0.0  # of the head
        self._no_worker_since: float | None = None
        self._warned = False

    def _share(self, tools: bytes) -> Any:
        return ray.put(tools)

    def _start(self, tools: Any) -> RayActor:
        return RayActor(self._cluster, self._environ, self._memory, self._answered, tools)

    def _wait(self, workers: Collection[RayActor]) -> list[RayActor]:
        """Ray says who has answered: `ray.wait` would look at all workers for each message."""
        while True:
            if time.monotonic() > self._next_check:  # also when there is always an answer
                self._cluster.check_head()
                self._next_check = time.monotonic() + _TICK_SECONDS
            try:
                worker = self._answered.get(timeout=_TICK_SECONDS)
            except Empty:
                self._warn_if_stuck()
                continue
            if worker in workers:  # else it was killed
                return [worker]

    def _kill(self, workers: Sequence[RayActor]) -> None:
        """Waits for a while only: what a worker does later can do no harm."""
        if not self._cluster.is_lost:  # else they end with Ray on their machine
            _kill_actors(workers)

    def _warn_if_stuck(self) -> None:
        """Say once that no worker could be placed for a while."""
        if any(worker.state != "starting" for worker in self._workers):
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


class RayActor(Worker):
    """One actor, and what it was asked last."""

    def __init__(
        self,
        cluster: RayCluster,
        environ: Mapping[str, str],
        memory: int,
        answered: SimpleQueue[RayActor],
        tools: Any,
    ) -> None:
        """It is put into `answered` whenever it has answered, or cannot any more."""
        super().__init__()
        options: dict[str, Any] = {"memory": memory} if memory else {}
        self._actor = _remote_worker.options(
            num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD", **options
        ).remote(dict(environ), list(sys.path), memory)
        self._cluster, self._answered = cluster, answered
        self._host = self._node = ""
        self._held: deque[bytes] = deque()  # messages of the last answer
        self._ask(self._actor.start, tools)

    def send(self, task: Task, tools: Any) -> None:
        self._ask(self._actor.assign, pack(task), tools)

    def _ask(self, method: Any, *arguments: Any) -> None:
        if self.task is not None:  # `ray list tasks` shows what each worker reads
            method = method.options(name=self.task.task.name)
        self._answer = method.remote(*arguments).future()
        self._answer.add_done_callback(lambda _: self._answered.put(self))

    def receive(self) -> tuple[str, Any]:
        if not self._held:
            try:
                answer = self._answer.result()
            except RayError as error:
                raise self._death(error) from error
            if self.state == "starting":
                self._check_versions(answer)
                return "started", None
            self._held.extend(answer or ())
        kind, value = "accepted", None
        if self.state == "working":
            kind, value, self.usage = pickle.loads(self._held.popleft())
        if kind == "failed" and self.task is not None:
            log.warning("%s: failed on %s: %s", self.task.task.name, self._host, value)
        if self._held:
            self._answered.put(self)
        elif kind not in ("ended", "failed"):
            self._ask(self._actor.next_messages)  # it continues while notes are kept
        return kind, value

    def kill(self) -> Any:
        """Returns an answer that comes when the actor is gone."""
        ray.kill(self._actor)
        return self._actor.__ray_ready__.remote()

    def _check_versions(self, found: dict[str, str]) -> None:
        """Bytes depend on versions, so it must have those of this process."""
        for name, version in _VERSIONS.items():
            if found[name] != version:
                raise BuildError(
                    f"{found['host']}: a worker there has {name} {found[name]}, this process has "
                    f"{version}: install the same on all nodes, and continue with {{resume}}",
                    resume=True,
                )
        self._host, self._node = found["host"], found["node"]

    def _death(self, error: RayError) -> WorkerDiedError:
        """Whether it lives or not, it does not answer."""
        if self.state == "starting":
            failed = isinstance(error, RayActorError) and error.actor_init_failed
            return WorkerDiedError(_reason(error), cannot_start=failed)
        is_lost = isinstance(error, ActorUnavailableError)
        if not is_lost:
            _kill_actors([self])  # until then Ray may not know that its machine is gone
            is_lost = not self._cluster.is_alive(self._node)
        if is_lost:
            return WorkerDiedError(f"with its machine, {self._host}", with_machine=True)
        return WorkerDiedError(f"on {self._host}: {_reason(error)}")


def _kill_actors(actors: Sequence[RayActor]) -> None:
    answers = [actor.kill() for actor in actors]
    if answers:
        ray.wait(answers, num_returns=len(answers), timeout=_END_SECONDS)


def _reason(error: RayError) -> str:
    """The one sentence that matters in Ray's pages about a failure."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return lines[-1]
    found = " ".join(line for line in lines if line.startswith(("The actor", "Worker", "Task")))
    what, _, detail = (found or lines[0]).partition("Worker exit detail:")
    return (detail or what).strip().partition(" Some common causes")[0].rstrip(".")[:300]
