"""Adding files with workers, and killed at any moment: the old store or the new one, never less."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from shardmill.building import BuildSpec, Feed, build_store, run, workplace
from shardmill.errors import BuildError, UnfinishedBuildError
from shardmill.sources import BatchLimits, JsonlSource
from shardmill.store import open_store, read_manifest, verify
from shardmill.store.manifest import write_manifest
from shardmill.tokenizers import ByteTokenizer
from tests.building.parts import Differing
from tests.building.workplaces import receipts
from tests.helpers import folder_digest

pytestmark = pytest.mark.slow

SPEC = BuildSpec(shard_bytes=2_000)
FILL = (("val", 3_000), ("train", None))
KILLED = """
import sys
from pathlib import Path
from shardmill.building import plan
from tests.building.parts import Slow
from tests.building.test_append_killed import add
plan.CHUNK_BYTES = 2_000
add(Path(sys.argv[1]), Path(sys.argv[2]), workers=int(sys.argv[3]), tokenizer=Slow())
"""


def write_files(folder: Path, numbers: range) -> None:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        rows = [{"text": f"{number}-{row} " + "word " * (row % 29)} for row in range(90)]
        lines = "".join(json.dumps(row) + "\n" for row in rows) + "{broken\n"
        (folder / f"{number}.jsonl").write_text(lines)


def feeds_of(files: Path) -> list[Feed]:
    limits = BatchLimits(num_bytes=1_500, num_documents=20)
    return [Feed(source=JsonlSource(files, on_bad="skip", limits=limits), fill=FILL)]


def add(files: Path, store: Path, **how) -> None:
    """Goes on with whatever is there."""
    how = {
        "append": True,
        "resume": True,
        "max_loss": 1.0,
        "tokenizer": ByteTokenizer(),
        "spec": SPEC,
    } | how
    build_store(feeds_of(files), store, **how)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 2_000)


@pytest.fixture
def grown(tmp_path: Path, small) -> Path:
    """Stores `s` and `old` of three files, and `whole` of the six that are there now."""
    write_files(tmp_path / "files", range(3))
    for name in ("s", "old"):
        add(tmp_path / "files", tmp_path / name, workers=1)
    write_files(tmp_path / "files", range(3, 6))
    add(tmp_path / "files", tmp_path / "whole", workers=1)
    return tmp_path


def test_two_workers_add_the_same_bytes(grown):
    add(grown / "files", grown / "s", workers=2, unit_bytes=4_000)
    assert folder_digest(grown / "s") == folder_digest(grown / "whole")


@pytest.mark.slow
def test_killed_again_and_again_the_store_is_the_old_one_or_the_new_one(grown):
    wanted = {folder_digest(grown / name) for name in ("old", "whole")}
    rounds = 0
    while True:
        command = [sys.executable, "-c", KILLED, str(grown / "files"), str(grown / "s")]
        pause = {"TESTS_PAUSE": "0.2" if rounds < 3 else "0"}
        build = subprocess.Popen(
            [*command, "1" if rounds % 3 else "2"], env={**os.environ, **pause}
        )
        known = set(receipts(grown / "s"))
        while rounds < 3 and build.poll() is None:
            if len(set(receipts(grown / "s")) - known) >= 2:
                build.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        if build.wait() == 0:
            break
        rounds += 1
        assert folder_digest(grown / "s") in wanted
        assert verify(grown / "s").problems == []
    assert rounds == 3
    assert folder_digest(grown / "s") == folder_digest(grown / "whole")
    assert not (grown / ".s.building").exists()


@pytest.fixture
def stopped(grown, monkeypatch):
    """Stop a build just before it is published."""

    def stop(*_args, **_kwargs):
        raise KeyboardInterrupt

    def stopped(**how) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(workplace, "publish_folder", stop)
            with pytest.raises(KeyboardInterrupt):
                add(grown / "files", grown / "s", workers=1, **how)

    return stopped


def test_stopped_before_it_is_published_it_goes_on(grown, stopped):
    stopped()
    assert folder_digest(grown / "s") == folder_digest(grown / "old")
    add(grown / "files", grown / "s", workers=1)
    assert folder_digest(grown / "s") == folder_digest(grown / "whole")


def test_what_a_build_killed_after_the_publication_left_is_removed(grown, stopped):
    stopped()
    shutil.copytree(grown / ".s.building", grown / "left")
    add(grown / "files", grown / "s", workers=1)
    (grown / "left").rename(grown / ".s.building")
    add(grown / "files", grown / "s", workers=1)
    assert folder_digest(grown / "s") == folder_digest(grown / "whole")
    assert not (grown / ".s.building").exists()


def test_the_work_of_a_build_of_all_is_not_taken_for_that_of_an_addition(grown, stopped):
    stopped(append=False, overwrite=True)
    with pytest.raises(UnfinishedBuildError, match="continues: None -> "):
        add(grown / "files", grown / "s", workers=1)
    add(grown / "files", grown / "s", workers=1, resume=False, overwrite=True)
    assert folder_digest(grown / "s") == folder_digest(grown / "whole")


def test_a_store_that_was_replaced_meanwhile_is_not_overwritten(grown, monkeypatch):
    real = run._check_unchanged

    def replaced(*args) -> None:
        real(*args)
        (grown / "s").rename(grown / "away")
        (grown / "whole").rename(grown / "s")

    monkeypatch.setattr(run, "_check_unchanged", replaced)
    with pytest.raises(BuildError, match="another store than when this build began"):
        add(grown / "files", grown / "s", workers=1)
    assert open_store(grown / "s").manifest.sources[0]["files"][-1]["file"] == "5.jsonl"


def test_an_engine_that_is_not_here_any_more_is_named(grown):
    manifest = read_manifest(grown / "s")
    made = {**manifest.produced_by, "versions": {"tokens": "0.1"}}
    write_manifest(grown / "s", msgspec.structs.replace(manifest, produced_by=made))
    with pytest.raises(BuildError, match=r"existing tokens.*'tokens': '0.1'"):
        add(grown / "files", grown / "s", workers=1)


def test_an_engine_that_is_caught_out_puts_the_old_tokens_in_doubt(grown, monkeypatch):
    mark = grown / "differs"
    mark.touch()
    monkeypatch.setenv("TESTS_DIFFERS", str(mark))
    with pytest.raises(BuildError, match="overwrite=True and engine='reference'"):
        add(grown / "files", grown / "s", workers=2, unit_bytes=4_000, tokenizer=Differing())
    assert not mark.exists()
    assert folder_digest(grown / "s") == folder_digest(grown / "old")
