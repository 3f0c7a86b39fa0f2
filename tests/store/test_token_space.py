"""A space shows the concatenation of its files, whatever they are and however they are mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.records import TokenFile
from shardmill.store.readers import TokenSpace
from tests.helpers import wait_for
from tests.store.shards import (
    ShardShape,
    assert_gathers_exactly,
    assert_reads_exactly,
    read_shards,
    shard_shapes,
    write_shards,
)

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
READERS = ("mapped", "pread")
UINT16_PAGES = [ShardShape(2048, "uint16")] * 6  # one page each: no gap between them


def num_mapped(folder: Path) -> int:
    """How many files of a folder this process maps now."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len({line.split()[-1] for line in maps.splitlines() if str(folder) in line})


def mapped_names(folder: Path) -> list[str]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sorted(
        {Path(line.split()[-1]).name for line in maps.splitlines() if str(folder) in line}
    )


def draw_windows(data: st.DataObject, num_tokens: int) -> tuple[list[int], int]:
    length = data.draw(st.integers(1, max(1, min(num_tokens, 9000))))
    if num_tokens == 0:
        return [], length
    starts = data.draw(st.lists(st.integers(0, num_tokens - length), max_size=12))
    return starts, length


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@settings(deadline=None, max_examples=50)
@given(shapes=shard_shapes(), max_maps=st.integers(1, 9), data=st.data())
def test_gather_and_read_equal_slicing_the_concatenation(reader, shapes, max_maps, data):
    with tempfile.TemporaryDirectory() as name:
        files = write_shards(Path(name), shapes)
        tokens = read_shards(files)
        with TokenSpace(files, max_maps=max_maps, reader=reader) as space:
            filled = sum(shape.num_tokens > 0 for shape in shapes)
            assert space.reader == ("pread" if filled > max_maps else reader)
            for _ in range(3):
                starts, length = draw_windows(data, len(tokens))
                assert_gathers_exactly(space, tokens, starts, length)
            start = data.draw(st.integers(0, len(tokens)))
            stop = data.draw(st.integers(start, len(tokens)))
            assert_reads_exactly(space, tokens, start, stop)


@pytest.mark.slow
@on_linux
@settings(deadline=None, max_examples=25)
@given(max_maps=st.integers(1, 9), starts=st.lists(st.integers(0, 6 * 2048 - 700), max_size=20))
def test_never_more_shards_are_mapped_than_allowed(max_maps, starts):
    with tempfile.TemporaryDirectory() as name:
        files = write_shards(Path(name), UINT16_PAGES)
        tokens = read_shards(files)
        with TokenSpace(files, max_maps=max_maps, reader="mapped") as space:
            assert num_mapped(Path(name)) == 0
            for start in [*starts, 0, 6 * 2048 - 700]:
                assert_gathers_exactly(space, tokens, [start, 5], 700)
                assert num_mapped(Path(name)) <= max_maps
        assert num_mapped(Path(name)) == 0


@on_linux
def test_a_shard_is_mapped_when_it_is_first_read(tmp_path):
    space = TokenSpace(write_shards(tmp_path, UINT16_PAGES), reader="mapped")
    for shard in (0, 3, 0):
        space.read(shard * 2048, shard * 2048 + 10)
    assert mapped_names(tmp_path) == ["shard_00000.bin", "shard_00003.bin"]


@pytest.mark.parametrize("reader", READERS)
def test_a_window_may_lie_across_shards_and_gaps(tmp_path, reader):
    files = []
    for number, ids in enumerate([[1, 2, 3], [], [70_000, 4_294_967_295], [65_535]]):
        path = tmp_path / f"{number}.bin"
        np.array(ids, "<u4").tofile(path)
        files.append(TokenFile(path=path, num_tokens=len(ids), dtype="uint32"))
    space = TokenSpace(files, reader=reader)
    assert space.num_tokens == 6
    assert space.dtype == np.uint32
    assert space.gather([2, 0, 1], 4).tolist() == [
        [3, 70_000, 4_294_967_295, 65_535],
        [1, 2, 3, 70_000],
        [2, 3, 70_000, 4_294_967_295],
    ]
    assert space.read(0, 6).tolist() == [1, 2, 3, 70_000, 4_294_967_295, 65_535]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32", "int64", "uint64", ">i8"])
def test_every_integer_dtype_that_is_wide_enough_gets_the_same_ids(tmp_path, reader, dtype):
    files = write_shards(tmp_path, UINT16_PAGES)
    tokens = read_shards(files)
    assert tokens.max() > 32_767  # so that a signed 16-bit step on the way would be seen
    out = np.zeros((2, 3000), dtype)
    TokenSpace(files, reader=reader).gather([0, 9000], 3000, out=out)
    np.testing.assert_array_equal(out, [tokens[:3000], tokens[9000:12_000]])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("length", [1, 4095, 4096, 8191, 8192, 200_000])
def test_short_rows_in_blocks_and_long_rows_one_by_one_agree_with_slicing(tmp_path, reader, length):
    files = write_shards(tmp_path, [ShardShape(131_072, "uint16")] * 2)
    tokens = read_shards(files)
    starts = np.random.default_rng(length).integers(
        0, len(tokens) - length, 300 if length < 9000 else 3
    )
    assert_gathers_exactly(TokenSpace(files, reader=reader), tokens, starts.tolist(), length)


@pytest.mark.parametrize("reader", READERS)
def test_prefetch_changes_nothing_that_is_read(tmp_path, reader):
    shapes = [ShardShape(5000, "uint16"), ShardShape(3000, "uint16"), ShardShape(1, "uint16")]
    files = write_shards(tmp_path, shapes)
    tokens = read_shards(files)
    space = TokenSpace(files, reader=reader)
    space.prefetch([0, 4990, 7000], 1001)
    space.prefetch([], 10)
    assert_gathers_exactly(space, tokens, [0, 4990, 7000], 1001)


@on_linux
@pytest.mark.parametrize("reader", READERS)
def test_prefetch_brings_the_pages_of_its_windows_into_memory(tmp_path, reader):
    """The kernel is asked with mincore, after the pages were dropped."""
    files = write_shards(tmp_path, [ShardShape(2**21, "uint16")] * 2)
    for file in files:
        with file.path.open("rb") as raw:
            os.fdatasync(raw.fileno())
            os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def resident() -> set[int]:
        """Pages of the second shard that are in memory."""
        with file.path.open("rb") as raw:
            held = mmap.mmap(raw.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        array = np.frombuffer(held, np.uint8)
        pages = (ctypes.c_ubyte * (len(array) // mmap.PAGESIZE))()
        libc = ctypes.CDLL(None)
        address = ctypes.c_void_p(array.ctypes.data)
        assert libc.mincore(address, ctypes.c_size_t(len(array)), pages) == 0
        return {number for number, page in enumerate(pages) if page & 1}

    if resident():
        pytest.skip("this file system keeps the pages")
    space = TokenSpace(files, reader=reader)
    wanted = 2**21 + 1_000_000  # in the second shard, from its byte 2,000,000 on
    space.prefetch([wanted], 1025)
    first, last = 2_000_000 // mmap.PAGESIZE, 2_002_049 // mmap.PAGESIZE
    wait_for(lambda: {first, last} <= resident())
