"""Same inputs, same bytes on Ray: real clusters on this machine whose workers and nodes die."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.errors import BuildError, OptionError
from shardmill.sources import BatchLimits, JsonlSource
from shardmill.store import verify
from shardmill.tokenizers import ByteTokenizer
from tests.building.clusters import SECOND, ray_nodes, raylet_of
from tests.building.corpora import feeds_of, write_corpus
from tests.building.parts import Watched
from tests.building.processes import wait_for
from tests.building.workplaces import receipts
from tests.helpers import folder_digest

pytestmark = pytest.mark.slow
SPEC = BuildSpec(shard_bytes=20_000)


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marks")


@pytest.fixture(scope="module")
def nodes(marks) -> Iterator[Any]:
    with ray_nodes(2, {"TESTS_WATCHED": str(marks)}) as opened:
        yield opened


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), num_files=3)


@pytest.fixture(autouse=True)
def _fresh(marks, monkeypatch) -> None:
    """No mark of an earlier test; many chunks and units."""
    for path in marks.iterdir():
        path.unlink()
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 3_000)


@pytest.fixture(scope="module")
def wanted(corpus, tmp_path_factory) -> str:
    """What one process makes of the corpus."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", 3_000)
        return build(corpus, tmp_path_factory.mktemp("wanted") / "one", workers=1)


def build(corpus: Path, out: Path, **manner: Any) -> str:
    options = {"unit_bytes": 9_000, "tokenizer": Watched(), "max_loss": 1.0, **manner}
    build_store(feeds_of(corpus), out, spec=SPEC, **options)
    return folder_digest(out)


def on_ray(nodes) -> dict[str, Any]:
    return {"run_on": "ray", "ray_address": nodes.address}


def workers_of(marks: Path, raylet: int) -> list[int]:
    """Processes below a node that have encoded something."""
    return [int(path.name.partition("-")[2]) for path in marks.glob(f"{raylet}-*")]


@contextmanager
def beside(act: Callable[[], None]) -> Iterator[list[str]]:
    """Do something in a thread; gives a list that holds its error or "done"."""
    outcome: list[str] = []

    def run() -> None:
        try:
            act()
            outcome.append("done")
        except BaseException as error:  # noqa: BLE001 - compared by the test
            outcome.append(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join()


def test_one_process_and_ray_write_the_same_bytes(tmp_path, corpus, nodes, marks, wanted, caplog):
    caplog.set_level("INFO")
    assert build(corpus, tmp_path / "ray", **on_ray(nodes)) == wanted
    assert len(workers_of(marks, raylet_of(nodes.head))) == 2
    (line,) = [line for line in caplog.messages if line.startswith("Ray at")]
    assert line == f"Ray at {nodes.address}: 1 nodes with 2 CPUs, 2 of them free"
    assert build(corpus, tmp_path / "few", workers=1, unit_bytes=10**9, **on_ray(nodes)) == wanted
    assert verify(tmp_path / "ray").problems == []
    assert [path.name for path in tmp_path.glob(".*")] == [], "no workplace is left"


def test_splits_that_get_full_on_ray_get_the_same_bytes(tmp_path, corpus, nodes):
    def limited(name: str, **manner: Any) -> str:
        feeds = feeds_of(corpus, limits=(2_000, 9_000))
        options = {"tokenizer": ByteTokenizer(), "spec": SPEC, "max_loss": 1.0, **manner}
        build_store(feeds, tmp_path / name, **options)
        return folder_digest(tmp_path / name)

    assert limited("ray", unit_bytes=5_000, **on_ray(nodes)) == limited("one", workers=1)


def test_a_ray_worker_that_ends_in_mid_task_costs_nothing_but_time(
    tmp_path, corpus, nodes, marks, wanted, caplog
):
    """In order, as Ray itself ends them: one that is killed is in test_engines.py."""
    poison = "poison in order"
    (marks / poison).write_text("caf\u00e9 word caf")
    assert build(corpus, tmp_path / "ray", **on_ray(nodes)) == wanted
    assert not (marks / poison).exists()
    assert sum("its worker died" in line for line in caplog.messages) == 1
    assert len(workers_of(marks, raylet_of(nodes.head))) == 3, "another worker came"


def small_build(folder: Path, name: str, texts: list[str], **options: Any) -> str:
    """A store of texts, a batch for each ten of them, many units."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    os.utime(path, (10**9, 10**9))
    source = JsonlSource(path, limits=BatchLimits(num_documents=10))
    feeds = [Feed(source=source, fill=(("train", None),))]
    options = {"unit_bytes": 6_000, "tokenizer": Watched(), **options}
    done = build_store(feeds, folder / name, spec=BuildSpec(dtype="uint16"), **options)
    assert done.utilisation is not None
    return folder_digest(folder / name)


TEXTS = [f"{number} " * 40 for number in range(120)]
POISONED = [*TEXTS[:90], "poison", *TEXTS[90:]]


def test_a_unit_that_kills_its_workers_is_named_and_the_rest_can_be_resumed(tmp_path, nodes, marks):
    (marks / "poison").write_text("poison")
    named = r"texts\.jsonl:bytes \d+-\d+.*: 3 workers died of it, the last one on .*End of file"
    with pytest.raises(BuildError, match=named):
        small_build(tmp_path, "s", POISONED, **on_ray(nodes))
    assert len(receipts(tmp_path / "s")) > 3, "what the others did is kept"
    (marks / "poison").unlink()
    resumed = small_build(tmp_path, "s", POISONED, resume=True, **on_ray(nodes))
    assert resumed == small_build(tmp_path, "whole", POISONED, workers=1)


def test_a_second_node_removed_in_mid_build_costs_nothing_but_time(
    tmp_path, corpus, nodes, marks, wanted, caplog
):
    second = nodes.add(2, SECOND)
    raylet = raylet_of(second)

    def remove() -> None:
        wait_for(lambda: len(workers_of(marks, raylet)) == 2)
        nodes.remove(second)

    with beside(remove) as outcome:
        found = build(corpus, tmp_path / "ray", **on_ray(nodes))
    assert outcome == ["done"], "work was done on the node before it was removed"
    assert found == wanted
    assert any("its worker died (with its machine" in line for line in caplog.messages)
    assert verify(tmp_path / "ray").problems == []


def test_what_a_worker_cannot_read_is_named_and_done_here(tmp_path, nodes, marks, caplog):
    """As on a node that does not have the disk of the input."""
    wanted = small_build(tmp_path, "one", TEXTS, workers=1)
    (marks / "blind").touch()
    assert small_build(tmp_path, "ray", TEXTS, **on_ray(nodes)) == wanted
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) >= 2
    assert all("texts.jsonl:bytes " in record.getMessage() for record in warned)
    assert all("No such file or directory: 'remote.jsonl'" in one.getMessage() for one in warned)


class Joining(logging.Handler):
    """Adds a node when a warning says that there is no space."""

    def __init__(self, nodes) -> None:
        super().__init__()
        self.nodes = nodes

    def emit(self, record: logging.LogRecord) -> None:
        if "no worker could be placed" in record.getMessage():
            self.nodes.add(1, SECOND)


def test_a_cluster_without_a_cpu_is_refused_or_waited_for(tmp_path, monkeypatch):
    from shardmill.building.engines import ray as ray_engine

    monkeypatch.setattr(ray_engine, "_PATIENCE_SECONDS", 0.5)
    with ray_nodes(0) as empty:
        with pytest.raises(OptionError, match=r"1 nodes with 0 CPUs.*say how many workers"):
            small_build(tmp_path, "s", TEXTS, **on_ray(empty))
        joining = Joining(empty)
        ray_engine.log.addHandler(joining)
        try:
            found = small_build(tmp_path, "s", TEXTS, workers=1, **on_ray(empty))
        finally:
            ray_engine.log.removeHandler(joining)
    assert found == small_build(tmp_path, "one", TEXTS, workers=1)


def test_what_cannot_travel_is_refused(tmp_path, nodes):
    class Local(ByteTokenizer):
        """Defined in a function: no other process finds it."""

    with pytest.raises(OptionError, match=r"run_on='ray': .*cannot travel.*in one process"):
        small_build(tmp_path, "s", TEXTS, tokenizer=Local(), **on_ray(nodes))
