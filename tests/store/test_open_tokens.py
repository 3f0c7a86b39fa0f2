"""A split of a real store, from the writer to the window."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from shardmill.errors import DamagedStoreError, OptionError
from shardmill.records import Ragged
from shardmill.store import open_store
from shardmill.store.readers import Windows, open_tokens
from shardmill.testing.stores import build_small_store


def documents(num_tokens: int, *, first: int = 0) -> Ragged:
    return Ragged.from_sequences([np.arange(first, first + num_tokens) % 60_000])


def test_the_windows_of_a_split_are_its_tokens(tmp_path):
    folder = tmp_path / "store"
    texts = {"train": documents(10_000), "val": documents(300, first=20_000)}
    build_small_store(folder, texts, dtype="uint16", shard_bytes=4096)
    store = open_store(folder)
    train = Windows(open_tokens(store, "train"), seq_len=100)
    assert len(train) == 99
    assert train.gather([0, 98])[:, [0, 1, 100]].tolist() == [[0, 1, 100], [9800, 9801, 9900]]
    assert open_tokens(store, "val").read(0, 3).tolist() == [20_000, 20_001, 20_002]
    with pytest.raises(OptionError, match="'test'"):
        open_tokens(store, "test")


def test_the_tokens_of_a_store_pickle_as_its_path(tmp_path):
    folder = tmp_path / "store"
    build_small_store(folder, {"train": documents(40_000)}, dtype="uint16", shard_bytes=4096)
    space = open_tokens(open_store(folder), "train", max_maps=2)
    space.read(0, 10)
    data = pickle.dumps(space)
    assert len(data) < 1000  # there are 20 shards, whose names alone would be more
    assert pickle.loads(data).read(30_000, 30_003).tolist() == [30_000, 30_001, 30_002]


def test_a_worker_refuses_a_store_that_was_built_again_meanwhile(tmp_path):
    folder = tmp_path / "store"
    build_small_store(folder, {"train": documents(5000)}, dtype="uint16", shard_bytes=4096)
    data = pickle.dumps(open_tokens(open_store(folder), "train"))
    folder.rename(tmp_path / "old")
    build_small_store(folder, {"train": documents(5000, first=1)}, dtype="uint16", shard_bytes=4096)
    with pytest.raises(DamagedStoreError, match="other tokens than when"):
        pickle.loads(data)
