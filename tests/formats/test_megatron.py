"""Megatron's .bin and .idx, in and out."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreExistsError
from shardmill.formats.convert import ConvertOptions, convert
from shardmill.formats.megatron import open_megatron, write_megatron
from shardmill.formats.stores import StoreSplit
from shardmill.records import Ragged
from shardmill.testing.stores import (
    assert_store_laws,
    build_small_store,
    documents,
    read_documents,
    shard_sizes,
)

DOCUMENTS = [[1, 2, 3], [], [65535, 0], [7]]


def store(folder: Path, lists=DOCUMENTS, dtype: str = "uint16") -> Path:
    build_small_store(folder, {"train": Ragged.from_sequences(lists)}, dtype=dtype)
    return folder


def test_the_files_are_those_of_the_format_byte_for_byte(tmp_path):
    write_megatron(StoreSplit(store(tmp_path / "s"), "train"), tmp_path / "out" / "train")
    assert (tmp_path / "out" / "train.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 65535, 0, 7)
    index = (tmp_path / "out" / "train.idx").read_bytes()
    assert index == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 4, 5)
        + struct.pack("<4i", 3, 0, 2, 1)
        + struct.pack("<4q", 0, 6, 6, 10)
        + struct.pack("<5q", 0, 1, 2, 3, 4)
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train.bin", "train.idx"]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["uint16", "uint32"]))
def test_store_to_megatron_and_back_is_identity(tmp_path_factory, data, dtype):
    folder = tmp_path_factory.mktemp("m")
    wanted = data.draw(documents(dtype=dtype))
    wanted = Ragged(np.minimum(wanted.values, 2**31 - 1), wanted.offsets)
    shards = data.draw(shard_sizes(dtype))
    build_small_store(folder / "s", {"train": wanted}, dtype=dtype, shard_bytes=shards)
    receipt = convert(folder / "s", folder / "m", from_format="store", to_format="megatron")
    assert receipt["parity"] == {
        "equal": True,
        "documents": len(wanted),
        "tokens": len(wanted.values),
    }
    convert(folder / "m", folder / "back", from_format="megatron", to_format="store")
    assert read_documents(folder / "back", "train") == wanted
    assert_store_laws(folder / "back")


def test_sequences_of_one_document_become_one_document(tmp_path):
    (tmp_path / "a.bin").write_bytes(struct.pack("<5i", 1, 2, 3, 4, 5))
    (tmp_path / "a.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, 3, 4)
        + struct.pack("<3i", 2, 1, 2)
        + struct.pack("<3q", 0, 8, 12)
        + struct.pack("<4q", 0, 0, 2, 3)
    )
    found = [ids.tolist() for batch in open_megatron(tmp_path / "a").batches() for ids in batch]
    assert found == [[], [1, 2, 3], [4, 5]]


def test_nothing_is_overwritten_and_a_missing_split_is_named(tmp_path):
    split = StoreSplit(store(tmp_path / "s"), "train")
    write_megatron(split, tmp_path / "m")
    before = (tmp_path / "m.bin").read_bytes()
    with pytest.raises(StoreExistsError, match=r"m\.bin: is here already"):
        write_megatron(split, tmp_path / "m")
    assert (tmp_path / "m.bin").read_bytes() == before
    with pytest.raises(OptionError, match="no split 'val'; it has"):
        convert(
            tmp_path / "s",
            tmp_path / "n",
            from_format="store",
            to_format="megatron",
            options=ConvertOptions(split="val"),
        )
    with pytest.raises(StoreExistsError):
        convert(tmp_path / "m", tmp_path / "s", from_format="megatron", to_format="store")


def test_ids_beyond_int32_are_refused_and_leave_nothing(tmp_path):
    split = StoreSplit(store(tmp_path / "s", [[2**31]], "uint32"), "train")
    with pytest.raises(ValueError, match="int32 ends at 2,147,483,647"):
        write_megatron(split, tmp_path / "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_index_is_refused_or_read_right(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("m")
    write_megatron(StoreSplit(store(folder / "s"), "train"), folder / "m")
    raw = bytearray((folder / "m.idx").read_bytes())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "m.idx").write_bytes(raw)
    try:
        batches = list(open_megatron(folder / "m").batches())
    except (StoreError, DamagedStoreError):
        return
    # what no check can see: another border between documents, or another sign of uint16
    tokens = np.concatenate([batch.values for batch in batches])
    assert tokens.view("<u2").tolist() == [1, 2, 3, 65535, 0, 7]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # theirs
def test_megatron_core_reads_what_we_write(tmp_path):
    """The real reader, when megatron-core is installed."""
    pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core")
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    for dtype, code in (("uint16", np.uint16), ("uint32", np.int32)):
        prefix = tmp_path / dtype
        lists = [[1, 2, 3], [65535, 0], [7]]
        write_megatron(StoreSplit(store(tmp_path / f"s{dtype}", lists, dtype), "train"), prefix)
        found = IndexedDataset(str(prefix))
        assert [found[i].tolist() for i in range(len(found))] == lists
        assert found.document_indices.tolist() == [0, 1, 2, 3]
        builder = IndexedDatasetBuilder(str(tmp_path / f"{dtype}_theirs.bin"), dtype=code)
        for ids in lists:
            builder.add_document(np.array(ids), [len(ids)])
        builder.finalize(str(tmp_path / f"{dtype}_theirs.idx"))
        for ending in (".bin", ".idx"):
            ours = Path(f"{prefix}{ending}").read_bytes()
            assert ours == (tmp_path / f"{dtype}_theirs{ending}").read_bytes(), ending
    assert "megatron.core" in sys.modules
