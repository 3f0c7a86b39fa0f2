"""MemoryMappedDataset on stores: documents come from the index; a split is one run of tokens."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.compat.kempnerforge import MemoryMappedDataset
from shardmill.errors import DamagedStoreError, OptionError, StoreError
from shardmill.records import ChatExamples, Ragged
from shardmill.testing.stores import (
    build_small_chat_store,
    build_small_store,
    documents,
    shard_sizes,
)


def store_of(folder: Path, lengths: list[int], **options: object) -> Path:
    """Documents of the tokens 0, 1, 2, ... in a store of one split."""
    values = np.arange(sum(lengths))
    build_small_store(folder, {"train": Ragged.from_lengths(values, lengths)}, **options)
    return folder


def test_documents_come_from_the_index_and_samples_cross_shards(tmp_path):
    store = store_of(tmp_path / "s", [2, 3, 0, 7], shard_bytes=10)
    data = MemoryMappedDataset(store, 6, pack_sequences=True)
    assert len(data) == 2
    batch = data.batch([0, 1])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]]
    assert batch["labels"].tolist() == [[1, -100, 3, 4, -100], [7, 8, 9, 10, 11]]
    assert batch["doc_ids"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert data.dtype_rule == "store: its manifest says uint16"


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from(["uint16", "uint32"]),
    seq_len=st.integers(2, 12),
    data=st.data(),
)
def test_every_sample_of_a_store_equals_slicing_its_documents(dtype, seq_len, data):
    ragged = data.draw(documents(dtype=dtype))
    shard_bytes = data.draw(shard_sizes(dtype))
    tokens = ragged.values.tolist()
    owner = [n for n, length in enumerate(ragged.lengths.tolist()) for _ in range(length)]
    with tempfile.TemporaryDirectory() as place:
        build_small_store(
            Path(place) / "s", {"train": ragged}, dtype=dtype, shard_bytes=shard_bytes
        )
        found = MemoryMappedDataset(Path(place) / "s" / "train", seq_len, pack_sequences=True)
        assert len(found) == len(tokens) // seq_len
        for index, sample in enumerate(found):
            at = range(index * seq_len, (index + 1) * seq_len - 1)
            assert sample["input_ids"].tolist() == [tokens[place] for place in at]
            assert sample["labels"].tolist() == [
                tokens[p + 1] if owner[p] == owner[p + 1] else -100 for p in at
            ]
            known = sorted({owner[place] for place in at})
            assert sample["doc_ids"].tolist() == [known.index(owner[place]) for place in at]


def test_a_split_is_named_by_path_or_by_word(tmp_path):
    splits = {
        "train": Ragged.from_sequences([[1, 2, 3, 4]]),
        "val": Ragged.from_sequences([[5, 6, 7]]),
    }
    build_small_store(tmp_path / "s", splits, shard_bytes=4)
    assert MemoryMappedDataset(tmp_path / "s" / "val", 3)[0]["input_ids"].tolist() == [5, 6]
    assert MemoryMappedDataset(tmp_path / "s", 3, split="val")[0]["labels"].tolist() == [6, 7]
    with pytest.raises(OptionError, match=r"\['train', 'val'\]; say which: split='train', or open"):
        MemoryMappedDataset(tmp_path / "s", 3)
    with pytest.raises(OptionError, match="none is 'test'"):
        MemoryMappedDataset(tmp_path / "s", 3, split="test")
    with pytest.raises(OptionError, match="is the split 'val', but split='train'"):
        MemoryMappedDataset(tmp_path / "s" / "val", 3, split="train")


def test_options_that_do_not_fit_the_store_are_refused(tmp_path):
    store = store_of(tmp_path / "s", [4, 8], shard_bytes=8)
    assert len(MemoryMappedDataset(store, 4, "*.bin", dtype="uint16")) == 3
    with pytest.raises(OptionError, match="dtype='uint32'"):
        MemoryMappedDataset(store, 4, dtype="uint32")
    with pytest.raises(OptionError, match=r"is a store and is read whole"):
        MemoryMappedDataset(store, 4, "shard_00000.bin")


def test_a_store_is_never_read_as_a_folder_of_foreign_files(tmp_path):
    store = store_of(tmp_path / "s", [4, 8], shard_bytes=8)
    meta = (store / "meta.json").read_bytes()
    (store / "meta.json").write_bytes(meta.replace(b'"documents": 2', b'"documents": 3'))
    for path in (store, store / "train"):
        with pytest.raises(StoreError, match=r"meta\.json"):
            MemoryMappedDataset(path, 4, "*.bin", dtype="uint16")
    (store / "meta.json").write_bytes(meta[:-100])
    for path in (store, store / "train"):
        with pytest.raises(StoreError, match=r"meta\.json"):
            MemoryMappedDataset(path, 4, "*.bin", dtype="uint16")
    (store / "meta.json").write_bytes(meta)
    (store / "train" / "shard_00001.bin").write_bytes(b"123456")
    with pytest.raises(DamagedStoreError, match=r"shard_00001\.bin"):
        MemoryMappedDataset(store / "train", 4, "*.bin")


def test_it_pickles_as_the_store_and_refuses_another(tmp_path):
    store = store_of(tmp_path / "s", [2] * 5000)
    data = MemoryMappedDataset(store, 8, pack_sequences=True)
    wanted = data.batch([0, 7])
    frozen = pickle.dumps(data)
    assert len(frozen) < 4000
    assert pickle.loads(frozen).batch([0, 7])["doc_ids"].equal(wanted["doc_ids"])
    for path in sorted(store.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    store.rmdir()
    store_of(store, [3] * 5000)
    with pytest.raises(DamagedStoreError, match="rebuilt"):
        pickle.loads(frozen)


def test_an_index_out_of_order_is_refused_not_followed(tmp_path):
    store = store_of(tmp_path / "s", [4, 4, 4, 4])
    index = store / "train_idx.npy"
    raw = bytearray(index.read_bytes())
    raw[128 + 8 : 128 + 16] = (9).to_bytes(8, "little")  # starts 0 9 8 12
    index.write_bytes(raw)
    for seq_len in (16, 2):  # the first sample of two tokens meets no border
        with pytest.raises(DamagedStoreError, match="not in ascending order"):
            MemoryMappedDataset(store, seq_len, pack_sequences=True)[0]


def test_a_store_of_conversations_is_refused_because_all_of_it_would_be_trained(tmp_path):
    examples = ChatExamples(
        ids=Ragged.from_sequences([[3, 7, 4, 8, 9]]),
        mask=np.array([False, False, False, True, True]),
        turn_starts=np.array([0, 2], np.int64),
        turn_roles=np.array([1, 2], np.uint8),
    )
    build_small_chat_store(tmp_path / "s", {"train": examples})
    with pytest.raises(OptionError, match="every token would be trained"):
        MemoryMappedDataset(tmp_path / "s", 4)
