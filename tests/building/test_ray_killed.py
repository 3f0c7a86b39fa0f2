"""Builders on Ray that are killed and stopped: nothing lives on, and the bytes are the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.building.clusters import short_folder
from tests.building.corpora import write_corpus
from tests.building.processes import lives, wait_for
from tests.building.workplaces import receipts
from tests.helpers import folder_digest

pytestmark = pytest.mark.slow

BUILD = """
import sys
from pathlib import Path
from shardmill.building import BuildSpec, build_store, plan
from tests.building.corpora import feeds_of
from tests.building.parts import Slow
plan.CHUNK_BYTES = 3_000
corpus, folder, run_on = sys.argv[1:4]
build_store(
    feeds_of(Path(corpus)),
    folder,
    tokenizer=Slow(),
    spec=BuildSpec(shard_bytes=20_000),
    max_loss=1.0,
    workers=2,
    unit_bytes=9_000,
    run_on=run_on,
    resume=True,
)
"""


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Where a Ray of a killed builder leaves its files."""
    with short_folder() as folder:
        yield folder


@pytest.fixture
def start(tmp_path, ray_folder):
    """Start a build; its processes are killed at the end if they live."""
    write_corpus(tmp_path / "corpus", num_files=3)
    started: list[subprocess.Popen[bytes]] = []

    def run(name: str, run_on: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", BUILD]
        command += [str(tmp_path / "corpus"), str(tmp_path / name), run_on]
        # Workers of a killed Ray look for its head; by default for a minute.
        ray = {"RAY_TMPDIR": str(ray_folder), "RAY_gcs_rpc_server_reconnect_timeout_s": "3"}
        pause = {"TESTS_PAUSE": "0.2"} if run_on == "ray" else {}  # so that it is not done before
        environ = {**os.environ, **ray, **pause}
        started.append(subprocess.Popen(command, env=environ))
        return started[-1]

    yield run
    for build in started:
        build.kill()
        build.wait()


def title(process: psutil.Process) -> str:
    """What a process calls itself; empty when it has just ended."""
    with suppress(psutil.NoSuchProcess):
        return "".join(process.cmdline()[:1])
    return ""


def stop(build: subprocess.Popen[bytes], store: Path, with_signal: int) -> None:
    """Stop a build that has sealed something new, and wait until nothing of it lives."""
    before = len(receipts(store))
    wait_for(lambda: len(receipts(store)) > before)
    family = psutil.Process(build.pid).children(recursive=True)
    # Two helpers of Ray notice at once that all is gone, and try for a minute to report it.
    helpers = [child for child in family if title(child).endswith("Agent")]
    others = [child.pid for child in family if child not in helpers]
    assert len(others) > 3, "a Ray, and workers"
    os.kill(build.pid, with_signal)
    assert build.wait() != 0
    for helper in helpers:  # their raylet waits for them
        with suppress(psutil.NoSuchProcess):
            helper.kill()
    wait_for(lambda: not any(map(lives, others)))


def test_a_builder_killed_and_stopped_on_ray_goes_on_there_and_here(tmp_path, start, ray_folder):
    assert start("whole", "local").wait() == 0
    stop(start("s", "ray"), tmp_path / "s", signal.SIGKILL)
    (left,) = ray_folder.iterdir()  # a killed process removes nothing
    stop(start("s", "ray"), tmp_path / "s", signal.SIGINT)
    assert list(ray_folder.iterdir()) == [left], "a stopped one does"
    assert receipts(tmp_path / "s")
    assert start("s", "local").wait() == 0
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")
    assert not (tmp_path / ".s.building").exists()
