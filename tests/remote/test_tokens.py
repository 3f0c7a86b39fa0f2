"""A remote store read as if it were here: the same windows, a bounded cache."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import OptionError
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.remote import open_remote, push
from shardmill.store import open_store
from shardmill.store.readers import Windows, open_tokens
from tests.remote.conftest import Spot


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def shards_in(folder: Path) -> int:
    return len(list(folder.rglob("shard_*.bin")))


def test_windows_of_a_remote_store_are_those_of_the_store(
    make_store: Callable[..., Path], spot: Spot, tmp_path: Path
) -> None:
    folder = make_store()
    push(folder, spot.url, storage_options=spot.options)
    with open_tokens(open_store(folder), "train") as space:
        wanted = Windows(space, seq_len=30)
        every = np.arange(len(wanted))
        rows = wanted.gather(every)
    cache = tmp_path / "cache"
    options = {"cache": cache, "max_bytes": 4400, "storage_options": spot.options}
    with open_remote(spot.url, **options) as store:
        assert shards_in(cache) == 0
        with store.open_tokens("train") as space:
            windows = Windows(space, seq_len=30)
            np.testing.assert_array_equal(windows.gather([0]), rows[:1])
            assert shards_in(cache) == 1
            order = np.random.default_rng(1).permutation(every)
            for part in np.array_split(order, 20):
                np.testing.assert_array_equal(windows.gather(part), rows[part])
                assert used(cache) <= 4400  # of 11,000
            copy = pickle.loads(pickle.dumps(space))  # both at once fit too
            np.testing.assert_array_equal(Windows(copy, seq_len=30).gather(order), rows[order])
            copy.close()


@pytest.mark.slow
def test_a_loader_reads_a_remote_store_in_the_order_of_a_local_one(
    make_store: Callable[..., Path], s3_spot: Spot, tmp_path: Path
) -> None:
    folder = make_store("wiki")
    push(folder, s3_spot.url, storage_options=s3_spot.options)
    options = {"cache": tmp_path / "cache", "max_bytes": 6000, "storage_options": s3_spot.options}
    with open_remote(s3_spot.url, **options) as store:
        local = TokenSource(folder, seq_len=30, name="wiki")
        far = TokenSource(store, seq_len=30, name="wiki")
        assert TokenSource(store, seq_len=30).name == s3_spot.url.rpartition("/")[2]
        assert (len(far), far.fingerprint) == (len(local), local.fingerprint)
        streams = [SampleStream([source], seed=3, shuffle="block") for source in (local, far)]
        loaders = [Loader(one, batch_size=4, num_samples=120, documents=True) for one in streams]
        seen = 0
        for one, other in zip(*loaders, strict=True):
            for name in ("input_ids", "labels", "doc_ids", "position_ids", "cu_seqlens"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            seen += 1
        assert seen == 30
        assert loaders[0].state_dict() == loaders[1].state_dict()
        with pytest.raises(OptionError, match="none is 'test'"):
            TokenSource(store, seq_len=30, split="test")
        far.close(), local.close()
