"""Packed shards as Parquet."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import (
    DamagedStoreError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    TokenRangeError,
)
from shardmill.formats.packed.formats import open_packed
from shardmill.formats.packed.parquet import ParquetShard, ParquetShardWriter
from shardmill.formats.packed.records import PackedShard
from tests.formats.test_unpickle import BIN, packed_bins


def write(path: Path, bins, pack_size: int = 1000, **options) -> dict:
    with ParquetShardWriter(path, pack_size, **options) as writer:
        for number, one in enumerate(bins):
            writer.write_bin(number, one["input_ids"], one["loss_mask"], one["seq_start_id"])
        return writer.finalize()


def plain(shard: ParquetShard, number: int) -> dict[str, list[int]]:
    found = shard.read_bin(number)
    return {
        "input_ids": found.input_ids.tolist(),
        "loss_mask": found.loss_mask.tolist(),
        "seq_start_id": found.seq_starts.tolist(),
    }


@settings(max_examples=40, deadline=None)
@given(bins=packed_bins(), group=st.integers(1, 4), data=st.data())
def test_write_then_read_is_identity_in_any_order(tmp_path_factory, bins, group, data):
    path = tmp_path_factory.mktemp("p") / "a.parquet"
    receipt = write(path, bins, row_group_size=group, loss_mask_alignment="roll_right")
    assert receipt["num_bins"] == len(bins)
    shard = ParquetShard(path)
    assert isinstance(shard, PackedShard)
    assert (len(shard), shard.pack_size) == (len(bins), 1000)
    assert shard.loss_mask_alignment == "roll_right"
    for number in data.draw(st.permutations(range(len(bins)))):
        assert plain(shard, number) == bins[number]
    assert pq.read_table(path).to_pylist() == bins
    assert [file.name for file in path.parent.iterdir()] == ["a.parquet"]


def test_the_columns_are_those_that_others_read(tmp_path):
    write(tmp_path / "a.parquet", [BIN] * 5, row_group_size=2)
    schema = pq.read_schema(tmp_path / "a.parquet")
    assert [(field.name, str(field.type)) for field in schema] == [
        ("input_ids", "list<element: int32>"),
        ("loss_mask", "list<element: uint8>"),
        ("seq_start_id", "list<element: int32>"),
    ]
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3


def test_a_folder_of_files_is_one_shard_and_pickles_as_its_path(tmp_path):
    for number in range(3):
        write(tmp_path / f"{number}.parquet", [BIN | {"input_ids": [number, 2, 3]}])
    shard = pickle.loads(pickle.dumps(open_packed(tmp_path)))
    assert [plain(shard, number)["input_ids"][0] for number in range(3)] == [0, 1, 2]
    with pytest.raises(IndexError, match="bin 3 of 3"):
        shard.read_bin(3)


@pytest.mark.parametrize("lists", [pa.list_, pa.large_list])
@pytest.mark.parametrize("inner", [pa.int64(), pa.int32(), pa.uint16()])
def test_files_of_others_are_read_if_the_pack_size_is_given(tmp_path, lists, inner):
    schema = pa.schema(
        [
            ("seq_start_id", lists(pa.int64())),
            ("input_ids", lists(inner)),
            ("loss_mask", lists(pa.bool_())),
            ("more", pa.string()),
        ]
    )
    one = {"input_ids": [1, 300, 7], "loss_mask": [False, True, False], "seq_start_id": [0, 2]}
    pq.write_table(pa.Table.from_pylist([one | {"more": "x"}], schema), tmp_path / "a.parquet")
    with pytest.raises(OptionError, match="does not say its pack size: pass pack_size"):
        ParquetShard(tmp_path / "a.parquet")
    shard = ParquetShard(tmp_path / "a.parquet", pack_size=4)
    assert plain(shard, 0) == {
        "input_ids": [1, 300, 7],
        "loss_mask": [0, 1, 0],
        "seq_start_id": [0, 2],
    }
    assert shard.read_bin(0).input_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"input_ids": [1, 2**31, 3]}, "ids 1..2,147,483,648"),
        ({"input_ids": [1, -1, 3]}, "ids -1..3"),
        ({"loss_mask": [0, 257, 0]}, "other values than 0 and 1"),
        ({"input_ids": [1, None, 3]}, "nulls"),
        ({"input_ids": None}, "nulls"),
        ({"seq_start_id": [0, 0]}, "strictly increasing"),
        ({"loss_mask": [0]}, "a loss_mask of 1 for 3 tokens"),
    ],
)
def test_what_breaks_the_invariant_is_refused(tmp_path, change, problem):
    kind = pa.list_(pa.int64())
    schema = pa.schema([(name, kind) for name in BIN])
    pq.write_table(pa.Table.from_pylist([BIN | change], schema), tmp_path / "a.parquet")
    with pytest.raises(DamagedStoreError, match=problem):
        ParquetShard(tmp_path / "a.parquet", pack_size=9).read_bin(0)


def test_other_files_are_refused_by_name(tmp_path):
    pq.write_table(pa.table({"input_ids": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(StoreError, match="column input_ids is int64, wanted lists"):
        ParquetShard(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DamagedStoreError, match=r"b\.parquet: cannot be read as Parquet"):
        ParquetShard(tmp_path / "b.parquet")
    with pytest.raises(StoreNotFoundError):
        ParquetShard(tmp_path / "c.parquet")


def test_a_writer_refuses_bins_out_of_order_and_leaves_nothing(tmp_path):
    with (
        ParquetShardWriter(tmp_path / "a.parquet", 9) as writer,
        pytest.raises(OptionError, match="bin 1, but the next bin is 0"),
    ):
        writer.write_bin(1, [1], [0], [0])
    with pytest.raises(OptionError, match="wanted 1 to pack_size=2"):
        write(tmp_path / "a.parquet", [BIN], 2)
    with pytest.raises(TokenRangeError, match="token id 2,147,483,648 does not fit int32"):
        write(tmp_path / "a.parquet", [BIN | {"input_ids": [1, 2, 2**31]}])
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a.parquet", [BIN])
    with pytest.raises(StoreExistsError):
        write(tmp_path / "a.parquet", [BIN])


def rewrite(path: Path, table: pa.Table, metadata: dict, row_group_size: int = 2) -> None:
    """A whole and valid Parquet file, with page checksums, that says these things of itself."""
    with pq.ParquetWriter(path, table.schema.remove_metadata()) as writer:
        writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata(metadata)


@pytest.fixture
def written(tmp_path) -> tuple[Path, pa.Table, dict]:
    path = tmp_path / "a.parquet"
    write(path, [BIN | {"input_ids": [number, 2, 3]} for number in range(4)], row_group_size=2)
    said = {k: v for k, v in pq.read_metadata(path).metadata.items() if k.startswith(b"shardmill")}
    assert len(said) == 6
    return path, pq.read_table(path), said


def read_all(path: Path, **options) -> list[dict[str, list[int]]]:
    with ParquetShard(path, **options) as shard:
        return [plain(shard, number) for number in range(len(shard))]


def test_the_same_rows_written_again_by_others_are_read(written):
    path, table, said = written
    rewrite(path, table, said)
    assert read_all(path) == table.to_pylist()


@pytest.mark.parametrize("column", range(3))
def test_other_numbers_under_the_same_metadata_are_refused(written, column):
    """Page checksums are right here: only the digest of the row group knows."""
    path, table, said = written
    name = table.schema.names[column]
    other = [[0, 1], [0], [0, 2], [0, 2]] if name == "seq_start_id" else [[1, 1, 0]] * 4
    changed = table.set_column(column, name, pa.array(other, table.schema.field(name).type))
    rewrite(path, changed, said)
    with pytest.raises(DamagedStoreError, match="row group 0 is not what was written"):
        read_all(path)


def test_rows_in_another_order_and_rows_left_out_are_refused(written):
    path, table, said = written
    rewrite(path, table.take([2, 3, 0, 1]), said)
    with pytest.raises(DamagedStoreError, match="row group 0 is not what was written"):
        read_all(path)
    rewrite(path, table.slice(0, 2), said)
    with pytest.raises(DamagedStoreError, match="2 bins in 1 row groups, wanted 4 in 2"):
        ParquetShard(path)
    rewrite(path, table, said, row_group_size=4)
    with pytest.raises(DamagedStoreError, match="4 bins in 1 row groups, wanted 4 in 2"):
        ParquetShard(path)
    wide = table.cast(pa.schema([(name, pa.list_(pa.int64())) for name in table.schema.names]))
    rewrite(path, wide, said)
    with pytest.raises(DamagedStoreError, match="wanted lists of int32"):
        ParquetShard(path)


def test_metadata_that_was_changed_is_refused_and_that_of_others_is_none(written):
    path, table, said = written
    for key in said:
        for metadata in (said | {key: said[key] + b"0"}, {k: said[k] for k in said if k != key}):
            rewrite(path, table, metadata)
            with pytest.raises(DamagedStoreError, match="its metadata is not as shardmill wrote"):
                ParquetShard(path, pack_size=9)
    rewrite(path, table, {b"other": b"1"})
    with pytest.raises(OptionError, match="does not say its pack size: pass pack_size"):
        ParquetShard(path)
    assert ParquetShard(path, pack_size=9).pack_size == 9


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_a_damaged_file_gives_an_error_of_ours_or_the_right_bins(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("p") / "a.parquet"
    bins = [BIN | {"input_ids": [number, 2, 3]} for number in range(4)]
    write(path, bins, row_group_size=2)
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.integers(0, 3)) == 0:
        del raw[place:]
    else:
        raw[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    try:
        found = read_all(path)
    except OptionError:  # it does not say its pack size
        # one bit of the footer can hide all metadata: it looks like the file of another program, so
        # the caller gives the pack size; its pages still have checksums
        with suppress(StoreError):
            assert read_all(path, pack_size=1000) == bins
    except StoreError:
        return
    else:
        assert found == bins
