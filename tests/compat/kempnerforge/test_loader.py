"""StatefulDataLoader: batches of the sampler's order, with a position behind each of them."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler

from shardmill.compat.kempnerforge import (
    DistributedSampler,
    LoaderConfig,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    Samples,
    StatefulDataLoader,
)
from shardmill.errors import OptionError, StateMismatchError
from shardmill.sampling import Mixture, Permutation
from tests.compat.kempnerforge.counting import Numbers, numbers_of

WORKERS = [
    pytest.param({}, id="none"),
    pytest.param({"num_workers": 1}, id="one-persistent"),
    pytest.param({"num_workers": 2, "persistent_workers": False}, id="two"),
    pytest.param({"num_workers": 2, "prefetch_factor": 5, "pin_memory": True}, id="two-ahead"),
]


def order(size: int, epoch: int = 0, seed: int = 0) -> list[int]:
    return Permutation(size, seed, "epoch", epoch).take(range(size)).tolist()


def batches(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


@pytest.mark.parametrize("config", WORKERS)
def test_epochs_follow_one_another_and_states_go_on(config):
    loader = StatefulDataLoader(Numbers(23), 4, config=config)
    assert len(loader) == 5
    for epoch in range(2):
        assert loader.epoch == epoch
        assert list(map(numbers_of, loader)) == batches(order(23, epoch)[:20], 4)
    assert (loader.epoch, loader.batches_yielded) == (2, 0)
    for number, batch in enumerate(loader):
        assert loader.state_dict()["batches_yielded"] == number + 1
        assert loader.state_dict()["samples"] == (number + 1) * 4
        assert numbers_of(batch) == order(23, 2)[number * 4 : number * 4 + 4]
        if number == 1:
            break
    assert list(map(numbers_of, loader)) == batches(order(23, 2)[8:20], 4)  # goes on
    assert loader.epoch == 3


def test_an_incomplete_last_batch_may_be_kept():
    loader = StatefulDataLoader(Numbers(23), 4, drop_last=False)
    assert len(loader) == 6
    assert list(map(numbers_of, loader)) == batches(order(23), 4)
    ranks = [DistributedSampler(Numbers(23), 3, rank, drop_last=False) for rank in range(3)]
    whole = order(23) + order(23)[:1]
    for rank, sampler in enumerate(ranks):
        loader = StatefulDataLoader(Numbers(23), 3, sampler, drop_last=False)
        assert list(map(numbers_of, loader)) == batches(whole[rank::3], 3)


def test_a_dataset_too_small_for_a_batch_gives_none():
    loader = StatefulDataLoader(Numbers(3), 4)
    assert len(loader) == 0
    assert list(loader) == []
    assert loader.epoch == 1


def test_a_batch_is_one_call_of_the_dataset_and_no_copy(tmp_path):
    np.save(tmp_path / "shard.npy", np.arange(90, dtype="<u2"))

    class Watched(MemoryMappedDataset):
        read: list[dict[str, torch.Tensor]]

        def __getitems__(self, indices):
            samples = super().__getitems__(indices)
            self.read.append(samples.batch)
            assert isinstance(samples, Samples)
            return samples

    data = Watched(tmp_path, 9)
    data.read = []
    found = list(StatefulDataLoader(data, 5))
    assert len(found) == len(data.read) == 2
    assert all(a is b for a, b in zip(found, data.read, strict=True))
    assert sorted(batch["input_ids"][row, 0].item() for batch in found for row in range(5)) == list(
        range(0, 90, 9)
    )


@pytest.mark.slow
def test_workers_may_be_spawned(tmp_path):
    """The dataset travels by path, the sampler stays here."""
    np.save(tmp_path / "shard.npy", np.arange(90, dtype="<u2"))
    data = MixtureDataset([MemoryMappedDataset(tmp_path, 9)] * 2, ["a", "b"])
    sampler = MixtureSampler(data.cumulative_sizes, [1, 1], seed=1)
    config = {"num_workers": 1, "multiprocessing_context": "spawn"}
    found = [batch["labels"].tolist() for batch in StatefulDataLoader(data, 5, sampler, config)]
    sampler.set_epoch(0)
    assert found == [batch["labels"].tolist() for batch in StatefulDataLoader(data, 5, sampler)]
    assert len(found) == 4


def test_a_thousand_batches_cost_a_few_orders_not_a_thousand():
    class Counted(DistributedSampler):
        drawn = 0

        def draw(self, start, count):
            self.drawn += 1
            return super().draw(start, count)

    sampler = Counted(Numbers(8000))
    assert sum(1 for _ in StatefulDataLoader(Numbers(8000), 8, sampler)) == 1000
    assert sampler.drawn == 4


@pytest.mark.parametrize("config", WORKERS)
def test_torchs_random_state_is_left_alone(config):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = StatefulDataLoader(Numbers(12), 4, config=config)
    assert len(list(loader)) == 3
    assert torch.equal(torch.get_rng_state(), before)


# weights


def mixture_run(config, changes: dict[int, list[int]], *, epochs: int = 1) -> list[list[int]]:
    """The indices of every batch of 4 when weights change before some of them."""
    data = MixtureDataset([Numbers(30), Numbers(50)], ["a", "b"])
    sampler = MixtureSampler(data.cumulative_sizes, [1, 1], names=["a", "b"], seed=6)
    loader = StatefulDataLoader(data, 4, sampler, config)
    seen: list[list[int]] = []
    for _ in range(epochs):
        for batch in loader:
            seen.append((batch["i"] + 30 * batch["dataset_idx"]).tolist())
            if len(seen) in changes:
                sampler.update_weights(changes[len(seen)])
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("config", WORKERS)
@pytest.mark.parametrize(
    "changes",
    [{3: [1, 3]}, {1: [1, 0], 2: [0, 1]}, {19: [3, 1]}, {18: [0, 1], 20: [1, 0], 25: [1, 3]}],
    ids=str,
)
def test_new_weights_hold_from_the_next_batch_whatever_was_read_ahead(config, changes):
    phases = [(4 * batch, weights) for batch, weights in changes.items()]
    mixture = Mixture([30, 50], [1, 1], seed=6, names=["a", "b"], phases=phases)
    found = mixture.take(np.arange(160))
    expected = (found.item + 30 * found.source).tolist()
    assert mixture_run(config, changes, epochs=2) == batches(expected, 4)


@pytest.mark.parametrize("config", WORKERS)
def test_a_state_taken_right_after_new_weights_holds_them(config):
    data = MixtureDataset([Numbers(30), Numbers(50)], ["a", "b"])

    def make() -> StatefulDataLoader:
        sampler = MixtureSampler(data.cumulative_sizes, [1, 1], seed=6)
        return StatefulDataLoader(data, 4, sampler, config)

    loader = make()
    under_way = iter(loader)
    for _ in range(3):
        next(under_way)
    loader.sampler.update_weights([1, 0])
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch["i"].tolist() for batch in under_way]
    other = make()
    other.load_state_dict(state)
    resumed = list(other)
    assert [batch["i"].tolist() for batch in resumed] == rest
    assert all(batch["dataset_idx"].tolist() == [0] * 4 for batch in resumed)
    assert len(rest) == 17


class Reads(Numbers):
    """Counts the samples that were read."""

    count = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.count += 1
        return super().__getitem__(index)


def test_new_weights_drop_what_was_read_ahead_and_no_more():
    parts = [Reads(30), Reads(50)]
    data = MixtureDataset(parts, ["a", "b"])
    sampler = MixtureSampler(data.cumulative_sizes, [1, 1])
    loader = StatefulDataLoader(data, 4, sampler)
    before = sum(part.count for part in parts)
    for _ in loader:
        if loader.batches_yielded in (3, 9):
            sampler.update_weights([1, loader.batches_yielded])
    assert sum(part.count for part in parts) - before == 80  # nothing is ahead without workers


def test_an_epoch_is_not_cut_short_when_all_was_drawn_before_new_weights():
    """Also by a DataLoader that takes the first end of its batch sampler for the last word."""

    class Strict:
        def __init__(self, data, draws) -> None:
            self.data, self.draws = data, draws

        def __iter__(self):
            ahead: list[dict[str, torch.Tensor]] = []
            for indices in self.draws:
                ahead.append(self.data.batch(indices))
                if len(ahead) > 5:
                    yield ahead.pop(0)
            yield from ahead

    data = MixtureDataset([Numbers(30), Numbers(50)], ["a", "b"])
    sampler = MixtureSampler(data.cumulative_sizes, [1, 0])
    loader = StatefulDataLoader(data, 4, sampler)
    loader._loader = Strict(data, loader._draws)
    seen = []
    for batch in loader:
        seen.append(batch["dataset_idx"].sum().item())
        if len(seen) == 17:
            sampler.update_weights([0, 1])
    assert seen == [0] * 17 + [4] * 3


# one iteration at a time


@pytest.mark.parametrize("config", WORKERS)
def test_a_new_iterator_ends_the_one_before_aloud(config):
    loader = StatefulDataLoader(Numbers(40), 4, config=config)
    old = iter(loader)
    assert numbers_of(next(old)) == order(40)[:4]
    new = iter(loader)
    assert numbers_of(next(new)) == order(40)[4:8]
    with pytest.raises(OptionError, match="iterated again"):
        next(old)
    assert numbers_of(next(new)) == order(40)[8:12]


@pytest.mark.parametrize("config", WORKERS)
def test_loading_a_state_under_way_ends_the_iteration(config):
    loader = StatefulDataLoader(Numbers(40), 4, config=config)
    state = loader.state_dict()
    under_way = iter(loader)
    next(under_way)
    loader.load_state_dict(state)
    with pytest.raises(OptionError, match="a state was loaded"):
        next(under_way)
    assert numbers_of(next(iter(loader))) == order(40)[:4]


def test_a_sampler_moved_under_way_is_noticed():
    loader = StatefulDataLoader(Numbers(40), 4)
    under_way = iter(loader)
    next(under_way)
    loader.sampler.set_epoch(0)  # names the present one: nothing
    next(under_way)
    loader.set_epoch(3)
    with pytest.raises(OptionError, match=r"moved from \(0, 8\) to \(3, 0\)"):
        next(under_way)
    assert numbers_of(next(iter(loader))) == order(40, 3)[:4]


def test_a_finished_iterator_stays_finished():
    loader = StatefulDataLoader(Numbers(8), 4)
    under_way = iter(loader)
    assert len(list(under_way)) == 2
    assert next(under_way, None) is None
    assert loader.epoch == 1


def test_set_epoch_and_set_skip_of_the_sampler_are_followed():
    loader = StatefulDataLoader(Numbers(40), 4)
    loader.sampler.set_epoch(2)
    loader.sampler.set_skip(12)
    assert loader.batches_yielded == 3
    assert loader.state_dict()["samples"] == 12
    assert numbers_of(next(iter(loader))) == order(40, 2)[12:16]
    assert loader.batches_yielded == 4
    list(loader.sampler)  # somebody looks
    assert numbers_of(next(iter(loader))) == order(40, 2)[:4]


@pytest.mark.parametrize("config", WORKERS)
def test_a_batch_that_failed_is_not_counted_and_comes_again(config):
    loader = StatefulDataLoader(Failing(order(24)[9]), 4, config=config)
    for _ in range(2):
        under_way = iter(loader)
        seen = [numbers_of(next(under_way)) for _ in range(2 - loader.batches_yielded)]
        assert seen in (batches(order(24)[:8], 4), [])
        assert "broken disk" in error_of_next(under_way)
        with pytest.raises(OptionError, match="could not be read"):
            next(under_way)
        assert loader.state_dict()["samples"] == 8
    repaired = StatefulDataLoader(Failing(-1), 4)
    repaired.load_state_dict(loader.state_dict())
    assert list(map(numbers_of, repaired)) == batches(order(24)[8:], 4)


def error_of_next(under_way) -> str:
    """Not pytest.raises: it keeps the error, and with it torch's iterator in a cycle. Collected
    from there its workers never hear of it and are waited for, 5 s each."""
    try:
        next(under_way)
    except RuntimeError as error:
        error.__traceback__ = None
        return str(error)
    return "no error"


class Failing(Numbers):
    def __init__(self, bad: int) -> None:
        super().__init__(24)
        self.bad = bad

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.bad:
            raise RuntimeError("broken disk")
        return super().__getitem__(index)


@pytest.mark.slow
def test_abandoned_loaders_leave_no_processes():
    import multiprocessing

    loader = StatefulDataLoader(
        Numbers(40), 4, config={"num_workers": 2, "persistent_workers": False}
    )
    for _ in loader:
        break
    assert multiprocessing.active_children() == []  # the iterator was let go
    loader = StatefulDataLoader(Numbers(40), 4, config={"num_workers": 2})
    next(iter(loader))
    assert len(multiprocessing.active_children()) == 2
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []


# states


def test_a_state_is_small_and_of_this_data(tmp_path):
    np.save(tmp_path / "shard.npy", np.arange(90, dtype="<u2"))
    data = MemoryMappedDataset(tmp_path, 9)
    loader = StatefulDataLoader(data, 2, DistributedSampler(data, 2, 1, seed=3))
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    identity = {"samples": 10, "fingerprint": data.fingerprint, "seq_len": 9}
    identity["pack_sequences"] = False
    assert state == {
        "version": 1,
        "kind": "shardmill.StatefulDataLoader",
        "epoch": 0,
        "samples": 4,
        "batches_yielded": 1,
        "data": identity,
        "sampler": {
            "version": 1,
            "kind": "shardmill.DistributedSampler",
            "epoch": 0,
            "samples": 4,
            "seed": 3,
            "shuffle": True,
            "num_replicas": 2,
            "rank": 1,
            "data": identity,
        },
    }
    assert len(json.dumps(state)) < 1000


def test_a_state_of_something_else_is_refused_by_name(tmp_path):
    def make(size: int = 40, print_: str = "a", seed: int = 0) -> StatefulDataLoader:
        data = Numbers(size, print_)
        return StatefulDataLoader(data, 4, DistributedSampler(data, seed=seed))

    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    for other, words in [
        (make(size=41), "data.samples: the state has 40, this loader 41"),
        (make(print_="b"), "data.fingerprint: the state has 'a', this loader 'b'"),
        (make(seed=1), "seed: the state has 0, this sampler 1"),
        (StatefulDataLoader(Numbers(40, "a"), 4, MixtureSampler([0, 40], [1])), "kind"),
    ]:
        before = other.state_dict()
        with pytest.raises(StateMismatchError, match=words):
            other.load_state_dict(state)
        assert other.state_dict() == before
    for change, words in [
        ({"version": 2}, "version: the state has 2"),
        ({"kind": "x"}, "kind 'x'"),
        ({"samples": 8}, "samples: the state has 8"),
        ({"epoch": 8}, "epoch: the state has 8"),
        ({"batches_yielded": -1}, "batches_yielded: the state has -1"),
        ({"sampler": None}, "its sampler has None"),
        ({"rest": 1}, "unknown keys"),
    ]:
        with pytest.raises(StateMismatchError, match=words):
            make().load_state_dict({**state, **change})


# arguments


def test_a_config_may_be_an_object_a_mapping_or_nothing():
    @dataclass
    class DataConfig:
        dataset_path: str = "x"
        num_workers: int = 1
        pin_memory: bool = True
        prefetch_factor: int = 3

    def read(config: object) -> LoaderConfig:
        return StatefulDataLoader(Numbers(9), 2, config=config).config

    wanted = LoaderConfig(num_workers=1, pin_memory=True, prefetch_factor=3)
    assert read(DataConfig()) == wanted
    assert read({"num_workers": 1, "pin_memory": True, "prefetch_factor": 3, "seed": 1}) == wanted
    assert read(SimpleNamespace(num_workers=0, prefetch_factor=None)) == LoaderConfig()
    assert read(None) == read({}) == LoaderConfig()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_worker": 2}, "did you mean 'num_workers'"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_workers": 1.0}, "num_workers=1.0"),
        ({"prefetch_factor": 0}, "prefetch_factor=0"),
        ({"pin_memory": 1}, "pin_memory=1: wanted True or False"),
        (17, "config=17"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config, words):
    with pytest.raises(OptionError, match=words):
        StatefulDataLoader(Numbers(9), 2, config=config)


def test_what_has_no_exact_position_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1])

    with pytest.raises(OptionError, match="Stream is not a map-style dataset"):
        StatefulDataLoader(Stream(), 2)
    with pytest.raises(OptionError, match="RandomSampler has no exact position"):
        StatefulDataLoader(Numbers(9), 2, RandomSampler(Numbers(9)))
    with pytest.raises(OptionError, match="for 8 samples, but the dataset has 9"):
        StatefulDataLoader(Numbers(9), 2, DistributedSampler(Numbers(8)))
    with pytest.raises(OptionError, match="batch_size=0"):
        StatefulDataLoader(Numbers(9), 0)


def test_a_state_of_other_tokens_under_the_same_names_is_refused(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        tokens = np.arange(1000, dtype="<u2") + (name == "y")
        np.save(tmp_path / name / "shard.npy", tokens)
    state = StatefulDataLoader(MemoryMappedDataset(tmp_path / "x", 9), 2).state_dict()
    with pytest.raises(StateMismatchError, match=r"data\.fingerprint"):
        StatefulDataLoader(MemoryMappedDataset(tmp_path / "y", 9), 2).load_state_dict(state)
    packed = MemoryMappedDataset(tmp_path / "x", 9, pack_sequences=True, eos_token_id=5)
    with pytest.raises(StateMismatchError, match=r"data\.pack_sequences: the state has False"):
        StatefulDataLoader(packed, 2).load_state_dict(state)


@pytest.mark.parametrize(
    "edit", [{"samples": 10**30}, {"num_replicas": -5}, {"rank": "x"}, {"num_replicas": 1.5}]
)
def test_a_position_that_cannot_be_is_refused(edit):
    loader = StatefulDataLoader(Numbers(100), 4)
    state = json.loads(json.dumps(loader.state_dict()))
    state["sampler"] |= edit
    state |= {key: value for key, value in edit.items() if key in state}
    with pytest.raises(StateMismatchError):
        loader.load_state_dict(state)
