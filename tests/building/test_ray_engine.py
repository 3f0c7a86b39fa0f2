"""What Ray's engine does beyond the contract of all engines, on a real Ray of one node."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import shardmill
from shardmill.errors import BuildError, OptionError
from tests.building.clusters import ray_nodes, short_folder
from tests.building.tasks import Doing
from tests.building.test_engines import reported, run
from tests.helpers import wait_for

if TYPE_CHECKING:
    from shardmill.building.engines.ray import RayCluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    from shardmill.building.engines.ray import RayCluster

    with ray_nodes(2) as nodes, RayCluster(nodes.address) as opened:
        yield opened


def test_a_worker_that_cannot_be_placed_is_not_waited_for_when_others_work(cluster):
    from shardmill.building.engines.ray import RayEngine

    assert cluster.num_cpus == 2
    with RayEngine(cluster, 3) as engine:
        reports = run(engine, *map(Doing, "abcdef"))
        assert all(reported(reports, number) == [0, 1, 2, "end"] for number in range(6))


class Freeing(logging.Handler):
    """Frees a CPU when a warning says that there is none."""

    def __init__(self, engine) -> None:
        super().__init__()
        self.engine, self.said = engine, []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.engine.close()


def test_a_cluster_without_a_free_cpu_is_reported_once_and_waited_for(cluster, monkeypatch):
    from shardmill.building.engines import ray as ray_engine

    monkeypatch.setattr(ray_engine, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(ray_engine, "_TICK_SECONDS", 0.2)
    with ray_engine.RayEngine(cluster, 2) as first, ray_engine.RayEngine(cluster, 1) as second:
        run(first, Doing("a"), Doing("b"))  # its workers stay, and have both CPUs
        freeing = Freeing(first)
        ray_engine.log.addHandler(freeing)
        try:
            reports = run(second, Doing("c"))
        finally:
            ray_engine.log.removeHandler(freeing)
    assert reported(reports, 0) == [0, 1, 2, "end"]
    (said,) = freeing.said
    assert "1 nodes with 2 CPUs, 0 of them free, and a worker needs 1 CPU; waiting" in said


def test_rays_own_tools_show_what_a_worker_does(cluster):
    import ray

    from shardmill.building.engines.ray import RayEngine

    with RayEngine(cluster, 1) as engine:
        run(engine, Doing("pages.jsonl"))
        wait_for(lambda: "task::pages.jsonl" in {entry["cat"] for entry in ray.timeline()})


def test_a_worker_of_another_version_is_refused_with_both(cluster, monkeypatch):
    from shardmill.building.engines import ray as ray_engine

    versions = {**ray_engine._VERSIONS, "shardmill": "0.0.7"}
    monkeypatch.setattr(ray_engine, "_VERSIONS", versions)
    words = f"has shardmill {shardmill.__version__}, this process has 0.0.7"
    refused = pytest.raises(BuildError, match=re.escape(words))
    with ray_engine.RayEngine(cluster, 1) as engine, refused:
        run(engine, Doing("a"))


def test_a_worker_that_cannot_start_is_an_error_and_not_tried_for_ever(cluster):
    from shardmill.building.engines.ray import RayEngine

    refused = pytest.raises(BuildError, match=r"cannot start: .*null byte.*every node needs")
    with RayEngine(cluster, 1, environ={"bad\0name": "x"}) as engine, refused:
        run(engine, Doing("a"))


def test_a_worker_that_asks_for_more_than_its_share_fails_alone(cluster):
    from shardmill.building.engines.ray import RayEngine

    with RayEngine(cluster, 1, memory=256 * 2**20) as engine:
        reports = run(engine, Doing("hungry", at=1, act="eat"), Doing("good"))
    note, error = reported(reports, 0)
    assert note == 0
    assert isinstance(error, MemoryError)
    assert reported(reports, 1) == [0, 1, 2, "end"]


def test_a_ray_that_was_joined_before_is_used_and_left(cluster):
    import ray

    from shardmill.building.engines.ray import RayCluster

    with RayCluster() as same:
        assert same.num_cpus == 2
    assert ray.is_initialized()
    with pytest.raises(OptionError, match="has joined the Ray at"):
        RayCluster("127.0.0.9:6379")


def test_a_folder_for_ray_that_is_not_there_is_named_with_the_way_out(tmp_path, monkeypatch):
    code = "from shardmill.building.engines.ray import RayCluster\nRayCluster(workers=1)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RAY_TMPDIR": str(tmp_path / "never")},
    )
    said = done.stderr.splitlines()[-1]
    assert said.startswith("shardmill.errors.BuildError: Ray could not be started on this machine")
    assert str(tmp_path / "never") in said
    assert "run_on='local'" in said


ALONE = """
import os
from shardmill.building.engines.ray import RayCluster
from shardmill.building.engines.ray import RayEngine
from tests.building.tasks import Doing
before = dict(os.environ)
for workers in (2, 1):
    with RayCluster(workers=workers) as cluster, RayEngine(cluster, workers) as engine:
        assert cluster.num_cpus == workers
        assert all(report.error is None for report in engine.run(0, iter([Doing("a")])))
    changed = {name for name in os.environ if os.environ[name] != before.get(name)}
    assert not {name for name in changed if "AUTH" in name}, changed
print("done")
"""


def test_a_ray_that_is_started_here_leaves_nothing_and_prints_nothing():
    """Also when it is started again, and no token in HOME that later clusters would ask for."""
    with short_folder() as place:
        for name in ("home", "ray"):
            (place / name).mkdir()
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", ALONE],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "RAY_TMPDIR": str(place / "ray"), "HOME": str(place / "home")},
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
        assert sorted(path.name for path in place.rglob("*")) == ["home", "ray"]
