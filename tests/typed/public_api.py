"""A user's program, for mypy --strict alone: every name that training from stores needs.

It is never run: `test_public_types.py` checks its types as they are in a user's own project.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import DataLoader

import shardmill
from shardmill.building import BuildReport
from shardmill.compat.kempnerforge import (
    DistributedSampler,
    LoaderConfig,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    StatefulDataLoader,
    collate,
)
from shardmill.loading import Batch, Loader, SampleStream, TokenSource, plan_step
from shardmill.store import Store
from shardmill.trainers.torch import TokenLoader, document_mask


def build(folder: Path) -> Store:
    tokenizer = shardmill.open_tokenizer("byte:1", specials={"eot": "<|eot|>"})
    source = shardmill.MemorySource(["one text", "another"], name="texts")
    feed = shardmill.Feed(source=source, fill=(("val", 1_000), ("train", None)))
    spec = shardmill.BuildSpec(append_eot=True)
    report = shardmill.build_store([feed], folder, tokenizer=tokenizer, spec=spec)
    assert_type(report, BuildReport)
    store = shardmill.open_store(report.folder)
    assert_type(store, Store)
    assert_type(store.num_tokens("train"), int)
    return store


def numpy_batches(folder: Path, rank: int, world: int) -> None:
    web = TokenSource(folder / "web", seq_len=1024)
    wiki = TokenSource(str(folder / "wiki"), seq_len=1024, split="train", name="wiki")
    assert_type(len(web), int)
    stream = SampleStream(
        [web, wiki],
        weights=[0.7, 0.3],
        seed=1,
        shuffle="block",
        phases=[(1_000_000, [0.2, 0.8])],
    )
    for row in plan_step(stream, samples=31_207, batch_size=8, world=world, rank=rank):
        print(row.sample, row.source, row.window, row.stop - row.start)
    with Loader(stream, batch_size=8, rank=rank, world=world, documents=True) as loader:
        for batch in loader:
            assert_type(batch, Batch)
            assert_type(batch.input_ids, npt.NDArray[np.int64])
            if batch.doc_ids is not None:
                print(batch.doc_ids.max(), batch.samples.start)
            state = loader.state_dict()
            loader.load_state_dict(state)
            for name, used in loader.counters().items():
                print(name, used.samples + 1, used.tokens + 1, used.epochs + 0.5)


def tensors(loader: Loader) -> Tensor:
    batches = TokenLoader(loader, pin_memory=True)
    batch = next(iter(batches))
    assert_type(batch["input_ids"], Tensor)
    batches.load_state_dict(batches.state_dict())
    return document_mask(batch["doc_ids"])


def datasets(folder: Path) -> None:
    one = MemoryMappedDataset(folder / "one", seq_len=129)
    two = MemoryMappedDataset(folder / "two", 129, "*.bin", True, 2, np.uint16)
    assert_type(one[0], dict[str, Tensor])
    sampler = DistributedSampler(one, num_replicas=8, rank=3, shuffle=True, seed=0, drop_last=True)
    sampler.set_epoch(1)
    plain = DataLoader(one, batch_size=4, sampler=sampler, collate_fn=collate)
    assert_type(len(plain), int)
    both = MixtureDataset([one, two], ["one", "two"])
    mixing = MixtureSampler(both.cumulative_sizes, [0.5, 0.5], 8, 3, temperature=2.0)
    mixing.update_weights([0.1, 0.9])
    loader = StatefulDataLoader(both, 4, sampler=mixing, config=LoaderConfig(num_workers=2))
    for batch in loader:
        print(batch["labels"].shape)
        loader.load_state_dict(loader.state_dict())
