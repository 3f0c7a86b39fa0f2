"""Packed shards written to a file system: in place on a disk, elsewhere sent when complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest

from shardmill.compat.nemotron import (
    process_chat_sft_pack_from_spool_core,
    write_memmap_to_cloud,
)
from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreExistsError
from shardmill.formats.packed import PackedOptions, open_packed, pack_from_spool
from shardmill.formats.packed.memmap import MemmapShardWriter, open_memmap_shard
from shardmill.remote import pull
from tests.formats.packed import plain, write_spool
from tests.helpers import folder_digest
from tests.remote.conftest import Spot, remote_files

FIVE = [
    ([1, 2, 3], [0, 1, 1]),
    ([4, 5], [0, 1]),
    ([], []),
    ([6], [1]),
    ([7, 8, 9, 10], [0, 0, 1, 0]),
]
ENDINGS = {"memmap_v1": "", "legacy_npy_pickle": ".npy", "parquet": ".parquet"}


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


def pack(spot: Spot | None, tmp_path: Path, storage: str, **options: Any) -> dict[str, Any]:
    spool = tmp_path / "spool"
    if not spool.exists():
        write_spool(spool, FIVE)
    given = {"shard_id": "shard_000000", "pack_size": 6, "packer": "best-fit"}
    return process_chat_sft_pack_from_spool_core(
        **{
            "spool_dir": str(spool),
            **({"output_dir": spot.url, "output_fs": spot.open().fs} if spot else {}),
            "packed_storage": storage,
            **given,
            **options,
        }
    )


@pytest.mark.parametrize("storage", ENDINGS)
def test_packing_to_any_file_system_gives_the_bytes_of_packing_to_a_disk(
    spot: Spot, tmp_path: Path, storage: str
) -> None:
    receipt = pack(spot, tmp_path, storage)
    local = pack_from_spool(
        *(tmp_path / "spool", tmp_path / "local"),
        shard_id="shard_000000",
        pack_size=6,
        options=PackedOptions(packed_storage=storage),
    )
    assert receipt["output_path"].endswith(f"/shard_000000{ENDINGS[storage]}")
    other = {"output_path", "long"}
    for name in receipt.keys() - other:
        assert receipt[name] == local[name], name
    assert receipt["long"] == "truncate"
    copy = tmp_path / "copy"
    for name, data in remote_files(spot).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(data)
    if storage != "parquet":
        assert folder_digest(copy) == folder_digest(tmp_path / "local")
    shards = [
        open_packed(top / f"shard_000000{ENDINGS[storage]}") for top in (copy, tmp_path / "local")
    ]
    assert len(shards[0]) == len(shards[1]) == receipt["num_bins"]
    for number in range(len(shards[0])):
        assert plain(shards[0].read_bin(number)) == plain(shards[1].read_bin(number))
    json.dumps(receipt)


@pytest.mark.parametrize("storage", ENDINGS)
def test_a_packed_shard_there_is_not_replaced(spot: Spot, tmp_path: Path, storage: str) -> None:
    pack(spot, tmp_path, storage)
    before = remote_files(spot)
    with pytest.raises(StoreExistsError):
        pack(spot, tmp_path, storage, pack_size=7)
    assert remote_files(spot) == before


@pytest.mark.parametrize("storage", ENDINGS)
def test_a_failed_pack_leaves_nothing(spot: Spot, tmp_path: Path, storage: str) -> None:
    write_spool(tmp_path / "spool", [([70_000], [1]), ([1], [1])])

    def half(lengths: Any, pack_size: int) -> list[list[int]]:
        return [[0]]

    with pytest.raises(OptionError, match="item 1 is in 0 bins"):
        pack(spot, tmp_path, storage, packer=half)
    assert remote_files(spot) == {}


@pytest.mark.parametrize("storage", ["legacy_npy_pickle", "parquet"])
def test_a_file_that_arrives_changed_is_an_error(tmp_path: Path, storage: str) -> None:
    class Changing(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        protocol = "changing"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        cachable = False

        def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
            data = bytearray(Path(lpath).read_bytes())
            data[-1] ^= 1
            self.pipe_file(rpath, bytes(data))

    fs = Changing()
    with pytest.raises(DamagedStoreError, match="what arrived is not what was sent"):
        pack(None, tmp_path, storage, output_fs=fs, output_dir="/place/x")
    assert fs.find("/") == []


def test_the_file_of_a_legacy_shard_is_sent_after_its_record(tmp_path: Path) -> None:
    """Who waits for the `.npy` finds both."""
    sent: list[str] = []

    class Noting(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        protocol = "noting"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        cachable = False

        def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
            sent.append(rpath.rpartition("/")[2])
            super().put_file(lpath, rpath, **options)

    pack(None, tmp_path, "legacy_npy_pickle", output_fs=Noting(), output_dir="/place/y")
    assert sent == ["shard_000000.npy.json", "shard_000000.npy"]


@pytest.mark.parametrize(
    ("protocol", "folder"),
    [
        *(("file", "s3://bucket/x"), ("memory", "s3://bucket/x"), ("file", "memory://x")),
        *(("memory", "file:///x"), ("file", "s3://KEY:SECRET@bucket/x"), ("file", "hf://a/b")),
    ],
)
def test_the_address_of_another_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    fs = fsspec.filesystem(protocol)
    before = fs.find("/") if protocol == "memory" else []
    for write in (
        lambda: pack(None, tmp_path, "memmap_v1", output_fs=fs, output_dir=folder),
        lambda: write_memmap_to_cloud(fs, folder, 2, 4, 2, write_two),
    ):
        with pytest.raises(OptionError, match=rf"a URL \({folder.partition(':')[0]}://") as caught:
            write()
        assert "SECRET" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["spool"]
    if protocol == "memory":
        assert fs.find("/") == before


def test_a_local_folder_may_be_a_path_or_a_file_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fs = fsspec.filesystem("file")
    for number, (given, wanted) in enumerate(
        [
            ("out", "out"),
            ("out/", "out"),
            (f"file://{tmp_path}/f", f"{tmp_path}/f"),
            ("~/h", f"{tmp_path}/home/h"),
        ]
    ):
        options = {"output_fs": fs, "output_dir": given, "shard_id": f"s{number}"}
        receipt = pack(None, tmp_path, "memmap_v1", **options)
        assert receipt["output_path"] == f"{wanted}/s{number}"
        assert len(open_packed(receipt["output_path"])) == receipt["num_bins"]


def test_a_read_only_file_system_is_a_store_error(tmp_path: Path) -> None:
    class Refusing(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        protocol = "refusing"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        cachable = False

        def put_file(self, *args: Any, **options: Any) -> None:
            raise PermissionError(13, "Permission denied")

    for storage in ENDINGS:
        with pytest.raises(StoreError, match=r"(?i)permission|denied|may not"):
            pack(None, tmp_path, storage, output_fs=Refusing(), output_dir="/p/z")
