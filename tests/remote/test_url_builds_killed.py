"""Builds to a URL that are killed, at any moment, and continued on another machine."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from shardmill.building import BuildSpec, build_store
from shardmill.remote import verify_remote
from shardmill.remote.contents import BUILD
from tests.building.corpora import feeds_of, write_corpus
from tests.building.parts import Slow
from tests.building.test_workers_killed import children, wait_for
from tests.remote.conftest import Spot, files_of, remote_files
from tests.services import Fault, LoopbackS3

BUILDER = """
import sys
from pathlib import Path
from shardmill.building import BuildSpec, build_store, plan
from tests.building.corpora import feeds_of
from tests.building.parts import Slow
plan.CHUNK_BYTES = 12_000
corpus, url, workers, resume = sys.argv[1:]
build_store(feeds_of(Path(corpus)), url, tokenizer=Slow(), workers=int(workers),
            resume=resume == "resume", overwrite=resume == "overwrite",
            spec=BuildSpec(shard_bytes=16_000), max_loss=1.0)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("killed") / "corpus", num_files=1)


@pytest.fixture(scope="module")
def wanted(corpus: Path) -> dict[str, bytes]:
    """The files of a local build."""
    local = corpus.with_name("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", 12_000)
        spec = BuildSpec(shard_bytes=16_000)
        build_store(feeds_of(corpus), local, tokenizer=Slow(), spec=spec, workers=1)
    return files_of(local)


class Builds:
    """The same build in other processes, each as on a machine of its own: nothing on disk is
    shared but the input."""

    def __init__(self, s3: LoopbackS3, corpus: Path, spot: Spot, machines: Path) -> None:
        self.s3, self.spot, self.machines = s3, spot, machines
        self._corpus, self._number = corpus, 0

    def start(self, workers: int = 1, resume: str = "resume", machine: str | None = None):
        self._number += 1
        home = self.machines / (machine or str(self._number))
        home.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(self._corpus), self.spot.url, str(workers), resume],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.s3.environment(), "TMPDIR": str(home), "HOME": str(home)},
        )

    def kill_when(self, condition: Callable[[], bool], **how: object) -> None:
        process = self.start(**how)  # type: ignore[arg-type]
        wait_for(lambda: condition() or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        kill(process)

    def finish(self, **how: object) -> None:
        process = self.start(**how)  # type: ignore[arg-type]
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def asked(s3: LoopbackS3, method: str, name: str) -> int:
    with s3.lock:
        return sum(one.method == method and name in one.path for one in s3.requests)


@pytest.fixture
def builds(s3: LoopbackS3, s3_spot: Spot, corpus: Path, tmp_path: Path) -> Builds:
    return Builds(s3, corpus, s3_spot, tmp_path / "machines")


@pytest.mark.slow
def test_killed_at_every_stage_it_is_continued_elsewhere(
    s3: LoopbackS3, builds: Builds, s3_spot: Spot, wanted: dict[str, bytes]
) -> None:
    stages = [
        ("PUT", f"{BUILD}plan.json", 1),
        ("PUT", "shard_", 1),
        ("PUT", "shard_", 3),
        ("PUT", ".receipt", 2),
        ("PUT", ".receipt", 6),
        ("PUT", "train_idx.npy", 1),
        ("PUT", "origins.table", 1),
    ]
    for method, name, count in stages:
        s3.requests.clear()
        # so that the killer comes in time
        s3.faults[:] = [
            Fault(path=name, method=method, skip=count, times=1000, hang=True),
            Fault(path="meta.json", method="PUT", times=1000, hang=True),
        ]
        builds.kill_when(lambda: asked(s3, method, name) >= count)  # noqa: B023
        assert "meta.json" not in remote_files(s3_spot)
    s3.faults.clear()
    builds.finish()
    assert remote_files(s3_spot) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_killed_after_the_manifest_a_build_is_finished(
    s3: LoopbackS3, builds: Builds, s3_spot: Spot, wanted: dict[str, bytes], how: str
) -> None:
    s3.faults += [
        Fault(path=f"/{BUILD}", method="DELETE", times=1000, hang=True),
        Fault(path="?delete", method="POST", times=1000, hang=True),
    ]
    builds.kill_when(lambda: s3.sent("PUT", "meta.json") > 0, resume=how)
    s3.faults.clear()
    left = remote_files(s3_spot).keys() - wanted.keys()
    assert any(name.startswith(BUILD) for name in left)
    s3.requests.clear()
    builds.finish(resume="resume")
    assert s3.sent("PUT", "shard_") == 0, "it was built again"
    assert remote_files(s3_spot) == wanted


@pytest.mark.slow
def test_workers_and_builders_are_killed_at_random_and_the_objects_are_the_same(
    s3: LoopbackS3, builds: Builds, s3_spot: Spot, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    draw = random.Random(5)
    s3.faults.append(Fault(path="shard_", method="PUT", times=10**6, delay=0.1))
    for _ in range(4):
        process = builds.start(workers=2, machine="one")
        wait_for(lambda: children(process.pid) or process.poll() is not None)  # noqa: B023
        for _ in range(draw.randrange(3)):
            time.sleep(draw.random() * 2)
            alive = children(process.pid)
            with suppress(ProcessLookupError):
                os.kill(draw.choice(alive or [process.pid]), signal.SIGKILL)
        time.sleep(draw.random() * 2)
        kill(process)
        assert not verify_if_there(s3_spot)
    s3.faults.clear()
    builds.finish(workers=2, machine="one")
    assert remote_files(s3_spot) == wanted
    assert list((tmp_path / "machines/one").glob(".shardmill-*")) == []


def verify_if_there(spot: Spot) -> list[str]:
    """What is wrong with the store there; nothing if there is none."""
    if "meta.json" not in spot.open().listing():
        return []
    return list(verify_remote(spot.url, storage_options=spot.options).problems)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_of_two_builds_at_once_one_wins(
    builds: Builds, s3_spot: Spot, wanted: dict[str, bytes], how: str
) -> None:
    both = [builds.start(resume=how), builds.start(resume=how)]
    errors = []
    for process in both:
        _, err = process.communicate(timeout=300)
        if process.returncode:
            errors.append(err)
    assert remote_files(s3_spot) == wanted
    assert len(errors) <= 1
    for err in errors:
        kinds = ("BuildLockedError", "UnfinishedBuildError", "a finished folder is there")
        assert any(kind in err for kind in kinds), err.splitlines()[-1]
