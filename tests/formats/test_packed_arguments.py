"""What a caller may pass to writers and readers of packed shards: sense, or one of our errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardmill.errors import BuildError, DamagedStoreError, OptionError, ShardmillError, StoreError
from shardmill.formats.convert import convert
from shardmill.formats.packed import (
    ChatStoreSpool,
    LegacyPickleWriter,
    MemmapShardWriter,
    PackedOptions,
    ParquetShardWriter,
    SequenceSpoolReader,
    SequenceSpoolWriter,
    convert_legacy_to_memmap,
    iter_legacy_bins,
    open_memmap_shard,
    open_packed,
    pack_from_spool,
    verify_memmap_shard,
)
from shardmill.formats.packed import formats as convert_module
from shardmill.formats.packed.spool import plan_blocks
from shardmill.packing import best_fit_decreasing
from tests.formats.packed import write_spool

BIN = ([1, 2, 3], [1, 0, 0], [0, 2])
WRITERS = {
    "memmap": lambda path: MemmapShardWriter(path, 1, 8, 4),
    "parquet": lambda path: ParquetShardWriter(f"{path}.parquet", 8),
    "legacy": lambda path: LegacyPickleWriter(f"{path}.npy", pack_size=8),
}
STORAGES = {"memmap": "memmap_v1", "parquet": "parquet", "legacy": "legacy_npy_pickle"}
ENDINGS = {"memmap": "", "parquet": ".parquet", "legacy": ".npy"}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (([[1], [2, 3]], [1, 0, 0], [0]), "input_ids is no array"),
        (([1, 2, 3], [[1], [0, 0]], [0]), "loss_mask is no array"),
        (([1, 2, 3], [1, 0, 0], [[0], [1, 2]]), "seq_start_id is no array"),
        ((np.ma.array([1, 2], mask=[0, 1]), [1, 0], [0]), "input_ids is a numpy masked array"),
        (([1, 2], np.ma.array([1, 1], mask=[0, 1]), [0]), "loss_mask is a numpy masked array"),
        (([1, 2], [1, 0], np.ma.array([0])), "seq_start_id is a numpy masked array"),
        (([1.0, 2.0], [1, 0], [0]), "ids are float64, wanted ints"),
        ((["a", "b"], [1, 0], [0]), "wanted ints"),
    ],
)
def test_every_writer_refuses_what_is_not_a_bin(tmp_path: Path, kind, parts, words) -> None:
    with WRITERS[kind](tmp_path / "a") as writer:
        with pytest.raises(OptionError, match=words):
            writer.write_bin(0, *parts)
        writer.write_bin(0, *BIN)
        writer.finalize()
    shard = open_packed(tmp_path / f"a{ENDINGS[kind]}")
    assert shard.read_bin(0).input_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "loop/a"])
def test_an_impossible_path_is_one_of_our_errors(tmp_path: Path, kind, name) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OptionError, match="no path to write to"):
        WRITERS[kind](tmp_path / name)
    with pytest.raises(OptionError, match="no path to write to"):
        SequenceSpoolWriter(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize("dtype", ["foo", "i4,", object(), (1, 2, 3), "M8[xx]", "i4,i4"])
def test_an_invalid_dtype_is_refused(tmp_path: Path, dtype) -> None:
    with pytest.raises(OptionError, match="wanted uint16, int32, uint32 or int64"):
        MemmapShardWriter(tmp_path / "a", 1, 4, 1, dtype)
    with pytest.raises(OptionError, match="wanted uint16, int32, uint32 or int64"):
        SequenceSpoolWriter(tmp_path / "a", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_bins", [2**40, 2**62, 2**80])
def test_what_the_disk_cannot_hold_is_refused_before_anything_is_written(tmp_path, num_bins):
    with pytest.raises(BuildError, match=r"take [0-9,]+ bytes there, but [0-9,]+ are free"):
        MemmapShardWriter(tmp_path / "new" / "a", num_bins, 4096, 4)
    with pytest.raises(BuildError, match="are free"):
        MemmapShardWriter(tmp_path / "a", 1000, 2**32 - 1, 4, np.int64)
    assert list(tmp_path.iterdir()) == []


def test_the_masks_of_masked_arrays_are_not_lost_in_a_spool(tmp_path: Path) -> None:
    with SequenceSpoolWriter(tmp_path / "a") as spool:
        for ids, mask in (
            (np.ma.array([1, 2], mask=[0, 1]), [1, 1]),
            ([1, 2], np.ma.array([1, 1], mask=[0, 1])),
            ([[1], [2, 3]], [1, 1]),
        ):
            with pytest.raises(OptionError, match=r"masked array|no array"):
                spool.append(ids, mask)
        spool.append([5], [1])
    assert SequenceSpoolReader(tmp_path / "a").manifest.num_tokens == 1


@pytest.mark.parametrize("kind", STORAGES)
def test_memory_depends_on_the_tokens_not_on_the_pack_size(tmp_path: Path, kind) -> None:
    sequences = [([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1])]
    spool = write_spool(tmp_path / "spool", sequences)
    size = 2**32 - 1 if kind != "memmap" else 2**24  # as large a row as any disk holds
    options = PackedOptions(packed_storage=STORAGES[kind])
    pack_from_spool(spool, tmp_path, shard_id="a", pack_size=size, options=options)
    shard = open_packed(tmp_path / f"a{ENDINGS[kind]}")
    assert shard.pack_size == size
    assert shard.read_bin(0).input_ids.tolist() == [1, 2, 3, 4, 5]
    assert shard.read_bin(0).loss_mask.tolist() == [1, 1, 0, 1, 0]
    for huge in (2**32, 2**62):
        with pytest.raises(OptionError, match="wanted at most 4,294,967,295"):
            pack_from_spool(spool, tmp_path, shard_id="b", pack_size=huge, options=options)


def test_blocks_of_a_huge_pack_size_are_as_wide_as_the_fullest_row(tmp_path: Path) -> None:
    reader = SequenceSpoolReader(write_spool(tmp_path / "spool", [([1, 2, 3], [0, 1, 1])] * 2))
    for size, width in ((2**32 - 1, 6), (2**20, 2**20), (4, 4)):
        plan = best_fit_decreasing(reader.lengths(), size)
        blocks = list(plan_blocks(reader, plan, np.int32, "label"))
        assert [block.input_ids.shape[1] for block in blocks] == [width]


def foreign(path: Path, length: int = 3) -> Path:
    """Parquet of another program, which does not state its pack size."""
    columns = {"input_ids": [[7] * length], "loss_mask": [[1] * length], "seq_start_id": [[0]]}
    pq.write_table(pa.table(columns), path)
    return path


def test_the_caller_can_give_the_pack_size_of_foreign_parquet(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a.parquet")
    with pytest.raises(OptionError, match="does not say its pack size: pass pack_size, or"):
        open_packed(path)
    shard = open_packed(path, pack_size=8)
    assert (shard.pack_size, shard.read_bin(0).input_ids.tolist()) == (8, [7, 7, 7])
    with pytest.raises(OptionError, match="wanted at most"):
        open_packed(path, pack_size=2**62)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_pack_size_that_contradicts_the_file_is_refused(tmp_path: Path, kind) -> None:
    with WRITERS[kind](tmp_path / "a") as writer:
        writer.write_bin(0, *BIN)
        writer.finalize()
    path = tmp_path / f"a{ENDINGS[kind]}"
    assert open_packed(path, pack_size=8).pack_size == 8
    with pytest.raises(OptionError, match="pack_size"):
        open_packed(path, pack_size=9)


def test_a_legacy_file_without_a_record_takes_the_pack_size_of_the_caller(tmp_path: Path) -> None:
    with WRITERS["legacy"](tmp_path / "a") as writer:
        writer.write_bin(0, *BIN)
        writer.finalize()
    (tmp_path / "a.npy.json").unlink()
    assert open_packed(tmp_path / "a.npy").pack_size == 3
    assert open_packed(tmp_path / "a.npy", pack_size=64).pack_size == 64


def test_a_legacy_file_that_does_not_match_its_record_is_not_opened(tmp_path: Path) -> None:
    for name, last in (("a", 3), ("b", 4)):
        with WRITERS["legacy"](tmp_path / name) as writer:
            writer.write_bin(0, [1, 2, last], *BIN[1:])
            writer.finalize()
    (tmp_path / "a.npy").write_bytes((tmp_path / "b.npy").read_bytes())
    with pytest.raises(DamagedStoreError, match="its sha256 is not the one in its record"):
        open_packed(tmp_path / "a.npy")


def test_a_conversion_that_differs_publishes_nothing(tmp_path: Path, monkeypatch) -> None:
    with WRITERS["legacy"](tmp_path / "a") as writer:
        writer.write_bin(0, *BIN)
        writer.finalize()
    seen: list[bool] = []

    def differs(*arguments: object) -> None:
        seen.append((tmp_path / "new").exists())
        raise DamagedStoreError("bin 0 differs")

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "check_bins", differs)
        with pytest.raises(DamagedStoreError, match="bin 0 differs"):
            convert_legacy_to_memmap(tmp_path / "a.npy", tmp_path / "new")
    assert seen == [False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "a.npy.json"]
    manifest = convert_legacy_to_memmap(tmp_path / "a.npy", tmp_path / "new")
    assert manifest["parity"] == {"equal": True, "bins": 1, "tokens": 3}


def test_a_spool_is_not_taken_for_a_packed_shard(tmp_path: Path) -> None:
    write_spool(tmp_path / "spool", [([1, 2], [0, 1])])
    with pytest.raises(StoreError, match="a spool, whose sequences are not packed yet"):
        open_packed(tmp_path / "spool")


def test_a_closed_spool_says_so(tmp_path: Path) -> None:
    write_spool(tmp_path / "spool", [([1, 2], [0, 1])])
    reader = SequenceSpoolReader(tmp_path / "spool")
    reader.close()
    reader.close()
    pieces = np.array([0]), np.array([0]), np.array([1])
    for read in (
        lambda: reader.read_sequence(0),
        reader.lengths,
        lambda: reader.read_pieces(*pieces),
    ):
        with pytest.raises(StoreError, match="this reader was closed") as refused:
            read()
        assert isinstance(refused.value, ShardmillError)


URLS = [
    "s3://bucket/x",
    "memory://x",
    "gs://b/x",
    "https://host/x",
    "hf://d/x",
    "file:///x",
    "S3://b/x",
]
URL_USES = {
    "MemmapShardWriter": lambda url, _: MemmapShardWriter(url, 1, 4, 1),
    "LegacyPickleWriter": lambda url, _: LegacyPickleWriter(f"{url}.npy"),
    "ParquetShardWriter": lambda url, _: ParquetShardWriter(f"{url}.parquet", 4),
    "SequenceSpoolWriter": lambda url, _: SequenceSpoolWriter(url),
    "SequenceSpoolReader": lambda url, _: SequenceSpoolReader(url),
    "pack_from_spool to": lambda url, top: pack_from_spool(
        top / "spool", url, shard_id="a", pack_size=4
    ),
    "pack_from_spool of": lambda url, top: pack_from_spool(
        url, top / "x", shard_id="a", pack_size=4
    ),
    "convert to": lambda url, top: convert_legacy_to_memmap(top / "a.npy", url),
    "convert of": lambda url, top: convert_legacy_to_memmap(url, top / "x"),
    "convert to, any format": lambda url, top: convert(
        top / "a.npy", url, from_format="legacy", to_format="memmap"
    ),
    "convert of, any format": lambda url, top: convert(
        url, top / "x", from_format="legacy", to_format="memmap"
    ),
    "open_packed": lambda url, _: open_packed(url),
    "open_memmap_shard": lambda url, _: open_memmap_shard(url),
    "verify_memmap_shard": lambda url, _: verify_memmap_shard(url),
    "iter_legacy_bins": lambda url, _: list(iter_legacy_bins(url)),
    "ChatStoreSpool": lambda url, _: ChatStoreSpool(url, "train"),
}


@pytest.mark.parametrize("use", URL_USES.values(), ids=URL_USES)
def test_a_url_never_becomes_a_local_folder(tmp_path, monkeypatch, use) -> None:
    write_spool(tmp_path / "spool", [([1, 2], [0, 1])])
    with LegacyPickleWriter(tmp_path / "a.npy") as writer:
        writer.write_bin(0, *BIN)
        writer.finalize()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    for url in (*URLS, *map(Path, URLS)):
        scheme = str(url).partition(":")[0].lower()
        with pytest.raises(OptionError, match=rf"found a URL \({scheme}://...\), wanted a local"):
            use(url, tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_url_is_refused_without_its_secrets(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("s3://KEY:SECRET@b/x", "https://h/x?sig=SECRET", "s3:///SECRET", "a+b://SECRET"):
        for use in (URL_USES["MemmapShardWriter"], URL_USES["open_packed"]):
            with pytest.raises(OptionError) as caught:
                use(url, tmp_path)
            assert "SECRET" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
