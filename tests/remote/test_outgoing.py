"""Stores built to a URL: the bytes of a local build, whatever dies or fails on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmill.building import BuildReport, BuildSpec, build_store
from shardmill.errors import (
    BuildLockedError,
    OptionError,
    StoreError,
    StoreExistsError,
    UnfinishedBuildError,
)
from shardmill.remote import build_to, pull, push
from shardmill.remote.build_to import scratch_store
from shardmill.remote.push import PROBE
from shardmill.tokenizers import ByteTokenizer
from tests.building.corpora import feeds_of, write_corpus
from tests.building.parts import Slow
from tests.building.test_workers_killed import wait_for
from tests.remote.conftest import Spot, files_of, remote_files
from tests.services import Fault, LoopbackS3

SPEC = BuildSpec(shard_bytes=20_000)

KILLED = """
import json, sys
from pathlib import Path
from shardmill.building import BuildSpec, build_store, journal
from shardmill.remote import build_to
from tests.building.corpora import feeds_of
from tests.building.parts import Slow
journal.SEGMENT_TOKENS = 3_000
corpus, scratch, url = sys.argv[1:4]
with build_to(url, scratch=scratch, resume=True) as out:
    build_store(feeds_of(Path(corpus)), out.folder, tokenizer=Slow(), workers=1, resume=True,
                spec=BuildSpec(shard_bytes=20_000))
print(json.dumps(out.receipt and out.receipt.to_json()))
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus", num_files=3)
    return tmp_path / "corpus"


@pytest.fixture
def build(corpus: Path, tmp_path: Path) -> Callable[..., BuildReport]:
    """Build the corpus to a spot, scratch beside it; `spec` makes it another store."""

    def run(spot: Spot, *, spec: BuildSpec = SPEC, **how: Any) -> BuildReport:
        scratch = tmp_path / "scratch"
        with build_to(spot.url, scratch=scratch, storage_options=spot.options, **how) as out:
            folder, resume = out.folder, how.get("resume", False)
            overwrite = how.get("overwrite", False) and not resume
            flags = {"resume": resume, "overwrite": overwrite}
            return build_store(
                feeds_of(corpus), folder, tokenizer=ByteTokenizer(), spec=spec, workers=1, **flags
            )

    return run


@pytest.fixture
def wanted(corpus: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of a local build."""
    build_store(
        feeds_of(corpus), tmp_path / "local", tokenizer=ByteTokenizer(), spec=SPEC, workers=1
    )
    return files_of(tmp_path / "local")


def left(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "scratch").iterdir())


def test_the_store_there_has_the_bytes_of_a_local_build(
    spot: Spot, build, wanted, tmp_path: Path
) -> None:
    done = build(spot)
    assert remote_files(spot) == wanted
    assert len(wanted) > 10
    assert left(tmp_path) == []
    again = build(spot, resume=True)
    assert again.manifest == done.manifest
    assert again.cost is None, "it was built again"
    assert left(tmp_path) == []


def test_a_finished_store_is_refused_before_the_build_unless_overwritten(
    spot: Spot, build, wanted, tmp_path: Path
) -> None:
    build(spot, spec=BuildSpec(shard_bytes=50_000))
    before = remote_files(spot)
    with pytest.raises(StoreExistsError, match="nothing was built"):
        build(spot)
    with pytest.raises(StoreExistsError, match="other input or options"):
        build(spot, resume=True)
    assert remote_files(spot) == before
    assert left(tmp_path) == []
    build(spot, overwrite=True)
    assert remote_files(spot) == wanted


def test_a_folder_of_other_files_is_refused_before_the_build(spot: Spot, build, wanted) -> None:
    place = spot.open()
    place.write("train/notes.txt", b"mine")
    for resume in (False, True):
        with pytest.raises(StoreExistsError, match=r"train/notes\.txt"):
            build(spot, resume=resume)
    build(spot, overwrite=True)
    assert remote_files(spot) == {**wanted, "train/notes.txt": b"mine"}


@pytest.mark.slow
def test_a_read_only_destination_is_refused_before_the_build(
    s3: LoopbackS3, build, s3_spot: Spot, tmp_path: Path
) -> None:
    def refused(spot: Spot, words: str) -> None:
        with (
            pytest.raises(StoreError, match=words),
            build_to(spot.url, scratch=tmp_path / "scratch", storage_options=spot.options),
        ):
            pytest.fail("the block began")
        assert left(tmp_path) == []

    refused(Spot("s3://no-such-bucket/x", s3.options()), "bucket")
    s3.faults.append(Fault(path=PROBE, method="PUT", times=1000, status=503))
    refused(s3_spot, f"{PROBE}: unreachable")


def test_a_destination_that_cannot_be_written_is_refused(build, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "old.tar", "w") as archive:
        archive.add(__file__, "test.py")
    with pytest.raises(StoreError, match="this kind of storage may not support that"):
        build(Spot(f"tar://store::file://{tmp_path}/old.tar", {}))
    with pytest.raises(OptionError, match="Is a directory"):
        build(Spot(f"tar://store::file://{tmp_path}", {}))


@pytest.mark.slow
@pytest.mark.parametrize("flaw", [{"status": 503}, {"drop_after": 0}])
def test_a_failing_server_receives_the_whole_store(s3, s3_spot: Spot, build, wanted, flaw) -> None:
    s3.faults += [
        Fault(path=PROBE, method="PUT", times=2, **flaw),
        Fault(path="shard_0000", method="PUT", times=2, **flaw),
        Fault(path="meta.json", method="PUT", times=1, **flaw),
    ]
    build(s3_spot)
    assert [fault.times for fault in s3.faults] == [0, 0, 0]
    assert remote_files(s3_spot) == wanted


@pytest.mark.slow
def test_after_a_failed_push_a_resume_sends_the_rest(
    s3: LoopbackS3, s3_spot: Spot, build, wanted, tmp_path: Path
) -> None:
    s3.faults.append(Fault(path="shard_00002", method="PUT", times=1000, status=503))
    with pytest.raises(
        StoreError, match=r"unreachable.*The store is built and is in .*resume=True"
    ):
        build(s3_spot)
    folder = scratch_store(s3_spot.url, tmp_path / "scratch")
    assert files_of(folder) == wanted
    arrived = remote_files(s3_spot).keys() & wanted.keys()
    assert "meta.json" not in arrived
    s3.faults.clear()
    with pytest.raises(UnfinishedBuildError, match=r"was sent there half-way.*resume=True"):
        build(s3_spot)
    s3.requests.clear()
    assert build(s3_spot, resume=True).cost is None, "it was built again"
    assert s3.sent("PUT", "shard_00002") > 0
    # on a busy machine other files may not have arrived either when the push gave up
    assert [name for name in arrived if s3.sent("PUT", name)] == [], "what was there was sent again"
    assert remote_files(s3_spot) == wanted
    assert left(tmp_path) == []


@pytest.mark.slow
def test_an_unsent_replacement_is_resumed(s3, s3_spot: Spot, build, wanted, tmp_path):
    build(s3_spot, spec=BuildSpec(shard_bytes=50_000))
    s3.faults.append(Fault(path="meta.json", method="DELETE", times=1000, status=403))
    s3.faults.append(Fault(path="?delete", method="POST", times=1000, status=403))
    with pytest.raises(StoreError, match="resume=True and overwrite=True"):
        build(s3_spot, overwrite=True)
    s3.faults.clear()
    with pytest.raises(StoreExistsError, match="other input or options"):
        build(s3_spot, resume=True)
    assert build(s3_spot, resume=True, overwrite=True).cost is None, "it was built again"
    assert remote_files(s3_spot) == wanted
    assert left(tmp_path) == []


def test_an_unsent_store_is_not_overwritten_unless_asked(
    spot: Spot, build, wanted, tmp_path: Path
) -> None:
    folder = scratch_store(spot.url, tmp_path / "scratch")
    folder.parent.mkdir(parents=True)
    (tmp_path / "local").rename(folder)
    with pytest.raises(UnfinishedBuildError, match=r"resume=True.*overwrite=True"):
        build(spot)
    assert build(spot, resume=True).cost is None
    assert remote_files(spot) == wanted


@pytest.mark.slow
def test_the_unfinished_push_of_another_store_is_refused_before_the_build(
    s3: LoopbackS3, s3_spot: Spot, build, wanted, make_store, tmp_path: Path
) -> None:
    s3.faults.append(Fault(path="shard_", method="PUT", times=1000, status=403))
    with pytest.raises(StoreError):
        push(make_store("other"), s3_spot.url, storage_options=s3_spot.options)
    s3.faults.clear()
    for resume in (False, True):
        with pytest.raises(StoreExistsError, match="an unfinished push is there"):
            build(s3_spot, resume=resume)
    build(s3_spot, overwrite=True)
    pull(s3_spot.url, tmp_path / "copy", storage_options=s3_spot.options)
    assert files_of(tmp_path / "copy") == wanted


def test_two_builds_to_one_url_exclude_each_other(spot: Spot, build, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    with (
        pytest.raises(BuildLockedError, match="another process"),
        build_to(spot.url, scratch=scratch, storage_options=spot.options),
    ):
        build(spot, resume=True)
    build(Spot(f"{spot.url}-beside", spot.options))


def test_each_url_has_its_scratch_folder_without_a_password_in_its_name(tmp_path: Path) -> None:
    urls = [f"s3://bucket/{name}" for name in ("a/b", "a-b", "a_b", "x/" + "y" * 300)]
    folders = {scratch_store(url, tmp_path) for url in urls}
    assert len(folders) == 4
    assert scratch_store("s3://bucket/a/b/", tmp_path) in folders
    assert scratch_store("s3://me:secret@bucket/a/b", tmp_path) in folders
    assert all(len(folder.parent.name) < 60 for folder in folders)


class Run:
    """The same build in another process."""

    def __init__(self, s3: LoopbackS3, corpus: Path, scratch: Path, spot: Spot) -> None:
        self.arguments = [str(corpus), str(scratch), spot.url]
        self.folder, self.s3 = scratch_store(spot.url, scratch), s3

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", KILLED, *self.arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, env=self.s3.environment(), **pipes)

    def kill_when(self, condition: Callable[[], bool]) -> None:
        process = self.start()
        wait_for(lambda: condition() or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()

    def segments(self) -> int:
        return len(list(self.folder.parent.glob(".store.building/segments/*/*.json")))


@pytest.mark.slow
def test_killed_in_the_build_and_in_the_push_it_resumes_to_the_same_bytes(
    s3: LoopbackS3, s3_spot: Spot, corpus: Path, tmp_path: Path
) -> None:
    build_store(feeds_of(corpus), tmp_path / "local", tokenizer=Slow(), spec=SPEC, workers=1)
    wanted = files_of(tmp_path / "local")
    run = Run(s3, corpus, tmp_path / "scratch", s3_spot)
    for count in (2, 5):
        run.kill_when(lambda least=count: run.segments() >= least)
        assert remote_files(s3_spot) == {}
    s3.faults.append(Fault(path="shard_", method="PUT", times=1000, delay=0.2))
    for count in (2, 4):
        s3.requests.clear()
        run.kill_when(lambda least=count: s3.sent("PUT", "shard_") >= least)
        assert "meta.json" not in remote_files(s3_spot)
        assert files_of(run.folder) == wanted
    s3.faults.clear()
    process = run.start()
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert '"kept_files": 0' not in out
    assert remote_files(s3_spot) == wanted
    assert left(tmp_path) == []


@pytest.mark.slow
def test_killed_after_the_manifest_was_sent_a_resume_leaves_nothing(
    s3: LoopbackS3, s3_spot: Spot, corpus: Path, tmp_path: Path
) -> None:
    build_store(feeds_of(corpus), tmp_path / "local", tokenizer=Slow(), spec=SPEC, workers=1)
    run = Run(s3, corpus, tmp_path / "scratch", s3_spot)
    s3.faults += [
        Fault(path="/.shardmill-push.json", method="DELETE", times=1000, delay=30),
        Fault(path="?delete", method="POST", times=1000, delay=30),
    ]
    run.kill_when(lambda: s3.sent("PUT", "meta.json") > 0)
    s3.faults.clear()
    assert {"meta.json", ".shardmill-push.json"} <= remote_files(s3_spot).keys()
    process = run.start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == "null\n", "it was sent again"
    assert remote_files(s3_spot) == files_of(tmp_path / "local")
    assert left(tmp_path) == []
