"""Elastic exact resume: whoever reads, the next sample of the global order comes next."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardmill.compat.kempnerforge import (
    DistributedSampler,
    MixtureDataset,
    MixtureSampler,
    StatefulDataLoader,
    collate,
)
from shardmill.sampling import Mixture, Permutation
from tests.compat.kempnerforge.counting import Numbers, numbers_of, one_step

FEW = settings(max_examples=40, deadline=None)


@dataclass(frozen=True)
class Run:
    """A stretch of training between two checkpoints."""

    world: int
    batch_size: int
    steps: int
    num_workers: int = 0

    @property
    def step(self) -> int:
        return self.world * self.batch_size


def runs(most_workers: int = 0) -> st.SearchStrategy[list[Run]]:
    one = st.builds(
        *(Run, st.integers(1, 5), st.integers(1, 5), st.integers(0, 12)),
        num_workers=st.integers(0, most_workers),
    )
    return st.lists(one, min_size=1, max_size=4)


def saved(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


def order(size: int, epoch: int, seed: int = 0) -> list[int]:
    return Permutation(size, seed, "epoch", epoch).take(range(size)).tolist()


def go_through(plan: list[Run], size: int) -> None:
    """Run after run, each from the state of the one before, against the plain order."""
    state, epoch, consumed = None, 0, 0
    for run in plan:
        loaders = [
            StatefulDataLoader(
                Numbers(size),
                run.batch_size,
                DistributedSampler(Numbers(size), run.world, rank),
                {"num_workers": run.num_workers},
            )
            for rank in range(run.world)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
                again = loader.state_dict()
                assert (again["epoch"], again["samples"]) == (epoch, consumed)
                assert again["batches_yielded"] == state["batches_yielded"]
        iterators = [iter(loader) for loader in loaders]
        for _ in range(run.steps):
            if size - consumed < run.step:  # the epoch ends on all ranks
                assert all(next(one, None) is None for one in iterators)
                epoch, consumed = epoch + 1, 0
                iterators = [iter(loader) for loader in loaders]
                if size < run.step:
                    continue
            expected = order(size, epoch)[consumed : consumed + run.step]
            assert one_step(iterators) == sorted(expected)
            consumed += run.step
        states = [saved(loader.state_dict()) for loader in loaders]
        for one in states:
            one["sampler"]["rank"] = 0
            assert one == states[0]
        state = states[-1]


@FEW
@given(size=st.integers(1, 90), plan=runs())
def test_the_union_of_all_ranks_continues_the_global_order(size, plan):
    go_through(plan, size)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(size=st.integers(20, 60), plan=runs(most_workers=2))
def test_so_it_does_with_any_number_of_workers(size, plan):
    go_through([Run(r.world % 2 + 1, r.batch_size, r.steps, r.num_workers) for r in plan], size)


def test_eight_ranks_of_four_then_three_of_five_then_one_with_workers():
    go_through([Run(8, 4, 9), Run(3, 5, 7), Run(1, 6, 30, num_workers=2), Run(2, 2, 3)], 1000)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_resumes_in_one_epoch(num_workers):
    """The second is counted from the start of the epoch, not from the first."""

    def make() -> StatefulDataLoader:
        return StatefulDataLoader(Numbers(100), 5, config={"num_workers": num_workers})

    state, seen = None, []
    for steps in (3, 4, 100):
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
            loader.load_state_dict(saved(loader.state_dict()))  # right after loading
        for step, batch in enumerate(loader):
            seen += numbers_of(batch)
            if step == steps - 1:
                break
        state = saved(loader.state_dict())
    assert seen == order(100, 0)
    assert state["epoch"] == 1


# mixtures: weights change at any step, resumed or not, by phases or by calls

SIZES, EDGES, TOTAL = (11, 17, 6), [0, 11, 28, 34], 34
WEIGHTS = st.sampled_from([[1, 1, 1], [3, 1, 0], [0, 2, 5], [0, 0, 1], [7, 2, 1]])


def mixture_loader(run: Run, rank: int, phases: list) -> StatefulDataLoader:
    data = MixtureDataset([Numbers(size) for size in SIZES], ["a", "b", "c"])
    sampler = MixtureSampler(
        data.cumulative_sizes,
        [2, 1, 1],
        run.world,
        rank,
        seed=9,
        names=data.dataset_names,
        phases=phases,
    )
    return StatefulDataLoader(data, run.batch_size, sampler, {"num_workers": run.num_workers})


def mixture_through(plan: list[Run], changes: list[tuple[int, list[int]]], phases: list) -> None:
    """`changes`: (before the n-th step of all runs, weights). Epochs leave their rest out."""
    told = [(0, [2, 1, 1]), *phases]
    state, at, number = None, 0, 0
    for run in plan:
        if run.step > TOTAL:
            continue
        loaders = [mixture_loader(run, rank, phases) for rank in range(run.world)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(run.steps):
            if TOTAL - at % TOTAL < run.step:
                assert all(next(one, None) is None for one in iterators)
                at = (at // TOTAL + 1) * TOTAL
                iterators = [iter(loader) for loader in loaders]
            for when, weights in changes:
                if when == number:
                    for loader in loaders:
                        loader.sampler.update_weights(weights)
                    told = changed(told, at, weights)
            batches = [next(one) for one in iterators]
            seen = [
                EDGES[source] + item
                for batch in batches
                for source, item in zip(
                    batch["dataset_idx"].tolist(), batch["i"].tolist(), strict=True
                )
            ]
            mixture = Mixture(SIZES, told[0][1], seed=9, names=["a", "b", "c"], phases=told[1:])
            found = mixture.take(np.arange(at, at + run.step))
            assert sorted(seen) == sorted((np.array(EDGES)[found.source] + found.item).tolist())
            at, number = at + run.step, number + 1
            if at % TOTAL == 0:  # the last batch of an epoch: its end is another call
                assert all(next(one, None) is None for one in iterators)
                iterators = [iter(loader) for loader in loaders]
        state = saved(loaders[-1].state_dict())


def changed(told: list, at: int, weights: list[int]) -> list:
    """The plan with these weights from sample `at` on, until the next phase."""
    before = [phase for phase in told if phase[0] <= at]
    later = [phase for phase in told if phase[0] > at]
    if same(before[-1][1], weights):
        return told
    return [phase for phase in before if phase[0] < at] + [(at, weights)] + later


def same(one: list[int], other: list[int]) -> bool:
    return [w * sum(other) for w in one] == [w * sum(one) for w in other]


CHANGES = st.lists(st.tuples(st.integers(0, 25), WEIGHTS), max_size=3).map(
    lambda changes: sorted(changes, key=lambda change: change[0])
)
PHASES = st.dictionaries(st.integers(1, 120), WEIGHTS, max_size=2).map(
    lambda phases: sorted(phases.items())
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(plan=runs(), changes=CHANGES, phases=PHASES)
def test_mixtures_resume_exactly_through_changes_of_weights(plan, changes, phases):
    mixture_through(plan, changes, phases)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(plan=runs(most_workers=2), changes=CHANGES, phases=PHASES)
def test_mixtures_so_do_with_any_number_of_workers(plan, changes, phases):
    plan = [Run(r.world % 2 + 1, r.batch_size, r.steps, r.num_workers) for r in plan]
    mixture_through(plan, changes, phases)


# outer loops that are not ours


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["distributed", "mixture"])
def test_torchdatas_loader_saves_and_loads_our_samplers(num_workers, kind):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = MixtureDataset([Numbers(size) for size in SIZES], ["a", "b", "c"])
    make: Callable[[], Any] = {
        "distributed": lambda: DistributedSampler(data, 2, 1, seed=4),
        "mixture": lambda: MixtureSampler(EDGES, [1, 2, 1], 2, 1, seed=4),
    }[kind]

    def loader() -> Any:
        return stateful.StatefulDataLoader(
            data, batch_size=3, sampler=make(), num_workers=num_workers, collate_fn=collate
        )

    def seen(batch: dict[str, torch.Tensor]) -> list[int]:
        edges = torch.tensor(EDGES)
        return (edges[batch["dataset_idx"]] + batch["i"]).tolist()

    plain = DataLoader(data, batch_size=3, sampler=make(), collate_fn=collate)
    expected = [seen(batch) for batch in plain]
    assert len(expected) == 6
    whole = loader()
    under_way = iter(whole)
    found = []
    for _ in range(2):
        found.append(seen(next(under_way)))
    state = whole.state_dict()
    del under_way, whole
    other = loader()
    other.load_state_dict(state)
    for batch in other:
        found.append(seen(batch))
        if len(found) == 4:
            break
    third = loader()
    third.load_state_dict(other.state_dict())
    found += [seen(batch) for batch in third]
    assert found == expected
