"""One push at a time: flags, signs of life, conditional creates, and services without them."""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardmill.errors import StoreError, StoreExistsError
from shardmill.remote import claims, push
from shardmill.remote.claims import CLAIM, claim_folder
from shardmill.remote.contents import BUILD, MARKER
from shardmill.remote.folder import TEMPORARY
from tests.remote.conftest import Spot, files_of, remote_files
from tests.remote.test_two_pushes import (
    Stopped,
    check_outcome,
    fresh,
    little_patience,
    moments,
    stores,
)
from tests.remote.two_pushes import push_to, watched
from tests.services import LoopbackS3

pytestmark = pytest.mark.slow

__all__ = ["little_patience", "stores"]


def claim_of_another_machine(spot: Spot, beat: int = 0, *, at_work: bool = True) -> str:
    """As a push elsewhere writes it."""
    who = {"pushing": "x", "host": "elsewhere", "machine": "0123", "pid": 1, "started": 7}
    data = json.dumps({**who, "at_work": at_work, "beat": beat}).encode().ljust(600) + b"\n"
    name = f"{CLAIM}0000000000000000.json"
    spot.open().pipe(name, data)
    return name


def test_of_many_creates_at_once_one_succeeds(spot: Spot) -> None:
    place = spot.open()
    place.pipe("other", b"x")  # so that the folder is there
    gate = threading.Barrier(8)

    def create(number: int) -> bool:
        gate.wait(30)
        return place.create("claim", b"%d" % number)

    for _ in range(10):
        with ThreadPoolExecutor(8) as pool:
            done = list(pool.map(create, range(8)))
        assert sum(done) == 1
        assert remote_files(spot)["claim"] == b"%d" % done.index(True)
        place.remove("claim")
    assert sorted(remote_files(spot)) == ["other"]


def test_put_does_not_overwrite_a_file(spot: Spot, tmp_path: Path) -> None:
    place = spot.open()
    place.pipe("file", b"old")
    (tmp_path / "new").write_bytes(b"newer")
    assert place.put(tmp_path / "new", "file", lambda _: None) is False
    assert place.create("file", b"newer") is False
    assert place.create("file", b"old") is True  # ours, as after an answer that was lost
    assert remote_files(spot) == {"file": b"old"}


@pytest.mark.slow
@pytest.mark.usefixtures("little_patience")
@pytest.mark.parametrize(
    ("conditions", "before", "replace"),
    [
        pytest.param("ignored", "c", True, id="ignored, two replacements"),
        pytest.param("refused", None, False, id="refused, two stores"),
    ],
)
def test_a_service_without_conditional_requests_keeps_two_pushes_apart(
    s3: LoopbackS3, s3_spot: Spot, stores, monkeypatch, conditions: str, before, replace: bool
) -> None:
    monkeypatch.setattr(s3, "conditions", conditions)
    numbers = itertools.count()

    def prepare() -> Spot:
        place = fresh(s3_spot, next(numbers))
        if before is not None:
            push(stores[before], place.url, storage_options=place.options)
        return place

    for moment in range(0, moments(stores["a"], replace, prepare), 3):
        there = prepare()
        stopped = Stopped(stores["a"], there, moment, replace)
        outcome: list[Any] = []
        try:
            options = {"replace": replace, "storage_options": there.options}
            outcome = [("b", replace, push(stores["b"], there.url, **options).manifest_sha256)]
        except StoreError as error:
            outcome = [("b", replace, f"refused: {error}")]
        slow = stopped.finish()
        check_outcome(there, stores, [("a", replace, slow), *outcome])


def test_a_changing_claim_belongs_to_a_living_push(make_store, spot: Spot) -> None:
    claim_of_another_machine(spot)
    stop = threading.Event()

    def beat() -> None:
        for number in itertools.count(1):
            if stop.wait(0.05):
                return
            claim_of_another_machine(spot, number)

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        with pytest.raises(
            StoreError, match=r"another push or build is at work there \(process 1 on else"
        ):
            push(make_store(), spot.url, storage_options=spot.options)
    finally:
        stop.set()
        beating.join()
    assert [name[: len(CLAIM)] for name in remote_files(spot)] == [CLAIM]


@pytest.mark.parametrize("at_work", [True, False])
def test_a_claim_that_does_not_change_belongs_to_a_dead_push(
    make_store, spot: Spot, monkeypatch: pytest.MonkeyPatch, at_work: bool
) -> None:
    monkeypatch.setattr(claims, "DEAD", 0.5)
    claim_of_another_machine(spot, at_work=at_work)
    store = make_store()
    push(store, spot.url, storage_options=spot.options)
    assert remote_files(spot) == files_of(store)


def test_an_unreadable_claim_is_waited_for_too(
    make_store, spot: Spot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "DEAD", 0.5)
    spot.open().pipe(f"{CLAIM}0000.json", b"\xff{")
    store = make_store()
    push(store, spot.url, storage_options=spot.options)
    assert remote_files(spot) == files_of(store)


def test_a_push_rewrites_its_claim(spot: Spot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.02)
    with claim_folder(spot.open(), "x") as turn:
        first = remote_files(spot)[turn.name]
        deadline = time.monotonic() + 60
        while remote_files(spot)[turn.name] == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        turn.check()
    assert remote_files(spot) == {}


def test_a_push_without_contact_stops(spot: Spot, monkeypatch: pytest.MonkeyPatch) -> None:
    with claim_folder(spot.open(), "x") as turn:
        monkeypatch.setattr(claims, "LOST", 0.0)
        with pytest.raises(StoreError, match="no contact"):
            turn.check()


def test_a_push_whose_claim_was_removed_does_not_finish(make_store, spot: Spot) -> None:
    """Another one took it for dead: it may be at work there now."""
    store = make_store()

    def rob(operation: str) -> None:
        place = spot.open()
        for name in place.listing() if operation == "put" else ():
            if name.startswith(CLAIM):
                place.remove(name)

    result = push_to(store, watched(spot.url, spot.options, rob))
    assert result.startswith("StoreError")
    assert "another push took over" in result
    assert "meta.json" not in remote_files(spot)
    push(store, spot.url, storage_options=spot.options)
    assert remote_files(spot) == files_of(store)


def test_leftovers_of_killed_pushes_beside_a_finished_store_are_removed(
    make_store, spot: Spot
) -> None:
    store, place = make_store(), spot.open()
    push(store, spot.url, storage_options=spot.options)
    for name in (MARKER, f"{BUILD}plan.json", f"{TEMPORARY}0123"):
        place.pipe(name, b"left")
    again = push(store, spot.url, storage_options=spot.options)
    assert again.moved_files == 0
    assert remote_files(spot) == files_of(store)


def test_a_refused_push_writes_nothing(make_store, spot: Spot) -> None:
    first, second = make_store("first", seed=1), make_store("second", seed=2)
    push(first, spot.url, storage_options=spot.options)
    place = spot.open()
    place.pipe(MARKER, b"left")
    with pytest.raises(StoreExistsError, match="nothing was sent"):
        push(second, spot.url, storage_options=spot.options)
    assert remote_files(spot) == {**files_of(first), MARKER: b"left"}
