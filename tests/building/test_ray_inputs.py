"""Documents, conversations and hub datasets on a real Ray of three nodes: the bytes of one process,
with any number of workers, and whatever is killed.

SHARDMILL_KILLS says how many kills there are at least, SHARDMILL_KILL_SEED draws others, and
SHARDMILL_RAY_WORKERS=1,2,3,7 builds with so many workers.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
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
        """`environ`: of builders, with the address of the hub."""
        self.folder, self.nodes = folder, nodes
        self.others = [nodes.add(CPUS[address], address) for address in (SECOND, THIRD)]
        self.marks = folder / "marks"
        self._environ = environ
        self._builders: list[Builder] = []
        self._wanted: dict[str, str] = {}

    def builder(self) -> Builder:
        """A process that waits for jobs: the last one, if it lives."""
        if not self._builders or self._builders[-1].process.poll() is not None:
            errors = self.folder / f"errors-{len(self._builders)}.txt"
            self._builders.append(Builder(self.folder / "inputs", self._environ, errors))
        return self._builders[-1]

    def wanted(self, kind: str) -> str:
        """The digest of the store that one process builds."""
        if kind not in self._wanted:
            out = self.folder / f"wanted-{kind}"
            self.builder().build(kind, out, workers=1)
            self._wanted[kind] = folder_digest(out)
        return self._wanted[kind]

    def on_ray(self) -> dict[str, Any]:
        return {"run_on": "ray", "ray_address": self.nodes.address}

    def workers(self) -> set[int]:
        """Living processes that have encoded something on Ray."""
        found = ((int(path.name.partition("-")[2]), path) for path in self.marks.glob("*-*"))
        return {pid for pid, mark in found if lives(pid) and not _is_younger(pid, mark)}

    def set(self, **settings: float) -> None:
        """How workers behave (see `Watched`); what was set and seen before is forgotten."""
        for path in self.marks.iterdir():
            path.unlink()
        for name, value in settings.items():
            (self.marks / name).write_text(str(value))

    def kill_node(self, number: int) -> None:
        """One of the others, with its workers. Then one like it joins."""
        node = self.others[number]
        below = psutil.Process(raylet_of(node)).children(recursive=True)
        self.nodes.remove(node)
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.others[number] = self.nodes.add(CPUS[node.node_ip_address], node.node_ip_address)

    def close(self) -> None:
        for builder in self._builders:
            builder.close()


def _is_younger(pid: int, mark: Path) -> bool:
    """Whether it is not the process that left the mark, but got its number later."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).create_time() > mark.stat().st_mtime + 2  # seconds of a clock
    return True


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
            opened = Place(folder, environ, nodes)
            try:
                yield opened
            finally:
                opened.close()


_ASKED = os.environ.get("SHARDMILL_RAY_WORKERS", "")
_CASES = [("files and hub", 4), ("chats", 2)]
if _ASKED:
    _CASES = [(kind, int(number)) for kind, _ in _CASES for number in _ASKED.split(",")]


@pytest.mark.parametrize(("kind", "workers"), _CASES)
def test_any_number_of_workers_on_ray_writes_the_bytes_of_one_process(
    place: Place, tmp_path: Path, kind: str, workers: int
) -> None:
    place.set(gate=workers)
    builder, out = place.builder(), tmp_path / "s"
    builder.build(kind, out, workers=workers, unit_bytes=9_000, **place.on_ray())
    assert folder_digest(out) == place.wanted(kind)
    assert len(list(place.marks.glob("*-*"))) == workers, "each had something to do"


class Killer:
    """Kills something of builds, at random."""

    def __init__(self, place: Place, draw: np.random.Generator) -> None:
        self._place, self._draw = place, draw
        self.kills: Counter[tuple[str, str]] = Counter()  # by input, and by what was killed
        self._ways = {
            "worker": partial(self._end_worker, signal.SIGKILL),
            "worker in order": partial(self._end_worker, signal.SIGTERM),  # as Ray itself does
            "node": self._kill_node,
            "coordinator": self._kill_coordinator,
        }
        self._next: list[str] = []  # of these, the last one first
        self._earlier: set[int] = set()  # workers of a coordinator that is dead

    def build(self, kind: str, out: Path, num_kills: int) -> None:
        """A store, in the end; it may be there before so much was killed."""
        left, exit_code = num_kills, -1
        while exit_code is not None:
            builder = self._start(kind, out)
            while left and not _is_over(builder, out):
                self._next = self._next or self._draw.permutation(list(self._ways)).tolist()
                if self._ways[self._next[-1]](builder, out):
                    self.kills[kind, self._next.pop()] += 1
                    left -= 1
            exit_code = builder.finish()
            if exit_code not in (None, -signal.SIGKILL):  # one unit can be unlucky three times
                assert "3 workers died of it" in builder.messages(), builder.messages()
            if not out.exists():
                with pytest.raises(StoreNotFoundError):
                    open_store(out)

    def _start(self, kind: str, out: Path) -> Builder:
        builder, self._earlier = self._place.builder(), self._place.workers()
        workers = int(self._draw.integers(2, 5))
        unit_bytes = int(self._draw.choice([3_000, 9_000, 40_000]))
        how = {"workers": workers, "unit_bytes": unit_bytes, "resume": True}
        builder.start(kind, out, **how, **self._place.on_ray())
        return builder

    def _wait(self, builder: Builder, out: Path) -> None:
        """Until some more units are made, and a bit longer."""
        wanted = len(receipts(out)) + int(self._draw.integers(1, 5))
        wait_for(lambda: len(receipts(out)) >= wanted or _is_over(builder, out))
        time.sleep(float(self._draw.uniform(0, 0.2)))

    def _workers(self, builder: Builder, out: Path) -> list[int]:
        """Those of this build that have encoded something; none when it is over."""
        found = self._place.workers() - self._earlier
        return [] if _is_over(builder, out) else sorted(found)

    def _end_worker(self, by: signal.Signals, builder: Builder, out: Path) -> bool:
        """Whether there was one to be killed."""
        self._wait(builder, out)
        found = self._workers(builder, out)
        if found:
            os.kill(int(self._draw.choice(found)), by)
        return bool(found)

    def _kill_node(self, builder: Builder, out: Path) -> bool:
        """One that has such a worker."""
        self._wait(builder, out)
        found = self._workers(builder, out)
        for number in self._draw.permutation(len(self._place.others)).tolist():
            raylet = psutil.Process(raylet_of(self._place.others[number]))
            if {child.pid for child in raylet.children(recursive=True)}.intersection(found):
                self._place.kill_node(number)
                return True
        return False

    def _kill_coordinator(self, builder: Builder, out: Path) -> bool:
        """While it starts, or later."""
        if self._draw.random() < 0.3:
            time.sleep(float(self._draw.uniform(0, 3)))
        else:
            self._wait(builder, out)
        if _is_over(builder, out):
            return False
        builder.process.kill()
        builder.process.wait()
        return True


def _is_over(builder: Builder, out: Path) -> bool:
    return out.exists() or builder.process.poll() is not None


def test_whatever_is_killed_on_ray_the_bytes_are_those_of_one_process(
    place: Place, tmp_path: Path
) -> None:
    draw = np.random.default_rng(int(os.environ.get("SHARDMILL_KILL_SEED", "5")))
    least = int(os.environ.get("SHARDMILL_KILLS", "4"))
    killer, kinds, rounds = Killer(place, draw), ("files", "chats", "hub"), 0
    while killer.kills.total() < least or len({kind for kind, _ in killer.kills}) < len(kinds):
        kind, out = kinds[rounds % len(kinds)], tmp_path / f"{rounds}"
        rounds += 1
        place.set(pause=0.1)
        assert rounds < 3 * least, f"they are not killed: {killer.kills}"
        killer.build(kind, out, int(draw.integers(1, 3)))
        assert folder_digest(out) == place.wanted(kind)
        assert verify(out).problems == []
        assert [path.name for path in tmp_path.glob(".*")] == [], "no workplace is left"
        wait_for(lambda: not place.workers())
    print(f"{killer.kills.total()} kills in {rounds} builds: {dict(sorted(killer.kills.items()))}")
    assert len({what for _, what in killer.kills}) == 4, "each way to die"
