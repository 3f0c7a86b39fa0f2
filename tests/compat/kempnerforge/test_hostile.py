"""Iterators for PyTorch are for one thread each, and no state breaks them."""

from __future__ import annotations

import json
import threading
from itertools import islice

import pytest
import torch

from shardmill.compat.kempnerforge import (
    DistributedSampler,
    MemoryMappedDataset,
    MixtureSampler,
    StatefulDataLoader,
)
from shardmill.errors import OptionError, ShardmillError, StateMismatchError
from shardmill.trainers.torch import TokenLoader
from tests.compat.kempnerforge.counting import Numbers, numbers_of
from tests.loading.stores import write_all
from tests.loading.test_state import STRANGE, changed, places_in
from tests.loading.test_threads import slow_loader


class Slow(Numbers):
    """The first sample waits for `go`."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.entered, self.go = threading.Event(), threading.Event()

    def __getitem__(self, index: int):
        self.entered.set()
        assert self.go.wait(600)
        return super().__getitem__(index)


def test_a_second_thread_in_a_stateful_loader_is_refused_and_no_batch_is_lost():
    data = Slow(12)
    loader = StatefulDataLoader(data, 2, DistributedSampler(data, shuffle=False))
    batches = iter(loader)
    given = []
    thread = threading.Thread(target=lambda: given.append(next(batches)))
    thread.start()
    try:
        assert data.entered.wait(600)
        with pytest.raises(OptionError, match=r"two threads.*one StatefulDataLoader for each"):
            next(batches)
    finally:
        data.go.set()
        thread.join()
    given += list(batches)
    assert [numbers_of(batch) for batch in given] == [[n, n + 1] for n in range(0, 12, 2)]


def test_a_second_thread_in_a_token_loader_is_refused(tmp_path_factory):
    stores = write_all(tmp_path_factory.mktemp("stores"))
    entered, go = threading.Event(), threading.Event()
    batches = iter(TokenLoader(slow_loader(stores, ahead=0, entered=entered, go=go)))
    thread = threading.Thread(target=lambda: next(batches))
    thread.start()
    try:
        assert entered.wait(600)
        with pytest.raises(OptionError, match="two threads"):
            next(batches)
    finally:
        go.set()
        thread.join()


def test_an_epoch_that_no_number_holds_is_refused():
    loader = make_loader("mixture")
    state = loader.state_dict()
    state = changed(changed(state, ("epoch",), 2**62), ("sampler", "epoch"), 2**62)
    with pytest.raises(StateMismatchError, match="epoch=4,611,686,018,427,387,904 of 20 samples"):
        loader.load_state_dict(state)
    with pytest.raises(OptionError, match="epoch=4,611,686,018,427,387,904 of 20 samples"):
        loader.set_epoch(2**62)
    assert loader.epoch == 0


def make_loader(kind: str) -> StatefulDataLoader:
    data = Numbers(20)
    sampler = (
        DistributedSampler(data, seed=3)
        if kind == "distributed"
        else MixtureSampler([0, 12, 20], [1.0, 2.0], seed=3, names=["a", "b"])
    )
    return StatefulDataLoader(data, 2, sampler)


@pytest.mark.parametrize("value", STRANGE, ids=repr)
@pytest.mark.parametrize("kind", ["distributed", "mixture"])
def test_a_state_with_any_value_replaced_is_refused_by_our_errors_or_read(kind, value):
    loader = make_loader(kind)
    list(islice(loader, 3))
    if kind == "mixture":
        loader.sampler.update_weights([3.0, 1.0])
    state = json.loads(json.dumps(loader.state_dict()))
    twice = [  # a value that is there twice is changed at both places, too
        changed(changed(state, (name,), value), ("sampler", name), value)
        for name in ("epoch", "samples")
    ]
    for other in [*(changed(state, path, value) for path in places_in(state)), *twice]:
        again = make_loader(kind)
        try:
            again.load_state_dict(other)
            list(islice(again, 2))
        except ShardmillError:
            continue
        again.state_dict()


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_a_state_of_a_dataset_with_any_value_replaced_is_refused_by_our_errors(tmp_path, value):
    (tmp_path / "a.bin").write_bytes(bytes(range(200)))
    with MemoryMappedDataset(tmp_path, 5, "*.bin", dtype="uint16") as dataset:
        state = dataset.state_dict()
        for path in places_in(state):
            try:
                dataset.load_state_dict(changed(state, path, value))
            except OptionError:
                continue
            assert isinstance(dataset[0]["input_ids"], torch.Tensor)
