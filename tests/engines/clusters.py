"""A real Ray on this machine, in a short folder that is gone afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HEAD, SECOND = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for the address of this machine


@contextmanager
def short_folder() -> Iterator[Path]:
    """Sockets have short names, and the folders of pytest have long ones."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_nodes(num_cpus: int, environ: dict[str, str] | None = None) -> Iterator[Any]:
    """A cluster of one node that this process has not joined; `add_node` gives it another."""
    from ray.cluster_utils import Cluster

    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in {**(environ or {}), "PYTHONPATH": str(Path.cwd())}.items():
            patch.setenv(name, value)
        options = {
            "num_cpus": num_cpus,
            "node_ip_address": HEAD,
            "temp_dir": str(folder),
            "include_dashboard": False,
            "object_store_memory": 200 * 2**20,
        }
        cluster = Cluster(initialize_head=True, head_node_args=options)
        try:
            yield cluster
        finally:
            cluster.shutdown()


def raylet_of(node: Any) -> int:
    """The process whose children are the workers of a node."""
    return int(node.all_processes["raylet"][0].process.pid)
