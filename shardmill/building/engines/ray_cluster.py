"""A connection to Ray: a cluster that runs, or one that is started on this machine.

In: an address, or none.  Out: what the cluster has, and which of its nodes live.
Promise: a Ray that was started here ends here, and leaves no file; one that this process had
joined before is used and left as it was. What Ray logs stays away from stdout.
Not here: what runs on it (ray_engine.py).
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardmill.errors import BuildError, OptionError, missing_extra
from shardmill.protocols import Closing

try:
    import ray
    from ray.exceptions import RayError
except ImportError as missing:
    raise missing_extra("ray", "ray") from missing

log = logging.getLogger(__name__)

_ray: Any = ray  # some of its functions have no types
_SOCKETS = 70
"""Characters of a socket's name below Ray's folder; the kernel takes 107 in all."""
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_KNOCK_SECONDS = 20.0
_ANSWERS = (RayError, ConnectionError, RuntimeError, ValueError, OSError, ImportError)
"""What `ray.init` is known to raise for an address that is wrong or does not answer."""


class RayCluster(Closing):
    """Opened by making one."""

    def __init__(self, address: str | None = None, *, workers: int | None = None) -> None:
        """Without an address a Ray is started here, with CPUs for so many workers (None: those of
        this machine)."""
        self._joined = not ray.is_initialized()
        self._folder: Path | None = None
        self._auth: dict[str, str | None] = {}  # the settings before a Ray was started here
        if not self._joined:
            _check_same(address)
        elif address is None:
            self._start(workers)
        else:
            _join(address)
        self.is_elsewhere = self._folder is None
        """Whether it was running before, so that it may have other machines."""
        if self.is_elsewhere:
            log.info("Ray at %s: %s", _address(), self.describe())
        nodes = self._nodes()
        self.num_cpus = sum(cpus for cpus, _ in nodes)
        """Of all nodes, when it was opened."""
        self.memory_per_cpu = min((int(m // c) for c, m in nodes if c and m), default=None)
        """Bytes that every node has for each of its CPUs; None when no node tells."""

    def lives(self, node: str) -> bool:
        return any(found["NodeID"] == node and found["Alive"] for found in _ray.nodes())

    def describe(self) -> str:
        """What it has, for messages."""
        nodes = self._nodes()
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

    def _nodes(self) -> list[tuple[int, float]]:
        """CPUs and bytes of memory of each living node."""
        found = [node["Resources"] for node in _ray.nodes() if node["Alive"]]
        return [(int(one.get("CPU", 0)), float(one.get("memory", 0))) for one in found]

    def _start(self, workers: int | None) -> None:
        try:
            self._folder = _short_folder()
            self._auth = _give_token()
            _init(
                address="local",
                num_cpus=workers,
                include_dashboard=False,
                _temp_dir=str(self._folder),
            )
        except _ANSWERS as error:
            self.close()
            raise BuildError(
                f"Ray could not be started on this machine: {error}; build without it "
                "(run_on='local'), or give the address of one that runs (ray_address=)"
            ) from error


def _join(address: str) -> None:
    try:
        _knock(address)
        _init(address=address)
    except _ANSWERS as error:
        ray.shutdown()
        raise OptionError(
            f"ray_address={address!r}: {_first_lines(error)}; wanted the address of a Ray that "
            "runs, with the Python and Ray of this process: 'auto' on one of its nodes, or "
            "host:port of its head; one that asks for a token wants RAY_AUTH_MODE=token here. "
            "`ray status` shows whether it answers"
        ) from error


def _knock(address: str) -> None:
    """Whether anybody listens at a host:port: Ray itself would try for ten minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "://" not in host:
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()


def _init(**options: Any) -> None:
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _give_token() -> dict[str, str | None]:
    """Set a token for a Ray that is started here; returns the settings before.

    Without one Ray makes a token of its own and leaves it in ~/.ray, where later clusters of this
    user find it and ask for it.
    """
    before = {name: os.environ.get(name) for name in _AUTH}
    known = before["RAY_AUTH_TOKEN"] or before["RAY_AUTH_TOKEN_PATH"]
    if not known and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return before


def _restore_auth(before: dict[str, str | None]) -> None:
    """Undo what `_give_token` and Ray changed, and let Ray forget the token it has read."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with suppress(AttributeError):  # a Ray that is older than its tokens
        _ray._raylet.Config.initialize("")
        _ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _check_same(address: str | None) -> None:
    """This process has joined a Ray already: it cannot join another."""
    here = _address()
    if address not in (None, "auto", here):
        raise OptionError(
            f"ray_address={address!r}: this process has joined the Ray at {here} already: leave it "
            "with ray.shutdown(), or give no address to use it"
        )


def _address() -> str:
    """Of the Ray that this process has joined."""
    return str(ray.get_runtime_context().gcs_address)


def _short_folder() -> Path:
    """A new folder whose name leaves room for those of Ray's sockets."""
    usual = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=usual))
    if len(str(folder)) + _SOCKETS <= 107:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))


def _first_lines(error: BaseException) -> str:
    """Ray's messages are pages; what happened stands first."""
    return " ".join(str(error).split("\n\n")[0].split())[:400] or type(error).__name__
