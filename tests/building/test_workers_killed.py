"""Workers and builders that die in mid-build, in real processes: the bytes are the same."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.errors import BuildError, BuildLockedError, OptionError, TokenRangeError
from shardmill.sources import BatchLimits, JsonlSource, MemorySource
from shardmill.store import open_store, verify
from shardmill.tokenizers import ByteTokenizer
from tests.building.corpora import write_corpus
from tests.building.parts import Deadly, Differing, Slow, Wide
from tests.building.processes import lives
from tests.building.workplaces import receipts
from tests.helpers import folder_digest, wait_for

KILLED = """
import sys
from pathlib import Path
from shardmill.building import BuildSpec, build_store, plan
from tests.building.corpora import feeds_of
from tests.building.parts import Slow
plan.CHUNK_BYTES = 3_000
corpus, folder = map(Path, sys.argv[1:3])
build_store(
    feeds_of(corpus, limits=(2_000, 30_000)),
    folder,
    tokenizer=Slow(),
    spec=BuildSpec(shard_bytes=20_000),
    max_loss=1.0,
    workers=int(sys.argv[3]),
    unit_bytes=int(sys.argv[4]),
    resume=True,
)
"""


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


class Killing:
    """Builds in processes of their own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, np.random.default_rng(seed)
        write_corpus(folder / "corpus", num_files=5)

    def start(self, name: str, workers: int) -> subprocess.Popen[bytes]:
        sizes = [3_000, 9_000, 40_000]
        unit_bytes = sizes[int(self.draw.integers(len(sizes)))]
        arguments = [str(self.folder / "corpus"), str(self.folder / name)]
        command = [sys.executable, "-c", KILLED, *arguments, str(workers), str(unit_bytes)]
        return subprocess.Popen(command)

    def kill_some(self, build: subprocess.Popen[bytes]) -> int:
        """Kill workers now and then, and at last the builder; gives how many were killed."""
        kills = 0
        wait_for(lambda: children(build.pid) or build.poll() is not None)
        for _ in range(int(self.draw.integers(1, 4))):
            time.sleep(float(self.draw.uniform(0.2, 1.2)))
            workers = children(build.pid)
            if workers:
                kills += self._kill(workers[int(self.draw.integers(len(workers)))])
        if self.draw.random() < 0.7:
            time.sleep(float(self.draw.uniform(0, 0.5)))
            kills += self._kill(build.pid)
        return kills

    def _kill(self, pid: int) -> bool:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


@pytest.mark.slow
def test_workers_and_builders_killed_at_random_the_bytes_are_the_same(tmp_path):
    killing = Killing(tmp_path, int(os.environ.get("SHARDMILL_KILL_SEED", "5")))
    assert killing.start("whole", 1).wait() == 0
    wanted = folder_digest(tmp_path / "whole")
    kills = rounds = 0
    least = int(os.environ.get("SHARDMILL_KILLS", "8"))
    while kills < least or not (tmp_path / "killed").exists():
        rounds += 1
        assert rounds < 3 * least, "it never gets done"
        if (tmp_path / "killed").exists():
            assert folder_digest(tmp_path / "killed") == wanted
            (tmp_path / "killed").rename(tmp_path / f"done{rounds}")
        build = killing.start("killed", int(killing.draw.integers(2, 4)))
        kills += killing.kill_some(build)
        build.wait()
    assert folder_digest(tmp_path / "killed") == wanted
    assert verify(tmp_path / "killed").problems == []
    assert not (tmp_path / ".killed.building").exists()


@pytest.mark.slow
def test_ctrl_c_stops_the_workers_at_once_and_keeps_what_is_sealed(tmp_path, monkeypatch):
    killing = Killing(tmp_path, 3)
    assert killing.start("whole", 1).wait() == 0
    with monkeypatch.context() as patch:
        patch.setenv("TESTS_PAUSE", "0.2")  # so that it is not done before
        build = killing.start("s", 2)
    wait_for(lambda: receipts(tmp_path / "s") and children(build.pid))
    workers = children(build.pid)
    for pid in (*workers, build.pid):  # as a terminal does: to all of them
        os.kill(pid, signal.SIGINT)
    assert build.wait() != 0
    assert not any(map(lives, workers))
    assert receipts(tmp_path / "s")
    assert killing.start("s", 2).wait() == 0
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")


LEFT_BEHIND = """
import os, subprocess, sys
from pathlib import Path
from shardmill.building.workplace import open_workplace
with open_workplace(Path(sys.argv[1]), {}, stamps=[], resume=False) as work:
    worker = subprocess.Popen(["sleep", "600"], pass_fds=(work.lock,), stdout=subprocess.DEVNULL)
    print(worker.pid, flush=True)
    os._exit(1)
"""


@pytest.mark.slow
def test_no_other_build_starts_while_a_worker_of_a_dead_builder_lives(tmp_path):
    """Workers hold the lock with their builder. This one cannot know that it should die."""
    command = [sys.executable, "-c", LEFT_BEHIND, str(tmp_path / "s")]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    worker = int(done.stdout)
    with pytest.raises(BuildLockedError, match="another process"):
        small_build(tmp_path, "s", TEXTS)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not lives(worker))
    small_build(tmp_path, "s", TEXTS)
    assert verify(tmp_path / "s").problems == []


@pytest.mark.slow
def test_a_second_builder_is_refused_while_workers_build(tmp_path):
    tried = []

    def try_too(progress) -> None:
        if len(tried) < 2:  # each waits a moment for a dying holder of the lock
            tried.append(progress)
            with pytest.raises(BuildLockedError, match="another process"):
                small_build(tmp_path, "s", TEXTS)

    small_build(tmp_path, "s", TEXTS, workers=2, unit_bytes=20_000, on_progress=try_too)
    assert tried


def small_build(folder: Path, name: str, texts: list[str], **options: object) -> str:
    """A store of texts, a batch for each ten of them, many units."""
    path = folder / "texts.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = JsonlSource(path, limits=BatchLimits(num_documents=10))
    tokenizer = options.pop("tokenizer", ByteTokenizer())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", 2_000)
        build_store(
            [Feed(source=source, fill=(("train", None),))],
            folder / name,
            tokenizer=tokenizer,
            spec=BuildSpec(dtype="uint16"),
            **{"unit_bytes": 4_000, **options},
        )
    return folder_digest(folder / name)


TEXTS = [f"{number} " * 40 for number in range(200)]
POISONED = [*TEXTS[:150], "poison", *TEXTS[150:]]


@pytest.mark.slow
def test_a_unit_that_kills_its_workers_is_named_and_the_rest_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("TESTS_POISON", "poison")
    with pytest.raises(BuildError, match=r"texts\.jsonl:bytes \d+-\d+.*3 workers died of it"):
        small_build(tmp_path, "s", POISONED, tokenizer=Deadly(), workers=2)
    assert len(receipts(tmp_path / "s")) > 3, "what the others did is kept"
    monkeypatch.delenv("TESTS_POISON")
    resumed = small_build(tmp_path, "s", POISONED, tokenizer=Deadly(), workers=2, resume=True)
    assert resumed == small_build(tmp_path, "whole", POISONED, tokenizer=Deadly(), workers=1)


@pytest.mark.slow
def test_an_error_in_a_worker_is_that_of_one_process(tmp_path):
    def fails(name: str, workers: int) -> str:
        with pytest.raises(TokenRangeError) as raised:
            small_build(tmp_path, name, POISONED, tokenizer=Wide(), workers=workers)
        return str(raised.value)

    alone = fails("one", 1)
    assert re.match(r"texts\.jsonl.*:bytes \d+-\d+, document \d+: token id 70,000", alone)
    assert fails("two", 2) == alone


@pytest.mark.slow
def test_bad_rows_are_named_alike_by_any_number_of_workers(tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[120] = lines[130] = "{broken"
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    found = set()
    for workers in (1, 2):
        with pytest.raises(ValueError, match="line 121") as raised:
            small_build(tmp_path, f"s{workers}", [], workers=workers)
        found.add(str(raised.value))
    assert len(found) == 1


@pytest.mark.slow
def test_an_engine_that_differs_in_a_worker_is_dropped_and_all_is_done_again(tmp_path, monkeypatch):
    small_build(tmp_path, "one", TEXTS, tokenizer=Differing(), workers=1)
    (tmp_path / "differs").touch()
    monkeypatch.setenv("TESTS_DIFFERS", str(tmp_path / "differs"))
    small_build(tmp_path, "two", TEXTS, tokenizer=Differing(), workers=2)
    assert not (tmp_path / "differs").exists()
    produced_by = open_store(tmp_path / "two").manifest.produced_by
    assert produced_by["dropped_engine"]["mismatch"] == "it differs on 'x'"
    for name in ("one", "two"):
        (tmp_path / name / "meta.json").unlink()  # it records which engine was dropped
    assert folder_digest(tmp_path / "one") == folder_digest(tmp_path / "two")


def test_progress_is_the_sum_of_all_workers_and_never_falls(tmp_path):
    seen = []
    small_build(tmp_path, "s", TEXTS, workers=2, on_progress=seen.append)
    assert {progress.source for progress in seen} == {"texts.jsonl"}
    assert [one.tokens for one in seen] == sorted(one.tokens for one in seen)
    ledger = open_store(tmp_path / "s").manifest.ledger
    assert (seen[-1].documents, seen[-1].tokens) == (len(TEXTS), ledger.tokens.kept)


def test_what_cannot_travel_is_built_here_unless_workers_were_asked_for(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("shardmill.building.resources.WORTH_A_WORKER", 1)
    monkeypatch.setattr("shardmill.building.resources.num_cores", lambda: 2)

    class Local(ByteTokenizer):
        """Defined in a function: no other process finds it."""

    wanted = small_build(tmp_path, "one", TEXTS, tokenizer=Local(), workers=1)
    with caplog.at_level("INFO"):
        assert small_build(tmp_path, "any", TEXTS, tokenizer=Local()) == wanted
    assert any("one process builds this store" in line for line in caplog.messages)
    with pytest.raises(OptionError, match=r"workers=2.*cannot travel"):
        small_build(tmp_path, "two", TEXTS, tokenizer=Local(), workers=2)


@pytest.mark.slow
def test_a_source_that_cannot_be_cut_is_read_in_this_process(tmp_path):
    def run(name: str, workers: int) -> str:
        feeds = [
            Feed(source=MemorySource(lambda: iter(TEXTS)), fill=(("train", None),)),
            Feed(source=JsonlSource(tmp_path / "texts.jsonl"), fill=(("train", None),)),
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardmill.building.plan.CHUNK_BYTES", 2_000)
            build_store(
                feeds,
                tmp_path / name,
                tokenizer=Slow(),
                spec=BuildSpec(),
                workers=workers,
                unit_bytes=9_000,
            )
        return folder_digest(tmp_path / name)

    small_build(tmp_path, "unused", TEXTS, workers=1)
    assert run("one", 1) == run("two", 2)
