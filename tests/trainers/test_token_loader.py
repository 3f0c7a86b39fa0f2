"""TokenLoader: the native loader's batches as tensors, in the same memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import shardmill
from shardmill.errors import StateMismatchError
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.trainers.torch import TokenLoader


@pytest.fixture
def stream(tmp_path: Path) -> SampleStream:
    np.save(tmp_path / "shard.npy", np.arange(801, dtype="<u2"))
    return SampleStream([TokenSource(tmp_path, seq_len=8)], seed=3)


def test_tensors_are_the_batch_in_the_same_memory(stream):
    batches = list(Loader(stream, batch_size=4, num_samples=20))
    loader = Loader(stream, batch_size=4, num_samples=20)
    with TokenLoader(loader, pin_memory=True) as tokens:
        found = list(tokens)
    assert len(found) == 5
    for batch, tensors in zip(batches, found, strict=True):
        assert list(tensors) == ["input_ids", "labels"]
        assert tensors["input_ids"].dtype == tensors["labels"].dtype == torch.int64
        assert tensors["input_ids"].tolist() == batch.input_ids.tolist()
        assert tensors["labels"].tolist() == batch.labels.tolist()
        assert (tensors["labels"] == tensors["input_ids"] + 1).all()
    one = next(iter(Loader(stream, batch_size=4)))
    same = TokenLoader(loader)._tensors(one)
    assert same["input_ids"].data_ptr() == one.input_ids.ctypes.data
    assert same["labels"].data_ptr() == one.labels.ctypes.data


def test_tensors_that_are_kept_do_not_change(stream):
    loader = TokenLoader(Loader(stream, batch_size=4, num_samples=100))
    kept = [(batch["input_ids"][1:2], batch["input_ids"][1:2].clone()) for batch in loader]
    assert len(kept) == 25
    assert all(torch.equal(row, copy) for row, copy in kept)


def test_the_state_is_the_loaders(stream):
    loader = TokenLoader(Loader(stream, batch_size=4, num_samples=40))
    under_way = iter(loader)
    for _ in range(3):
        next(under_way)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state == loader.loader.state_dict()
    assert state["samples"] == 12
    rest = [batch["input_ids"].tolist() for batch in under_way]
    ranks = [
        TokenLoader(Loader(stream, batch_size=2, rank=r, world=2, num_samples=40)) for r in (0, 1)
    ]
    for rank in ranks:
        rank.load_state_dict(state)
    steps = zip(*ranks, strict=True)
    union = [torch.cat([b["input_ids"] for b in step]).tolist() for step in steps]
    assert union == rest
    assert len(rest) == 7
    with pytest.raises(StateMismatchError):
        loader.load_state_dict({**state, "seed": 4})


def test_documents_bring_their_borders(tmp_path):
    texts = ["abc" * n for n in range(1, 40)]
    feed = shardmill.Feed(source=shardmill.MemorySource(texts, name="t"), fill=(("train", None),))
    tokenizer = shardmill.open_tokenizer("byte:1")
    shardmill.build_store([feed], tmp_path / "s", tokenizer=tokenizer, spec=shardmill.BuildSpec())
    stream = SampleStream([TokenSource(tmp_path / "s", seq_len=32)], seed=1)
    loader = Loader(stream, batch_size=4, num_samples=20, documents=True)
    seen = list(loader)
    loader = TokenLoader(Loader(stream, batch_size=4, num_samples=20, documents=True))
    found = list(loader)
    assert len(found) == 5
    for batch, tensors in zip(seen, found, strict=True):
        assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
            "input_ids": batch.input_ids.tolist(),
            "labels": batch.labels.tolist(),
            "doc_ids": batch.doc_ids.tolist(),
            "position_ids": batch.position_ids.tolist(),
            "cu_seqlens": batch.cu_seqlens.tolist(),
            "max_seqlen": batch.max_seqlen,
        }
        assert tensors["cu_seqlens"].dtype == torch.int32
    assert sum((tensors["labels"] == -100).sum().item() for tensors in found) > 0
