"""Two pushes to one place at once: never a store that does not verify, never a false success."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.errors import StoreExistsError
from shardmill.records import Ragged
from shardmill.remote import claims, push, verify_remote
from shardmill.remote.contents import MARKER, local_contents
from shardmill.remote.push import _marker
from shardmill.testing.stores import build_small_store
from tests.remote.conftest import Spot, files_of, remote_files
from tests.remote.two_pushes import Killed, Watched, delays, push_to, watched

RUNS = int(os.environ.get("SHARDMILL_PUSH_RUNS", "12"))
MANIFEST = "meta.json"


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that is stopped does not withdraw, so there is no use in waiting for it."""
    monkeypatch.setattr(claims, "PATIENCE", 0.1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three small stores. All have the same file names; `b` and `c` share a shard."""
    root = tmp_path_factory.mktemp("stores")
    shared = np.arange(60)
    for name, first in (("a", shared + 1000), ("b", shared), ("c", shared)):
        last = np.arange(60) + 100 * ord(name)
        ids = Ragged.from_sequences([first, last])
        build_small_store(root / name, {"train": ids}, shard_bytes=120)
    return {name: root / name for name in "abc"}


def manifest_of(store: Path) -> str:
    return local_contents(store).manifest_sha256


def check_whole(spot: Spot, stores: dict[str, Path]) -> str | None:
    """The name of the store that is finished there; every file of it has the right bytes."""
    found = remote_files(spot)
    if MANIFEST not in found:
        return None
    (name,) = [
        name for name, store in stores.items() if files_of(store)[MANIFEST] == found[MANIFEST]
    ]
    assert found == files_of(stores[name]), sorted(found)
    return name


def check_outcome(spot: Spot, stores: dict[str, Path], pushed: list[tuple[str, bool, str]]) -> None:
    """`pushed` are (store, replace, what came of it), in any order."""
    there = check_whole(spot, stores)
    successes = [
        (name, replace) for name, replace, result in pushed if result == manifest_of(stores[name])
    ]
    for name, _ in successes:
        replaced = any(other == there and replace for other, replace in successes)
        assert there == name or replaced, f"{name} was reported as pushed, but {there} is there"
    assert successes, pushed
    left = [name for name in remote_files(spot) if name.startswith(".shardmill")]
    assert left == []


def moments(store: Path, replace: bool, prepare: Callable[[], Spot]) -> int:
    """How many operations an undisturbed push takes."""
    seen: list[str] = []
    spot = prepare()
    push_to(store, watched(spot.url, spot.options, seen.append), replace=replace)
    return len(seen)


def fresh(spot: Spot, number: int) -> Spot:
    return Spot(f"{spot.url}-{number}", spot.options)


def some(total: int, spot: Spot) -> range:
    """Every moment; of the slower server every third one, others in each test."""
    return range(len(spot.url) % 3, total, 3) if spot.url.startswith("s3:") else range(total)


class Stopped:
    """A push in a thread that stops before its operation number `moment`, until `finish`."""

    def __init__(self, folder: Path, spot: Spot, moment: int, replace: bool) -> None:
        self.reached, self.resume = threading.Event(), threading.Event()
        self.count, self.moment = itertools.count(), moment
        self.result = ""
        place = watched(spot.url, spot.options, self.hook, one_at_a_time=True)
        self.thread = threading.Thread(target=self.run, args=(folder, place, replace), daemon=True)
        self.thread.start()
        assert self.reached.wait(600)

    def run(self, folder: Path, place: Watched, replace: bool) -> None:
        self.result = push_to(folder, place, replace=replace)
        self.reached.set()

    def hook(self, _: str) -> None:
        if next(self.count) == self.moment:
            self.reached.set()
            assert self.resume.wait(600)

    def finish(self) -> str:
        self.resume.set()
        self.thread.join(600)
        return self.result


PAIRS = [
    # what is there before, the push that stops (store, replace), the push that goes by
    pytest.param(None, ("a", False), ("b", False), id="two stores"),
    pytest.param(None, ("a", False), ("a", False), id="one store twice"),
    pytest.param("c", ("a", True), ("b", True), id="two replacements"),
    pytest.param("c", ("b", True), ("a", True), id="two replacements, one shares a shard"),
    pytest.param("c", ("a", True), ("a", True), id="one replacement twice"),
    pytest.param("c", ("a", True), ("c", False), id="a replacement, and the old store again"),
    pytest.param(None, ("a", False), ("b", True), id="a push, and one that may replace"),
]
ANYWHERE = [
    # Every pair in memory. Places differ in how they create a file, which some pairs show too.
    pytest.param(where, *pair.values, id=f"{where}-{pair.id}")
    for where, pairs in (("memory", PAIRS), ("file", PAIRS[::3]), ("s3", PAIRS[::3]))
    for pair in pairs
]


@pytest.mark.slow
@pytest.mark.usefixtures("little_patience")
@pytest.mark.parametrize(("spot", "before", "first", "second"), ANYWHERE, indirect=["spot"])
def test_a_push_paused_at_any_step_while_another_runs_harms_nothing(
    spot: Spot, stores: dict[str, Path], before: str | None, first: Any, second: Any
) -> None:
    numbers = itertools.count()

    def prepare() -> Spot:
        place = fresh(spot, next(numbers))
        if before is not None:
            push(stores[before], place.url, storage_options=place.options)
        return place

    total = moments(stores[first[0]], first[1], prepare)
    assert total > 10
    for moment in some(total, spot):
        there = prepare()
        stopped = Stopped(stores[first[0]], there, moment, first[1])
        quick = push_to(stores[second[0]], there.open(), replace=second[1])
        check_whole_unless_unfinished(there, stores)
        slow = stopped.finish()
        check_outcome(there, stores, [(*first, slow), (*second, quick), *given(before, stores)])


def given(before: str | None, stores: dict[str, Path]) -> list[tuple[str, bool, str]]:
    return [] if before is None else [(before, False, manifest_of(stores[before]))]


def check_whole_unless_unfinished(spot: Spot, stores: dict[str, Path]) -> None:
    """A manifest is never beside files of another store, whichever push is at work."""
    found = remote_files(spot)
    for store in stores.values():
        wanted = files_of(store)
        if found.get(MANIFEST) == wanted[MANIFEST]:
            assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spot", "before", "replace", "next_one"),
    [
        *product(["memory", "file", "s3"], [None], [False], ["the same"]),
        *product(["memory", "file", "s3"], ["c"], [True], ["another"]),
        ("memory", None, False, "another"),
        ("memory", "c", True, "the same"),
    ],
    indirect=["spot"],
)
def test_a_push_killed_at_any_step_leaves_nothing_after_the_next_one(
    spot: Spot, stores: dict[str, Path], before: str | None, replace: bool, next_one: str
) -> None:
    numbers = itertools.count()

    def prepare() -> Spot:
        place = fresh(spot, next(numbers))
        if before is not None:
            push(stores[before], place.url, storage_options=place.options)
        return place

    for moment in some(moments(stores["a"], replace, prepare), spot):
        there, count = prepare(), itertools.count()

        def killed(_: str, moment: int = moment, count: Iterator[int] = count) -> None:
            if next(count) >= moment:
                raise Killed

        with pytest.raises(Killed):
            push_to(stores["a"], watched(there.url, there.options, killed), replace=replace)
        check_whole_unless_unfinished(there, stores)
        again = "a" if next_one == "the same" else "b"
        result = push_to(stores[again], there.open(), replace=replace or again == "b")
        assert result == manifest_of(stores[again])
        assert remote_files(there) == files_of(stores[again])


@pytest.fixture(params=["memory, threads", "s3, processes"])
def pushers(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Spot, Callable[..., list[str]]]]:
    """Where, and a function that does two pushes at once."""
    kind, how = request.param.split(", ")
    if kind == "memory":
        spot = Spot(f"memory://two/{tmp_path.name}-{os.getpid()}", {})
    else:
        spot = request.getfixturevalue("s3_spot")
    if how == "threads":
        with ThreadPoolExecutor(2) as pool:

            def in_threads(spot: Spot, tasks: list[tuple[Path, bool, int]]) -> list[str]:
                futures = [
                    pool.submit(
                        push_to,
                        folder,
                        watched(spot.url, spot.options, delays(seed)),
                        replace=replace,
                    )
                    for folder, replace, seed in tasks
                ]
                return [one.result(120) for one in futures]

            yield spot, in_threads
        return
    command = [sys.executable, "-m", "tests.remote.two_pushes"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    workers = [subprocess.Popen(command, text=True, bufsize=1, **pipes) for _ in range(2)]

    def in_processes(spot: Spot, tasks: list[tuple[Path, bool, int]]) -> list[str]:
        for worker, (folder, replace, seed) in zip(workers, tasks, strict=True):
            task = {"folder": str(folder), "url": spot.url, "options": spot.options}
            worker.stdin.write(json.dumps({**task, "replace": replace, "seed": seed}) + "\n")
        return [json.loads(worker.stdout.readline()) for worker in workers]

    try:
        yield spot, in_processes
    finally:
        for worker in workers:
            worker.stdin.close()
            worker.wait(600)
            worker.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(0 if RUNS > 12 else 240)
def test_two_pushes_at_once_with_random_delays(pushers: Any, stores: dict[str, Path]) -> None:
    spot, both = pushers
    tally: dict[str, int] = {}
    for number in range(RUNS):
        generator = random.Random(number)
        there = fresh(spot, number)
        before = generator.choice([None, None, "c"])
        if before is not None:
            push(stores[before], there.url, storage_options=there.options)
        pair = [(generator.choice("abc"), generator.random() < 0.5) for _ in range(2)]
        if before is not None and not any(replace for _, replace in pair):
            pair[0] = (pair[0][0], True)
        tasks = [(stores[name], replace, generator.randrange(2**32)) for name, replace in pair]
        results = both(there, tasks)
        outcomes = [(*one, result) for one, result in zip(pair, results, strict=True)]
        check_outcome(there, stores, [*outcomes, *given(before, stores)])
        for result in results:
            kind = result.partition(":")[0] if ":" in result else "pushed"
            tally[kind] = tally.get(kind, 0) + 1
    print(f"{RUNS} runs, {hashlib.sha256(spot.url.encode()).hexdigest()[:4]}: {tally}")
    assert tally["pushed"] >= RUNS


def test_data_files_that_no_manifest_lists_are_refused_or_removed(
    tmp_path: Path, stores: dict[str, Path], spot: Spot, caplog: pytest.LogCaptureFixture
) -> None:
    """`verify` would report them, so a push must not say that all is well."""
    place = spot.open()
    stray = "train/shard_00099.bin"
    place.create(stray, b"x")
    with pytest.raises(
        StoreExistsError, match=f"{stray} is there, and no push of ours put it there"
    ):
        push(stores["a"], spot.url, storage_options=spot.options)
    push(stores["a"], spot.url, storage_options=spot.options, replace=True)
    assert verify_remote(spot.url, storage_options=spot.options).problems == []
    place.create(stray, b"x")
    push(stores["a"], spot.url, storage_options=spot.options)
    assert f"{stray}: a data file that the manifest does not list (1 in all)" in caplog.text
    push(stores["a"], spot.url, storage_options=spot.options, replace=True)
    assert verify_remote(spot.url, storage_options=spot.options).problems == []


def test_a_resumed_replacement_leaves_nothing_of_the_old_store(
    stores: dict[str, Path], spot: Spot
) -> None:
    push(stores["c"], spot.url, storage_options=spot.options)
    place = spot.open()
    stray = "train/shard_00099.bin"  # listed by the old manifest, which is gone
    place.create(stray, b"x")
    place.remove("meta.json")
    place.create(MARKER, _marker(local_contents(stores["a"])))
    push(stores["a"], spot.url, storage_options=spot.options)
    assert verify_remote(spot.url, storage_options=spot.options).problems == []
    assert stray not in place.listing()
