"""MixtureDataset and MixtureSampler: `sampling.Mixture` on ranks, with weights that may change."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from shardmill.compat.kempnerforge import (
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    collate,
)
from shardmill.errors import OptionError, StateMismatchError
from shardmill.sampling import InOrder, Mixture, Permutation
from shardmill.sampling.mixture import whole_shares
from tests.compat.kempnerforge.counting import Numbers

FEW = settings(max_examples=50, deadline=None)
WEIGHTS = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)
SIZES = (7, 12, 5)
EDGES = [0, 7, 19, 24]
TOTAL = 24


def global_samples(mixture: Mixture, start: int, stop: int) -> list[int]:
    """Indices of global samples start..stop."""
    found = mixture.take(np.arange(start, stop))
    return (np.array(EDGES)[found.source] + found.item).tolist()


def union(samplers: list[MixtureSampler], count: int | None = None) -> list[set[int] | list[int]]:
    """What all ranks drew, turn by turn: each turn sorted, since ranks take turns by chance."""
    drawn = [list(islice(sampler, count)) for sampler in samplers]
    return [sorted(turn) for turn in zip(*drawn, strict=True)]


def turns(samples: list[int], world: int) -> list[list[int]]:
    return [sorted(samples[i : i + world]) for i in range(0, len(samples), world)]


def ranks(world: int, weights: list[int], **options) -> list[MixtureSampler]:
    return [MixtureSampler(EDGES, weights, world, rank, seed=3, **options) for rank in range(world)]


def as_phases(first: list[int], changes: list[tuple[int, list[int]]]) -> Mixture:
    """The mixture that was told of all changes beforehand."""
    plan = [(0, first)]
    for at, new in changes:
        if shares(new) == shares(plan[-1][1]):
            continue  # the weights of the moment change nothing
        if plan[-1][0] == at:
            plan.pop()
        plan.append((at, new))
    return Mixture(SIZES, plan[0][1], seed=3, phases=plan[1:])


def shares(weights: list[int]) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


# the sampler


@FEW
@given(
    weights=WEIGHTS,
    world=st.integers(1, 5),
    epoch=st.integers(0, 4),
    shuffle=st.booleans(),
    temperature=st.sampled_from([1.0, 2.0]),
)
def test_an_epoch_is_a_run_of_the_endless_mixture(weights, world, epoch, shuffle, temperature):
    order = Permutation if shuffle else InOrder
    shares = whole_shares(weights, ["0", "1", "2"], temperature=temperature)
    mixture = Mixture(SIZES, shares, seed=3, order=order)
    samplers = ranks(world, weights, shuffle=shuffle, temperature=temperature)
    for sampler in samplers:
        sampler.set_epoch(epoch)
        assert len(sampler) == TOTAL // world
    start = epoch * TOTAL
    expected = global_samples(mixture, start, start + TOTAL // world * world)
    assert union(samplers) == turns(expected, world)


def test_padding_gives_the_first_samples_of_the_next_epoch():
    mixture = Mixture(SIZES, [1, 1, 1], seed=3)
    samplers = ranks(5, [1, 1, 1], drop_last=False)
    assert union(samplers) == turns(global_samples(mixture, 0, 25), 5)


def test_no_dataset_repeats_before_it_is_exhausted_also_across_epochs():
    [sampler] = ranks(1, [1, 2, 1])
    seen = []
    for epoch in range(9):
        sampler.set_epoch(epoch)
        seen += list(sampler)
    for start, stop in pairwise(EDGES):
        own = [index for index in seen if start <= index < stop]
        size = stop - start
        assert len(own) > 2 * size
        passes = [own[i : i + size] for i in range(0, len(own) - size + 1, size)]
        assert all(sorted(one) == list(range(start, stop)) for one in passes)
        assert passes[0] != passes[1]


def test_every_rank_sees_every_dataset_though_turns_are_periodic():
    for weights in ([1, 1], [1, 2], [2, 1], [3, 1]):
        for world in (2, 3, 4):
            sampler = MixtureSampler([0, 3000, 6000], weights, world, 1)
            share = sum(index < 3000 for index in sampler) / len(sampler)
            assert abs(share - weights[0] / sum(weights)) < 0.05


@FEW
@given(
    first=WEIGHTS,
    changes=st.lists(st.tuples(st.integers(0, 30), WEIGHTS), max_size=3),
    world=st.integers(1, 4),
    resumes=st.sets(st.integers(0, 30), max_size=2),
)
def test_new_weights_hold_from_the_next_sample_on_also_after_a_resume(
    first, changes, world, resumes
):
    """Two epochs, against a mixture that was told of the changes as phases."""
    changes = sorted(changes, key=lambda change: change[0])
    samplers = ranks(world, first)
    seen = []
    turns_of_epoch = TOTAL // world
    told = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        iterators = [iter(sampler) for sampler in samplers]
        for turn in range(turns_of_epoch):
            number = epoch * turns_of_epoch + turn
            for at, new in changes:
                if at == number:
                    for sampler in samplers:
                        sampler.update_weights(new)
                    told.append((epoch * TOTAL + turn * world, new))
            if number in resumes:
                state = json.loads(json.dumps(samplers[0].state_dict()))
                samplers = ranks(world, first)
                for sampler in samplers:
                    sampler.load_state_dict(state)
                iterators = [iter(sampler) for sampler in samplers]
            seen.append(sorted(next(one) for one in iterators))
    mixture = as_phases(first, told)
    expected = []
    for epoch in range(2):
        start = epoch * TOTAL
        samples = global_samples(mixture, start, start + turns_of_epoch * world)
        expected += turns(samples, world)
    assert seen == expected
    at = TOTAL + turns_of_epoch * world
    assert list(samplers[0].counts().values()) == mixture.counts(at).tolist()


@FEW
@given(first=WEIGHTS, later=WEIGHTS, at=st.integers(1, 40), world=st.integers(1, 4))
def test_phases_hold_from_their_sample_on(first, later, at, world):
    samplers = ranks(world, first, phases=[(at, later)])
    mixture = Mixture(SIZES, first, seed=3, phases=[(at, later)])
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        start = epoch * TOTAL
        expected = global_samples(mixture, start, start + TOTAL // world * world)
        assert union(samplers) == turns(expected, world)


def test_an_update_holds_until_the_next_phase_and_a_passed_one_does_not_come_back():
    [sampler] = ranks(1, [1, 1, 1], phases=[(4, [1, 0, 0]), (12, [0, 1, 0])])
    under_way = iter(sampler)
    drawn = [next(under_way) for _ in range(8)]
    sampler.update_weights([0, 0, 1])
    drawn += list(under_way)
    source = np.searchsorted(EDGES, drawn, side="right") - 1
    assert sorted(source[:4].tolist()) in ([0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2])
    assert source[4:].tolist() == [0] * 4 + [2] * 4 + [1] * 12


def test_the_weights_of_the_moment_change_nothing():
    plain, told = ranks(1, [2, 3, 1])[0], ranks(1, [2, 3, 1])[0]
    expected = list(plain)
    under_way = iter(told)
    drawn = [next(under_way) for _ in range(5)]
    told.update_weights([4, 6, 2])
    assert drawn + list(under_way) == expected
    assert told.state_dict()["changed"] is None
    assert told.weights == pytest.approx((2 / 6, 3 / 6, 1 / 6))


def test_temperature_of_an_update_is_kept():
    [sampler] = ranks(1, [1, 1, 1])
    sampler.update_weights([1, 4, 0], temperature=2.0)  # 1 : 2
    assert sampler.weights == pytest.approx((1 / 3, 2 / 3, 0))
    sampler.update_weights([9, 1, 0])  # still at 2: 3 : 1
    assert sampler.weights == pytest.approx((3 / 4, 1 / 4, 0))
    [other] = ranks(1, [1, 1, 1])
    other.load_state_dict(sampler.state_dict())
    other.update_weights([1, 4, 0])
    assert other.weights == pytest.approx((1 / 3, 2 / 3, 0))


def test_samples_before_an_update_are_refused_not_made_up():
    [sampler] = ranks(1, [1, 1, 1])
    under_way = iter(sampler)
    next(under_way)
    sampler.update_weights([1, 2, 3])
    with pytest.raises(OptionError, match=r"update_weights was called.*set_epoch\(1\)"):
        list(sampler)
    sampler.set_epoch(1)
    assert len(list(sampler)) == 24


def test_names_keep_the_order_of_a_dataset_when_another_leaves():
    both = MixtureSampler([0, 7, 19], [0, 1], names=["a", "b"], seed=1)
    alone = MixtureSampler([0, 12], [1], names=["b"], seed=1)
    assert [index - 7 for index in islice(both, 12)] == list(alone)


def test_a_fraction_survives_the_state():
    third = [Fraction(1, 3), Fraction(2, 3), 0]
    [sampler], [other] = ranks(1, [1, 1, 1]), ranks(1, [1, 1, 1])
    sampler.update_weights(third)
    other.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert list(other) == list(sampler)


def test_a_state_is_small_and_says_what_differs():
    [sampler] = ranks(1, [1, 2, 1], phases=[(5, [1, 1, 1])])
    state = sampler.state_dict()
    for options, words in [
        ({"weights": [1, 1, 1], "phases": [(5, [1, 1, 1])]}, r"mixture.weights: .*\[1, 2, 1\]"),
        ({"weights": [1, 2, 1]}, "mixture.phases"),
        ({"weights": [1, 2, 1], "phases": [(5, [1, 1, 1])], "temperature": 2.0}, "temperature"),
        ({"weights": [1, 2, 1], "phases": [(5, [1, 1, 1])], "names": ["x", "y", "z"]}, "names"),
    ]:
        [other] = ranks(1, **options)
        with pytest.raises(StateMismatchError, match=words):
            other.load_state_dict(state)
    many = 200
    wide = MixtureSampler([i * 1000 for i in range(many + 1)], [0.1 + i for i in range(many)])
    assert len(json.dumps(wide.state_dict())) < 1000
    wide.load_state_dict(wide.state_dict())
    moved = MixtureSampler([i * 1001 for i in range(many + 1)], [0.1 + i for i in range(many)])
    with pytest.raises(StateMismatchError, match=r"mixture.sizes: the state has 'sha256:"):
        moved.load_state_dict(wide.state_dict())


@pytest.mark.parametrize(
    "changed",
    [
        {"before": [1, 1]},
        {"before": [1, 1, 2]},
        {"before": [1, 1, 1.0]},
        {"before": [4, -1, 0]},
        {"start": 4},
        {"weights": [1, 1]},
        {"weights": [0, 0, 0]},
        {"weights": ["x", 1, 1]},
        {"weights": [None, 1, 1]},
        {"temperature": 0.0},
        {"phases": [[1]]},
    ],
)
def test_a_damaged_change_of_weights_is_refused(changed):
    [sampler] = ranks(1, [1, 1, 1])
    under_way = iter(sampler)
    for _ in range(3):
        next(under_way)
    sampler.update_weights([1, 2, 3])
    state = sampler.state_dict()
    assert state["changed"]["before"] == [1, 1, 1]
    [other] = ranks(1, [1, 1, 1])
    before = other.state_dict()
    with pytest.raises(StateMismatchError):
        other.load_state_dict({**state, "changed": {**state["changed"], **changed}})
    assert other.state_dict() == before


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([], "empty"),
        ([-1, 1, 1], "non-negative"),
        ([math.nan, 1, 1], "non-negative finite"),
        ([math.inf, 1, 1], "non-negative finite"),
        ([0, 0, 0], "sum to > 0"),
        ([1, 1], "same length"),
        (["1", 1, 1], "non-negative finite numbers"),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_weights_that_make_no_sense_are_refused_and_change_nothing(weights, words, temperature):
    with pytest.raises(OptionError, match=words):
        ranks(1, weights, temperature=temperature)
    with pytest.raises(OptionError, match=words):
        ranks(1, [1, 1, 1], temperature=temperature, phases=[(3, weights)])
    [sampler] = ranks(1, [1, 1, 1], temperature=temperature)
    state = sampler.state_dict()
    with pytest.raises(OptionError, match=words):
        sampler.update_weights(weights)
    assert sampler.state_dict() == state


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, True, "1"])
def test_a_temperature_is_positive(temperature):
    with pytest.raises(OptionError, match="positive"):
        ranks(1, [1, 1, 1], temperature=temperature)
    with pytest.raises(OptionError, match="positive"):
        ranks(1, [1, 1, 1])[0].update_weights([1, 1, 1], temperature)


@pytest.mark.parametrize("edges", [[], [0], [7, 19], [0, 7, 5], [0, 0], [0, 1.5], [-1, 4]])
def test_sizes_begin_with_zero_and_rise(edges):
    with pytest.raises(OptionError, match=r"cumulative_sizes"):
        MixtureSampler(edges, [1] * max(1, len(edges) - 1))


def test_an_empty_dataset_may_stay_at_weight_zero():
    assert sorted(MixtureSampler([0, 0, 3], [0, 1])) == [0, 1, 2]
    with pytest.raises(OptionError, match="is empty, but has a weight"):
        MixtureSampler([0, 0, 3], [1, 1])


# the dataset


def tokens(folder: Path, first: int, count: int) -> Path:
    folder.mkdir()
    np.save(folder / "shard.npy", np.arange(first, first + count, dtype="<u2"))
    return folder


@pytest.fixture
def two(tmp_path) -> tuple[MemoryMappedDataset, MemoryMappedDataset]:
    """5 samples of tokens 0.., 3 samples of tokens 1000.."""
    paths = tokens(tmp_path / "a", 0, 20), tokens(tmp_path / "b", 1000, 12)
    return MemoryMappedDataset(paths[0], 4), MemoryMappedDataset(paths[1], 4)


def test_datasets_lie_behind_one_another_and_a_batch_keeps_its_order(two):
    mixed = MixtureDataset(two, ["a", "b"])
    assert mixed.cumulative_sizes == [0, 5, 8]
    assert mixed.dataset_names == ["a", "b"]
    assert len(mixed) == 8
    batch = mixed.batch([6, 0, 7, 2])
    assert batch["dataset_idx"].tolist() == [1, 0, 1, 0]
    assert batch["dataset_idx"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [
        [1004, 1005, 1006],
        [0, 1, 2],
        [1008, 1009, 1010],
        [8, 9, 10],
    ]
    assert batch["labels"].tolist() == [
        [1005, 1006, 1007],
        [1, 2, 3],
        [1009, 1010, 1011],
        [9, 10, 11],
    ]
    sample = mixed[5]
    assert sample["dataset_idx"].item() == 1
    assert sample["input_ids"].tolist() == [1000, 1001, 1002]


@FEW
@given(indices=st.lists(st.integers(0, 13), min_size=1, max_size=9))
def test_any_datasets_mix_one_sample_at_a_time_or_many(indices):
    """Without `batch`, without `__getitems__`, and an empty one between."""
    mixed = MixtureDataset([Numbers(9), Numbers(0), Numbers(5)], ["a", "none", "b"])
    batch = collate(mixed.__getitems__(indices))
    assert batch["i"].tolist() == [i if i < 9 else i - 9 for i in indices]
    assert batch["dataset_idx"].tolist() == [0 if i < 9 else 2 for i in indices]
    single = [mixed[index] for index in indices]
    assert [one["i"].item() for one in single] == batch["i"].tolist()


def test_a_batch_of_one_dataset_is_taken_as_it_was_read(two):
    class Same:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"x": torch.tensor(index)}

        def batch(self, indices):
            self.given = {"x": torch.tensor(indices)}
            return self.given

    same = Same()
    assert MixtureDataset([same], ["same"]).batch([1, 2])["x"] is same.given["x"]


def test_indices_outside_are_refused(two):
    mixed = MixtureDataset(two, ["a", "b"])
    for index in (-1, 8):
        with pytest.raises(IndexError, match="of 8"):
            mixed[index]
        with pytest.raises(IndexError, match="of 8"):
            mixed.batch([0, index])


def test_samples_of_all_datasets_must_agree(two, tmp_path):
    other = MemoryMappedDataset(tmp_path / "a", 5)
    with pytest.raises(OptionError, match=r"'b' and 'a' cannot be in one batch.*\(4,\)"):
        MixtureDataset([two[0], other], ["a", "b"])
    packed = MemoryMappedDataset(tmp_path / "a", 4, pack_sequences=True, eos_token_id=7)
    with pytest.raises(OptionError, match="doc_ids"):
        MixtureDataset([two[0], packed], ["a", "b"])
    with pytest.raises(OptionError, match="dicts of tensors"):
        MixtureDataset([TensorDataset(torch.zeros(3))], ["a"])
    with pytest.raises(OptionError, match="already have 'dataset_idx'"):
        MixtureDataset([MixtureDataset(two, ["a", "b"])], ["nested"])


def test_datasets_and_names_belong_together(two):
    with pytest.raises(OptionError, match="At least one"):
        MixtureDataset([], [])
    with pytest.raises(OptionError, match="same length"):
        MixtureDataset(two, ["a"])
    with pytest.raises(OptionError, match="needs a different name"):
        MixtureDataset(two, ["a", "a"])


def test_states_and_fingerprints_are_of_the_parts(two, tmp_path):
    mixed = MixtureDataset(two, ["a", "b"])
    state = mixed.state_dict()
    assert state == {
        "dataset_0": {"epoch": 0, "total_samples": 5},
        "dataset_1": {"epoch": 0, "total_samples": 3},
    }
    mixed.load_state_dict(state)
    with pytest.raises(OptionError, match="dataset_1"):
        mixed.load_state_dict({"dataset_0": state["dataset_0"]})
    same = MixtureDataset(two, ["a", "b"]).fingerprint
    assert mixed.fingerprint == same
    assert MixtureDataset(two[::-1], ["b", "a"]).fingerprint != same
    assert MixtureDataset(two, ["a", "c"]).fingerprint != same
    short = [MemoryMappedDataset(tmp_path / name, 2) for name in "ab"]
    assert MixtureDataset(short, ["a", "b"]).fingerprint != same
    mixed.close()
    mixed.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dataset_and_sampler_work_under_a_plain_dataloader(two, num_workers):
    mixed = MixtureDataset(two, ["a", "b"])
    sampler = MixtureSampler(mixed.cumulative_sizes, [1, 3], seed=2)
    loader = DataLoader(
        mixed, batch_size=4, sampler=sampler, collate_fn=collate, num_workers=num_workers
    )
    batches = list(loader)
    assert [batch["dataset_idx"].sum().item() for batch in batches] == [3, 3]
    assert batches[0]["input_ids"].shape == (4, 3)


@pytest.mark.slow
def test_weights_that_change_every_few_samples_starve_nobody() -> None:
    sampler = MixtureSampler([0, 10**6, 2 * 10**6], [0.1, 0.9], 1, 0)
    drawn = iter(sampler)
    for step in range(400):
        small = 0.1 * (1 + 0.001 * (step % 10))
        sampler.update_weights([small, 1 - small])
        for _ in range(8):
            next(drawn)
    assert sampler.counts() == {"0": 321, "1": 2879}  # exact: 321.44


@pytest.mark.parametrize("start", [10.9, "5", True, float("nan"), None])
def test_a_phase_begins_at_a_whole_number(start: Any) -> None:
    with pytest.raises(OptionError, match="phase"):
        MixtureSampler([0, 10, 20], [1, 1], 1, 0, phases=[(start, [0, 1])])


@pytest.mark.parametrize("phases", [None, [5], [(5,)], [(5, None)], {5: [1, 1]}])
def test_phases_that_are_no_pairs_are_refused(phases: Any) -> None:
    with pytest.raises(OptionError, match="phases"):
        MixtureSampler([0, 10, 20], [1, 1], 1, 0, phases=phases)


@pytest.mark.parametrize("weights", [None, 5])
def test_weights_that_are_no_list_are_refused(weights: Any) -> None:
    with pytest.raises(OptionError, match="weights"):
        MixtureSampler([0, 10, 20], weights, 1, 0)
    with pytest.raises(OptionError, match="weights"):
        MixtureSampler([0, 10, 20], [1, 1], 1, 0).update_weights(weights)
