"""The cache: bounded, whole, shared by processes, with nothing held by the dead."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import DamagedStoreError, OptionError, StoreError
from shardmill.remote import open_remote, push
from shardmill.remote.cached_store import FileCache
from tests.remote.conftest import Spot, files_of


def filler(path: Path) -> None:
    path.write_bytes(b"x" * int(path.name.split(".")[-2]))


def used(folder: Path, pattern: str = "*") -> int:
    """Bytes of the files that are there; others may go while we look."""
    total = 0
    for path in folder.rglob(pattern):
        with suppress(FileNotFoundError):
            found = path.lstat()
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


@contextmanager
def forked_process() -> Iterator[int]:
    """A copy of this process that runs, does nothing, and ends with the block."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.write(writer, b"x")
        while True:
            signal.pause()
    try:
        assert os.read(reader, 1) == b"x"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


@settings(deadline=None, max_examples=50)
@given(asked=st.lists(st.integers(0, 7), max_size=40), num_files=st.integers(1, 4))
def test_the_least_recently_used_file_goes_and_the_bound_holds(
    tmp_path_factory, asked, num_files
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache, recent = FileCache(folder, num_files * 100), []
    fetched: list[str] = []

    def fetch(part: Path) -> None:
        fetched.append(part.name)
        filler(part)

    for number in asked:
        before = len(fetched)
        cache.hold(f"f{number}", 100, fetch).close()
        assert (len(fetched) > before) == (number not in recent)
        recent = [*(n for n in recent if n != number), number][-num_files:]
        time.sleep(0.001)  # so that times of use differ
        assert used(folder) <= num_files * 100
    assert sorted(p.name for p in folder.glob("f*")) == sorted(f"f{n}" for n in recent)


def test_a_held_file_is_never_removed(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 200)
    first = cache.hold("a", 100, filler)
    for name in "bcd":
        cache.hold(name, 100, filler).close()
    assert first.path.exists()
    second = cache.hold("d", 100, filler)
    with pytest.raises(
        StoreError, match="200 bytes are in use and 100 more do not fit max_bytes=200"
    ):
        cache.hold("e", 100, filler)
    second.close()
    cache.hold("e", 100, filler).close()
    assert sorted(p.name for p in tmp_path.glob("[a-z]")) == ["a", "e"]


def test_a_file_larger_than_the_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="allow more"):
        FileCache(tmp_path, 99).hold("a", 100, filler)
    assert used(tmp_path) == 0


def together(count: int, action: Callable[[], Any]) -> list[Any]:
    """What `action` returns in `count` threads that begin at the same moment."""
    found: list[Any] = []
    start = threading.Barrier(count)

    def run() -> None:
        start.wait(600)
        try:
            found.append(action())
        except StoreError as error:
            found.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return found


def test_a_file_wanted_by_two_threads_is_fetched_once(tmp_path: Path) -> None:
    cache, fetched = FileCache(tmp_path, 100), []

    def slow(part: Path) -> None:
        fetched.append(part)
        time.sleep(0.2)
        filler(part)

    leases = together(4, lambda: cache.hold("a", 100, slow))
    assert [lease.path for lease in leases] == [tmp_path / "a"] * 4
    assert len(fetched) == 1


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [100, 200])
def test_threads_that_arrive_while_a_file_is_renamed_get_it(tmp_path, max_bytes: int) -> None:
    for number in range(150):
        cache = FileCache(tmp_path / str(number), max_bytes)
        leases = together(6, lambda cache=cache: cache.hold("a", 100, filler))
        assert [lease.path for lease in leases] == [tmp_path / f"{number}/a"] * 6
        for lease in leases:
            lease.close()
        cache.hold("b", max_bytes, filler).close()  # needs all of it: nothing is held
        assert used(tmp_path / str(number)) == max_bytes


def test_after_a_failed_fetch_each_waiting_thread_tries_and_raises(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 100)
    tried: list[Path] = []

    def fail(part: Path) -> None:
        tried.append(part)
        time.sleep(0.005)
        raise StoreError("the line is dead")

    found = together(30, lambda: cache.hold("a", 100, fail))
    assert [str(error) for error in found] == ["the line is dead"] * 30
    assert len(tried) == 30
    cache.hold("a", 100, filler).close()


def test_a_file_of_the_wrong_size_is_not_kept(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 100)
    with pytest.raises(DamagedStoreError, match="3 bytes were fetched, wanted 100"):
        cache.hold("a", 100, lambda part: part.write_bytes(b"abc") and None)
    assert used(tmp_path) == 0
    cache.hold("a", 100, filler).close()
    os.truncate(tmp_path / "a", 50)  # the disk lost half of it
    cache.hold("a", 100, filler).close()
    assert (tmp_path / "a").read_bytes() == b"x" * 100


def test_a_removed_part_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"a\.100\.part: was removed or replaced"):
        FileCache(tmp_path, 100).hold("a", 100, lambda part: filler(part) or part.unlink())


def test_a_read_only_folder_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="the cache cannot be used: "):
        FileCache(tmp_path / "file" / "cache", 100)
    cache = FileCache(tmp_path / "cache", 100)
    (tmp_path / "cache" / "a").symlink_to(tmp_path / "file")
    with pytest.raises(StoreError, match="the cache cannot be used: "):
        cache.hold("a", 100, filler)


def die_while_fetching(folder: str) -> None:
    def fetch(part: Path) -> None:
        part.write_bytes(b"x" * 50)
        os.kill(os.getpid(), signal.SIGKILL)

    FileCache(folder, 100).hold("a", 100, fetch)


def die_while_holding(folder: str) -> None:
    lease = FileCache(folder, 100).hold("a", 100, filler)
    assert lease.path.exists()
    os.kill(os.getpid(), signal.SIGKILL)


def die_and_leave_a_child(folder: str) -> None:
    """Killed in a fetch, while a process forked from here lives on."""

    def fetch(part: Path) -> None:
        part.write_bytes(b"x" * 50)
        begun.set()
        time.sleep(600)

    begun = threading.Event()
    cache = FileCache(folder, 100)
    threading.Thread(target=cache.hold, args=("a", 100, fetch), daemon=True).start()
    begun.wait(600)
    with forked_process() as child:
        Path(folder).with_name("child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "death",
    [die_while_fetching, die_while_holding, die_and_leave_a_child],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_dead_process_holds_nothing(tmp_path: Path, death, name: str) -> None:
    folder = tmp_path / "cache"
    process = multiprocessing.get_context("spawn").Process(target=death, args=(str(folder),))
    process.start()
    while process.exitcode is None:  # join would wait for its child too
        time.sleep(0.01)
    assert process.exitcode == -signal.SIGKILL
    try:
        found = together(8, lambda: FileCache(folder, 100).hold(name, 100, filler))  # all of it
        assert [lease.path for lease in found] == [folder / name] * 8
    finally:
        if (tmp_path / "child").exists():
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert used(folder) == 100


def fetch_until_killed(folder: str, begun: Any, death: Any) -> None:
    def fetch(part: Path) -> None:
        part.write_bytes(b"x" * 50)
        begun.set()
        death.wait(600)
        os.kill(os.getpid(), signal.SIGKILL)

    FileCache(folder, 100).hold("a", 100, fetch)


@pytest.mark.slow
def test_after_a_fetcher_dies_one_waiting_process_continues_its_part(tmp_path):
    context = multiprocessing.get_context("spawn")
    begun, death = context.Event(), context.Event()
    process = context.Process(target=fetch_until_killed, args=(str(tmp_path), begun, death))
    process.start()
    assert begun.wait(600)
    beginnings: list[int] = []

    def fetch(part: Path) -> None:
        beginnings.append(part.stat().st_size)
        filler(part)

    killer = threading.Timer(0.3, death.set)
    killer.start()
    found = together(24, lambda: FileCache(tmp_path, 100).hold("a", 100, fetch))
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    assert [lease.path for lease in found] == [tmp_path / "a"] * 24
    assert beginnings == [50]


def test_a_process_forked_during_a_fetch_does_not_hold_its_lock(tmp_path: Path) -> None:
    cache, begun, resume = FileCache(tmp_path, 100), threading.Event(), threading.Event()

    def fetch(part: Path) -> None:
        begun.set()
        resume.wait(600)
        filler(part)

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(cache.hold("a", 100, fetch)))
    thread.start()
    assert begun.wait(600)
    with forked_process():
        resume.set()
        thread.join(600)
        together(3, lambda: cache.hold("a", 100, filler).close())
        found[0].close()
        cache.hold("b", 100, filler).close()  # needs all of it


def test_a_forked_process_holds_the_files_its_parent_held(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 100)
    lease = cache.hold("a", 100, filler)
    with forked_process():
        lease.close()
        with pytest.raises(StoreError, match="100 bytes are in use"):
            cache.hold("b", 100, filler)
        assert (tmp_path / "a").exists()
    cache.hold("b", 100, filler).close()


def read_many(
    url: str, options: dict, cache: str, seed: int, wanted: list[bytes], out: Any
) -> None:
    rng = np.random.default_rng(seed)
    with open_remote(url, cache=cache, max_bytes=4000, storage_options=options) as store:
        for shard in rng.integers(0, 10, 40):
            lease = store.lease(f"train/shard_{shard:05}.bin")
            assert lease.path.read_bytes() == wanted[shard]
            lease.close()
            time.sleep(float(rng.random()) / 500)
    out.put(seed)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.slow)])
def test_processes_share_a_cache_and_read_the_right_bytes(
    make_store, tmp_path, where, request
) -> None:
    spot = Spot(f"file://{tmp_path}/elsewhere", {})
    if where == "s3":
        spot = request.getfixturevalue("s3_spot")
    store = make_store()
    push(store, spot.url, storage_options=spot.options)
    wanted = [data for name, data in files_of(store).items() if name.startswith("train/")]
    context, cache = multiprocessing.get_context("spawn"), tmp_path / "cache"
    out = context.Queue()
    arguments = [(spot.url, spot.options, str(cache), seed, wanted, out) for seed in range(3)]
    processes = [context.Process(target=read_many, args=given) for given in arguments]
    for process in processes:
        process.start()
    most = 0
    while any(process.is_alive() for process in processes):
        most = max(most, used(cache, "shard_*.bin"))
        time.sleep(0.01)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(out.get(timeout=600) for _ in processes) == [0, 1, 2]
    assert 0 < most <= 4000
    assert used(cache) <= 4000


def test_a_remote_store_gives_its_shards_and_indexes(make_store, spot: Spot, tmp_path) -> None:
    store = make_store()
    push(store, spot.url, storage_options=spot.options)
    wanted = np.concatenate(
        [np.fromfile(store / f"train/shard_0000{n}.bin", "<u2") for n in (3, 4)]
    )
    options = {"cache": tmp_path / "cache", "max_bytes": 10_000, "storage_options": spot.options}
    with open_remote(spot.url, **options) as remote:
        assert remote.splits == ("train", "val")
        assert remote.document_starts("train").tolist() == list(range(0, 5000, 500))
        with remote.open_tokens("train") as space:
            assert space.gather(np.array([1500]), 1000).tolist() == [wanted.tolist()]
        with pytest.raises(OptionError, match="no split 'test'"):
            remote.open_tokens("test")
        copy = pickle.loads(pickle.dumps(remote))
        assert copy.fingerprint == remote.fingerprint
        copy.close()


def test_a_damaged_remote_shard_is_refused_and_not_kept(make_store, spot: Spot, tmp_path) -> None:
    push(make_store(), spot.url, storage_options=spot.options)
    options = {"cache": tmp_path / "cache", "max_bytes": 10_000, "storage_options": spot.options}
    with open_remote(spot.url, **options) as remote:
        place = spot.open()
        place.fs.pipe_file(place.path("train/shard_00001.bin"), bytes(1000))
        with pytest.raises(DamagedStoreError, match=r"shard_00001\.bin: its sha256"):
            remote.lease("train/shard_00001.bin")
        assert list((tmp_path / "cache").rglob("*shard_00001*")) == []
