"""Threads, forked and spawned processes, and systems without an address range."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import DamagedStoreError
from shardmill.store.readers import TokenSpace, Windows, mapped
from tests.store.shards import ShardShape, read_shards, slice_windows, write_shards

READERS = ("mapped", "pread")
UNEVEN = [
    ShardShape(4096, "uint16"),
    ShardShape(2048, "uint16"),
    ShardShape(777, "uint16"),
    ShardShape(2048, "uint16"),
    ShardShape(3001, "uint16"),
]


def hammer(space: TokenSpace, tokens: np.ndarray, seed: int, rounds: int) -> int:
    """Gather random windows; the number of batches that were right."""
    rng = np.random.default_rng(seed)
    right = 0
    for _ in range(rounds):
        length = int(rng.integers(1, 3000))
        starts = rng.integers(0, len(tokens) - length + 1, 8)
        found = space.gather(starts, length, np.empty((8, length), np.int64))
        right += np.array_equal(found, slice_windows(tokens, starts.tolist(), length))
    return right


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("max_maps", [1, 2, 99])
def test_threads_share_a_space_and_each_gets_its_own_windows(tmp_path, reader, max_maps):
    files = write_shards(tmp_path, UNEVEN)
    tokens = read_shards(files)
    space = TokenSpace(files, max_maps=max_maps, reader=reader)
    with ThreadPoolExecutor(8) as pool:
        right = list(pool.map(lambda seed: hammer(space, tokens, seed, 40), range(8)))
    assert right == [40] * 8


@pytest.mark.parametrize("reader", READERS)
def test_closing_under_a_running_gather_lets_it_end_well(tmp_path, reader):
    files = write_shards(tmp_path, [ShardShape(2**20, "uint16")] * 4)
    tokens = read_shards(files)
    for seed in range(8):
        space = TokenSpace(files, reader=reader)
        starts = np.random.default_rng(seed).integers(0, len(tokens) - 1000, 3000)
        out = np.zeros((3000, 1000), np.int64)
        space.gather(starts[:1], 1)
        thread = threading.Thread(target=space.gather, args=(starts, 1000, out))
        thread.start()
        while not out[0].any():  # the copy has begun
            pass
        space.close()
        thread.join()
        assert np.array_equal(out, slice_windows(tokens, starts.tolist(), 1000))


@pytest.mark.parametrize("reader", READERS)
def test_a_space_pickles_by_path_and_never_by_value(tmp_path, reader):
    files = write_shards(tmp_path, [ShardShape(2**20, "uint16")] * 2)
    windows = Windows(TokenSpace(files, max_maps=3, reader=reader), seq_len=10)
    expected = windows.gather([0, 100_000]).tolist()
    data = pickle.dumps(windows)
    assert len(data) < 2000
    again = pickle.loads(data)
    assert repr(again) == repr(windows)
    assert again.gather([0, 100_000]).tolist() == expected


def test_a_pickled_space_refuses_a_file_that_was_cut_meanwhile(tmp_path):
    files = write_shards(tmp_path, UNEVEN)
    data = pickle.dumps(TokenSpace(files))
    os.truncate(files[3].path, 8)
    with pytest.raises(DamagedStoreError, match=r"shard_00003.bin: found 8 bytes"):
        pickle.loads(data)


def test_relative_paths_are_found_from_another_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = write_shards(tmp_path, [ShardShape(5, "uint16")])
    relative = [
        type(files[0])(path=files[0].path.relative_to(tmp_path), num_tokens=5, dtype="uint16")
    ]
    data = pickle.dumps(TokenSpace(relative))
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert pickle.loads(data).read(0, 5).tolist() == read_shards(files).tolist()


def send_hammer(space: TokenSpace, tokens: np.ndarray, seed: int, connection) -> None:
    connection.send(hammer(space, tokens, seed, 50))


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_read_the_same_tokens(tmp_path, reader, method):
    files = write_shards(tmp_path, UNEVEN)
    tokens = read_shards(files)
    space = TokenSpace(files, reader=reader)
    assert hammer(space, tokens, 99, 20) == 20  # in use before the workers start
    context = multiprocessing.get_context(method)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    workers = [
        context.Process(target=send_hammer, args=(space, tokens, seed, sender))
        for seed, (_, sender) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    assert hammer(space, tokens, 98, 50) == 50
    assert [receiver.poll(60) and receiver.recv() for receiver, _ in pipes] == [50, 50]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_another_threads_gather_does_not_hang(tmp_path, reader):
    files = write_shards(tmp_path, UNEVEN)
    tokens = read_shards(files)
    space = TokenSpace(files, reader=reader)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            hammer(space, tokens, 1, 1)

    thread = threading.Thread(target=work)
    thread.start()
    context = multiprocessing.get_context("fork")
    try:
        for seed in range(5):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=send_hammer, args=(space, tokens, seed, sender))
            child.start()
            answer = receiver.recv() if receiver.poll(20) else "the child hangs"
            child.kill()
            child.join()
            assert answer == 50
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit of addresses")
def test_without_addresses_to_reserve_it_reads_with_pread_and_says_so(tmp_path):
    """A process that may use 3 GiB of addresses opens 8 GiB of sparse shards."""
    script = f"""
import logging, resource, sys
from pathlib import Path
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from shardmill.store.readers import TokenSpace
from shardmill.records import TokenFile
files = []
for number in range(64):
    path = Path({str(tmp_path)!r}) / f"{{number}}.bin"
    with path.open("wb") as file:
        file.write(bytes([number, 0, number, 1]))
        file.truncate(2**27)
    files.append(TokenFile(path=path, num_tokens=2**26, dtype="uint16"))
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
space = TokenSpace(files)
print(space.gather([0, 5 * 2**26, 63 * 2**26], 2).tolist())
print(space.read(9 * 2**26 - 1, 9 * 2**26 + 1).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "TokenSpace(4,294,967,296 uint16 tokens in 64 shards, mapped): no address range "
        "([Errno 12] Cannot allocate memory); reading with pread",
        "[[0, 256], [5, 261], [63, 319]]",
        "[0, 9]",
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="uses up the maps of a process")
def test_when_the_kernel_gives_no_more_maps_the_error_says_what_to_do(tmp_path):
    """Every other page of a large map is protected: each is a map of its own to the kernel."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    if limit > 300_000:
        pytest.skip(f"this kernel allows {limit:,} maps")
    files = write_shards(tmp_path, [ShardShape(2048, "uint16")] * 9)
    script = f"""
import ctypes, mmap, pickle, sys
import numpy as np
from shardmill.errors import StoreError
space = pickle.loads({pickle.dumps(TokenSpace(files))!r})
space.read(0, 1)
pages = mmap.mmap(-1, {limit} * mmap.PAGESIZE)
address = np.frombuffer(pages, np.uint8).ctypes.data
mprotect = ctypes.CDLL(None).mprotect
mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
for page in range(0, {limit}, 2):
    if mprotect(address + page * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ):
        break
try:
    for shard in (8, 6, 4, 2):
        space.read(shard * 2048, shard * 2048 + 1)
except StoreError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert "the kernel refused another map; this space holds " in done.stdout
    assert "lower max_maps" in done.stdout


def test_elsewhere_pread_is_taken_without_a_word(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mapped, "SUPPORTED", False)
    files = write_shards(tmp_path, UNEVEN)
    tokens = read_shards(files)
    with caplog.at_level(logging.DEBUG):
        space = TokenSpace(files)
        assert hammer(space, tokens, 0, 20) == 20
    assert caplog.text == ""
    assert space.reader == "pread"
