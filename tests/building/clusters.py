"""A real Ray on this machine, in a short folder that is gone afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Ray takes 127.0.0.1 for the address of this machine.
HEAD, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"

# Workers that Ray starts ahead take as long to start as all else, for every driver again.
_SETTINGS = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}


@contextmanager
def short_folder() -> Iterator[Path]:
    """Below the temporary folder, unless sockets in it would get names that are too long.

    A build adds 13 characters (/ray-........) and Ray 70, of the 107 that the kernel allows.
    """
    usual = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="t-", dir=usual if len(usual) <= 13 else "/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_nodes(num_cpus: int, environ: dict[str, str] | None = None) -> Iterator[Nodes]:
    """A cluster of one node that this process has not joined.

    Ray's `Cluster` records its address in Ray's default folder, wherever its nodes keep their
    files, and fails when nothing has made that folder. So the default folder is a new one here,
    which the head node makes, and no cluster of this machine is taken for another.
    """
    from ray.cluster_utils import Cluster

    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        nodes = Nodes(Cluster(), environ or {})
        try:
            nodes.add(num_cpus, HEAD, include_dashboard=False, no_monitor=True)
            yield nodes
        finally:
            nodes.cluster.shutdown()


@dataclass(frozen=True)
class Nodes:
    """Nodes on this machine; `environ` is what their processes have beyond this one."""

    cluster: Any
    environ: dict[str, str]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    @property
    def head(self) -> Any:
        return self.cluster.head_node

    def add(self, num_cpus: int, address: str, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**_SETTINGS, **self.environ, "PYTHONPATH": str(Path.cwd())}.items():
                patch.setenv(name, value)
            return self.cluster.add_node(
                num_cpus=num_cpus,
                node_ip_address=address,
                object_store_memory=200 * 2**20,
                include_log_monitor=False,
                **options,
            )

    def remove(self, node: Any) -> None:
        """At once, as when the machine is switched off."""
        self.cluster.remove_node(node, allow_graceful=False)


def raylet_of(node: Any) -> int:
    """The process whose children are the workers of a node."""
    return int(node.all_processes["raylet"][0].process.pid)
