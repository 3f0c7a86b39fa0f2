"""`write_memmap_to_cloud`: in place on a disk, pushed with the manifest last elsewhere."""

from __future__ import annotations

from pathlib import Path

import fsspec
import numpy as np
import pytest

from shardmill.errors import OptionError, StoreExistsError
from shardmill.interop.packed.memmap import MemmapShardWriter, open_memmap_shard
from shardmill.remote import pull, write_memmap_to_cloud
from tests.remote.conftest import Spot, remote_files


def write_two(writer: MemmapShardWriter) -> None:
    writer.write_bin(1, np.array([4, 5]), np.array([1, 0]), np.array([0]))
    writer.write_bin(0, np.array([1, 2, 3]), np.array([1, 1, 0]), np.array([0]))


def write_one(writer: MemmapShardWriter) -> None:
    writer.write_bin(1, np.array([4, 5]), np.array([1, 0]), np.array([0]))


def test_a_shard_written_anywhere_reads_the_same(spot: Spot, tmp_path: Path) -> None:
    place = spot.open()
    manifest = write_memmap_to_cloud(place.fs, spot.url, 2, 4, 2, write_two)
    assert (manifest["num_bins"], manifest["bins_written"]) == (2, 2)
    assert sorted(remote_files(spot)) == [
        *("input_ids.npy", "loss_mask.npy", "manifest.json"),
        *("packed_len.npy", "seq_offsets.npy", "seq_starts.npy"),
    ]
    pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    shard = open_memmap_shard(tmp_path / "copy")
    assert [shard.read_bin(n).input_ids.tolist() for n in range(2)] == [[1, 2, 3], [4, 5]]
    shard.close()


def test_a_writer_that_fails_leaves_nothing(spot: Spot) -> None:
    place = spot.open()
    with pytest.raises(OptionError, match="1 of 2 bins were not written"):
        write_memmap_to_cloud(place.fs, spot.url, 2, 4, 2, write_one)
    assert remote_files(spot) == {}


def test_a_finished_shard_is_not_overwritten(spot: Spot) -> None:
    place = spot.open()
    write_memmap_to_cloud(place.fs, spot.url, 2, 4, 2, write_two)
    before = remote_files(spot)
    with pytest.raises(StoreExistsError):
        write_memmap_to_cloud(place.fs, spot.url, 2, 4, 2, write_two)
    assert remote_files(spot) == before


def test_the_protocol_of_a_file_system_may_be_one_word_or_several(tmp_path: Path) -> None:
    class OneWord(fsspec.get_filesystem_class("file")):  # type: ignore[misc]
        protocol = "file"
        cachable = False

    write_memmap_to_cloud(OneWord(), str(tmp_path / "one"), 2, 4, 2, write_two)
    write_memmap_to_cloud(fsspec.filesystem("file"), str(tmp_path / "two"), 2, 4, 2, write_two)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]
