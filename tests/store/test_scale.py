"""A terabyte in 20,000 shards: sparse files, so only the numbers are large."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from shardmill.records import TokenFile
from shardmill.store.readers import TokenSpace, Windows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, needs sparse files"),
]

NUM_SHARDS = 20_000
SHARD_TOKENS = 25 * 2**20  # 50 MiB: 1.05e12 bytes in all
EVERY = 100  # one shard in 100 has a mark; all other tokens are 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A marked shard holds its mark number + 1 as first, middle and last token."""
    folder = tmp_path_factory.mktemp("terabyte")
    for number in range(NUM_SHARDS):
        with (folder / f"{number}.bin").open("wb") as file:
            if number % EVERY == 0:
                mark = np.array([number // EVERY + 1], "<u2").tobytes()
                for token in (0, SHARD_TOKENS // 2, SHARD_TOKENS - 1):
                    file.seek(2 * token)
                    file.write(mark)
            file.truncate(2 * SHARD_TOKENS)
    yield folder
    shutil.rmtree(folder)


def files_in(folder: Path) -> list[TokenFile]:
    return [
        TokenFile(path=folder / f"{number}.bin", num_tokens=SHARD_TOKENS, dtype="uint16")
        for number in range(NUM_SHARDS)
    ]


def anonymous_mib() -> float:
    """Memory of this process that is not page cache."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return int(re.search(r"Anonymous: +(\d+) kB", rollup)[1]) / 1024


def num_maps() -> int:
    """Maps of this process that are a file of the store or only reserved."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("terabyte" in line or " ---p 00000000 00:00 0" in line for line in maps)


def test_a_terabyte_is_read_at_random_with_bounded_memory_and_maps(folder):
    memory, maps = anonymous_mib(), num_maps()
    space = TokenSpace(files_in(folder), max_maps=100)
    windows = Windows(space, seq_len=1024)
    assert space.num_tokens == 524_288_000_000
    rng = np.random.default_rng(0)
    out = np.zeros((8, 1025), np.int64)  # few: the kernel may read megabytes ahead for each
    most = 0
    for _ in range(30):
        windows.gather(rng.integers(0, len(windows), 8), out)
        most = max(most, num_maps() - maps)
    marked = np.arange(0, NUM_SHARDS, EVERY)[:, None] * SHARD_TOKENS
    marked = (marked + np.array([0, SHARD_TOKENS // 2, SHARD_TOKENS - 1])).ravel()
    found = space.gather(marked, 1)  # 200 shards in one call, at most 100 open
    assert found.ravel().tolist() == np.repeat(np.arange(1, 201), 3).tolist()
    across = space.gather(marked[3::3] - 2, 4)  # from the shard before into a marked one
    assert across.tolist() == [[0, 0, mark, 0] for mark in range(2, 201)]
    assert most <= 2 * 100 + 1  # a mapped shard, and what is reserved between two
    assert anonymous_mib() - memory < 10  # names and numbers of 20,000 shards
    space.close()
    assert num_maps() == maps
