"""Documents, conversations and hub datasets on a real Ray of three nodes: the bytes of one process,
with any number of workers, and whatever is killed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shardmill.errors import StoreNotFoundError
from shardmill.store import open_store, verify
from tests.building.clusters import HEAD, SECOND, THIRD, Nodes, ray_nodes, raylet_of
from tests.building.processes import lives, wait_for
from tests.building.ray_inputs import Builder, write_inputs
from tests.building.workplaces import receipts
from tests.helpers import folder_digest
from tests.services import LoopbackHub

pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

CPUS = {HEAD: 1, SECOND: 3, THIRD: 3}  # that Ray thinks it has


class Place:
    """The cluster, the inputs, and what one process makes of them."""

    def __init__(self, folder: Path, environ: dict[str, str], nodes: Nodes) -> None:
        self.folder, self.nodes = folder, nodes
        self.marks = folder / "marks"
        self._environ = environ
        self._builders: list[Builder] = []
        self._wanted: dict[str, str] = {}
        self.local = self.builder()

    def builder(self) -> Builder:
        number = len(self._builders)
        errors = self.folder / f"errors-{number}.txt"
        self._builders.append(Builder(self.folder / "inputs", self._environ, errors))
        return self._builders[-1]

    def wanted(self, kind: str) -> str:
        """The digest of the store that one process builds."""
        if kind not in self._wanted:
            out = self.folder / f"wanted-{kind}"
            self.local.build(kind, out, workers=1)
            self._wanted[kind] = folder_digest(out)
        return self._wanted[kind]

    def on_ray(self) -> dict[str, Any]:
        return {"run_on": "ray", "ray_address": self.nodes.address}

    def workers(self) -> list[int]:
        """Living processes that have encoded something on Ray."""
        found = (int(path.name.partition("-")[2]) for path in self.marks.glob("*-*"))
        return sorted(filter(lives, found))

    def forget(self) -> None:
        for path in self.marks.iterdir():
            path.unlink()

    def close(self) -> None:
        for builder in self._builders:
            builder.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("ray")
    for name in ("marks", "home"):
        (folder / name).mkdir()
    with LoopbackHub() as hub:
        write_inputs(folder / "inputs", hub)
        environ = hub.environment(folder / "home")
        workers = {**environ, "TESTS_WATCHED": str(folder / "marks")}
        with ray_nodes(CPUS[HEAD], workers) as nodes:
            for address in (SECOND, THIRD):
                nodes.add(CPUS[address], address)
            opened = Place(folder, environ, nodes)
            try:
                yield opened
            finally:
                opened.close()


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["files and hub", "chats"])
def test_any_number_of_workers_on_ray_writes_the_bytes_of_one_process(
    place: Place, tmp_path: Path, kind: str, workers: int
) -> None:
    place.forget()
    (place.marks / "gate").write_text(str(workers))
    place.local.build(kind, tmp_path / "s", workers=workers, unit_bytes=9_000, **place.on_ray())
    assert folder_digest(tmp_path / "s") == place.wanted(kind)
    assert len(list(place.marks.glob("*-*"))) == workers, "each had something to do"


class Killing:
    """Builds of which something is killed at random."""

    def __init__(self, place: Place, folder: Path, draw: np.random.Generator) -> None:
        self.place, self.folder, self.draw = place, folder, draw
        self.kills: Counter[tuple[str, str]] = Counter()  # by input and by what was killed
        self._next: list[str] = []  # what is killed next, the last one first
        self._nodes = [place.nodes.add(2, address) for address in (SECOND, THIRD)]
        self._acts = {
            "worker": self._kill_worker,
            "node": self._kill_node,
            "coordinator": self._kill_coordinator,
        }

    def build(self, kind: str, out: Path, num_kills: int) -> None:
        """A store, in the end; it may be there before so much was killed."""
        while not out.exists():
            builder = self.place.builder()
            self._start(builder, kind, out)
            while num_kills and not self._is_over(builder, out):
                self._next = self._next or list(self.draw.permutation(list(self._acts)))
                print(time.time(), self._next[-1], self._is_over(builder, out), self.kills)
                if self._acts[self._next[-1]](builder, out):
                    self.kills[kind, self._next.pop()] += 1
                    num_kills -= 1
            if builder.process.poll() is None:
                builder.finish()
            elif builder.process.returncode != -signal.SIGKILL:
                assert re.search("3 workers died of it", builder.messages()), builder.messages()
            builder.close()
            if not out.exists():
                with pytest.raises(StoreNotFoundError):
                    open_store(out)

    def _start(self, builder: Builder, kind: str, out: Path) -> None:
        workers = int(self.draw.integers(2, 5))
        unit_bytes = int(self.draw.choice([3_000, 9_000, 40_000]))
        options = {"workers": workers, "unit_bytes": unit_bytes, "resume": True}
        builder.start(kind, out, **options, **self.place.on_ray())

    def _is_over(self, builder: Builder, out: Path) -> bool:
        return out.exists() or builder.process.poll() is not None

    def _wait(self, builder: Builder, out: Path) -> None:
        """Until some more units are made, and a bit longer."""
        wanted = len(receipts(out)) + int(self.draw.integers(1, 5))
        wait_for(lambda: len(receipts(out)) >= wanted or self._is_over(builder, out))
        time.sleep(float(self.draw.uniform(0, 0.2)))

    def _kill_worker(self, builder: Builder, out: Path) -> bool:
        """One that has encoded something; whether there was one."""
        self._wait(builder, out)
        workers = self.place.workers()
        return bool(workers) and kill(int(self.draw.choice(workers)))

    def _kill_node(self, builder: Builder, out: Path) -> bool:
        """One with such a worker, and all its workers. Then one like it joins."""
        self._wait(builder, out)
        workers = set(self.place.workers())
        for number in self.draw.permutation(len(self._nodes)).tolist():
            node = self._nodes[number]
            below = [one.pid for one in psutil.Process(raylet_of(node)).children(recursive=True)]
            if workers.isdisjoint(below):
                continue
            self.place.nodes.remove(node)
            for pid in below:
                kill(pid)
            self._nodes[number] = self.place.nodes.add(2, node.node_ip_address)
            return True
        return False

    def _kill_coordinator(self, builder: Builder, out: Path) -> bool:
        """While it starts, or later."""
        if self.draw.random() < 0.3:
            time.sleep(float(self.draw.uniform(0, 3)))
        else:
            self._wait(builder, out)
        if self._is_over(builder, out):
            return False
        builder.process.kill()
        builder.process.wait()
        return True

    def close(self) -> None:
        for node in self._nodes:
            self.place.nodes.remove(node)


def kill(pid: int) -> bool:
    """Whether it was alive."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def test_whatever_is_killed_on_ray_the_bytes_are_those_of_one_process(
    place: Place, tmp_path: Path
) -> None:
    place.forget()
    draw = np.random.default_rng(int(os.environ.get("SHARDMILL_KILL_SEED", "5")))
    least = int(os.environ.get("SHARDMILL_KILLS", "6"))
    killing = Killing(place, tmp_path, draw)
    kinds = ("files", "chats", "hub")
    rounds = 0
    while killing.kills.total() < least or len({kind for kind, _ in killing.kills}) < len(kinds):
        kind, out = kinds[rounds % len(kinds)], tmp_path / f"{rounds}"
        rounds += 1
        assert rounds < 3 * least, f"they are not killed: {killing.kills}"
        killing.build(kind, out, int(draw.integers(2, 4)))
        assert folder_digest(out) == place.wanted(kind)
        assert verify(out).problems == []
        assert [path.name for path in tmp_path.glob(".*")] == [], "no workplace is left"
        wait_for(lambda: not place.workers())
    print(f"killed in {rounds} builds: {dict(sorted(killing.kills.items()))}")
    assert {what for _, what in killing.kills} == {"worker", "node", "coordinator"}
    killing.close()
