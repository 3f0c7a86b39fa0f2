"""A file that is not what it was is refused by name, before a page of it is read."""

from __future__ import annotations

import os

import psutil
import pytest

from shardmill.errors import DamagedStoreError
from shardmill.store.readers import TokenSpace
from tests.store.shards import ShardShape, read_shards, write_shards

READERS = ("mapped", "pread")
SHAPES = [ShardShape(4096, "uint16")] * 3


@pytest.fixture(params=READERS)
def reader(request):
    return request.param


@pytest.mark.parametrize(("size", "found"), [(8190, "8,190"), (8194, "8,194"), (0, "0")])
def test_a_file_of_another_size_is_refused_at_opening(tmp_path, reader, size, found):
    files = write_shards(tmp_path, SHAPES)
    os.truncate(files[1].path, size)
    with pytest.raises(DamagedStoreError, match=f"shard_00001.bin: found {found} bytes") as error:
        TokenSpace(files, reader=reader)
    assert "wanted 8,192 (4,096 tokens of 2 bytes)" in str(error.value)


def test_a_missing_file_is_refused_at_opening(tmp_path, reader):
    files = write_shards(tmp_path, SHAPES)
    files[2].path.unlink()
    with pytest.raises(DamagedStoreError, match=r"shard_00002.bin is missing.*8,192 bytes"):
        TokenSpace(files, reader=reader)


def test_a_file_cut_after_opening_is_an_error_and_no_bus_error(tmp_path, reader):
    files = write_shards(tmp_path, SHAPES)
    tokens = read_shards(files)
    space = TokenSpace(files, reader=reader)
    os.truncate(files[1].path, 100)
    for _ in range(2):
        with pytest.raises(DamagedStoreError, match=r"shard_00001.bin: found 100 bytes"):
            space.gather([0, 4000], 200)
    assert space.read(0, 4096).tolist() == tokens[:4096].tolist()  # the other shards still serve


def test_a_file_removed_after_opening_is_an_error(tmp_path, reader):
    files = write_shards(tmp_path, SHAPES)
    space = TokenSpace(files, reader=reader)
    files[0].path.unlink()
    with pytest.raises(DamagedStoreError, match=r"shard_00000.bin is missing"):
        space.read(0, 1)


def test_shards_of_a_rebuilt_store_are_never_mixed_with_the_old_ones(tmp_path, reader):
    """Same names, same sizes, other tokens: what a reader that maps lazily could fall for."""
    files = write_shards(tmp_path, SHAPES)
    space = TokenSpace(files, reader=reader)
    space.read(0, 4096)
    before = files[1].path.stat()
    write_shards(tmp_path, SHAPES, seed=1)
    os.utime(files[1].path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(DamagedStoreError, match=r"shard_00001.bin was written to after"):
        space.read(4096, 8192)


def test_a_shard_that_was_closed_is_checked_again(tmp_path, reader):
    files = write_shards(tmp_path, SHAPES)
    space = TokenSpace(files, max_maps=1, reader=reader)
    space.read(0, 10)
    space.read(5000, 5010)
    os.truncate(files[0].path, 10)
    with pytest.raises(DamagedStoreError, match=r"shard_00000.bin: found 10 bytes"):
        space.read(0, 10)


def test_a_refused_shard_leaves_no_open_file(tmp_path, reader):
    files = write_shards(tmp_path, SHAPES)
    space = TokenSpace(files, reader=reader)
    os.truncate(files[1].path, 100)
    with pytest.raises(DamagedStoreError):
        space.read(4096, 4097)
    assert not [file for file in psutil.Process().open_files() if str(tmp_path) in file.path]
