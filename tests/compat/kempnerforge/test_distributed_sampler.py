"""DistributedSampler: strided by rank over one global order, at any size, from any position."""

from __future__ import annotations

import tracemalloc
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardmill.compat.kempnerforge import DistributedSampler
from shardmill.errors import OptionError, StateMismatchError
from shardmill.sampling import Permutation
from tests.compat.kempnerforge.counting import Numbers, numbers_of

FEW = settings(max_examples=60, deadline=None)


def global_order(size: int, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    if not shuffle:
        return list(range(size))
    return Permutation(size, seed, "epoch", epoch).take(range(size)).tolist()


@FEW
@given(
    size=st.integers(0, 60),
    world=st.integers(1, 9),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_ranks_are_strides_of_the_epochs_order(size, world, seed, epoch, shuffle, drop_last):
    order = global_order(size, seed, epoch, shuffle)
    if drop_last:
        dealt = order[: size // world * world]
    else:
        dealt = [order[i % size] for i in range(-(-size // world) * world)]
    for rank in range(world):
        sampler = DistributedSampler(Numbers(size), world, rank, shuffle, seed, drop_last)
        sampler.set_epoch(epoch)
        assert list(sampler) == dealt[rank::world]
        assert len(sampler) == sampler.num_samples == len(dealt) // world
        assert sampler.total_size == len(dealt)


def test_five_samples_on_two_ranks_by_hand():
    def sampler(rank: int, **options: bool) -> DistributedSampler:
        return DistributedSampler(Numbers(5), 2, rank, shuffle=False, **options)

    assert [list(sampler(rank)) for rank in (0, 1)] == [[0, 2], [1, 3]]
    padded = [list(sampler(rank, drop_last=False)) for rank in (0, 1)]
    assert padded == [[0, 2, 4], [1, 3, 0]]


def test_chunks_are_joined_without_a_seam():
    sampler = DistributedSampler(Numbers(10_007), 2, 1, seed=3)
    assert list(sampler) == global_order(10_007, 3, 0)[1:10_006:2]


def test_the_order_is_the_same_for_ever():
    sampler = DistributedSampler(Numbers(12), 2, 1, seed=7)
    assert list(sampler) == [3, 8, 2, 5, 4, 7]
    sampler.set_epoch(1)
    assert list(sampler) == [6, 2, 4, 11, 8, 0]


def test_a_billion_samples_need_no_memory_and_the_end_is_as_near_as_the_start():
    class Huge:
        def __len__(self) -> int:
            return 10**9

    sampler = DistributedSampler(Huge(), 8, 3, seed=1)
    order = Permutation(10**9, 1, "epoch", 0)
    tracemalloc.start()
    assert list(islice(sampler, 3)) == [order[3], order[11], order[19]]
    sampler.set_skip(125_000_000 - 2)
    # no list(sampler): it would first make room for len(sampler) items
    assert [index for index in sampler] == [order[10**9 - 13], order[10**9 - 5]]  # noqa: C416
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert len(sampler) == 125_000_000


def test_a_skip_holds_once_and_survives_set_epoch():
    sampler = DistributedSampler(Numbers(30), 3, 1, seed=2)
    whole = list(sampler)
    sampler.set_skip(4)
    assert list(sampler) == whole[4:]
    assert list(sampler) == whole
    sampler.set_skip(4)
    sampler.set_epoch(1)
    assert list(sampler) == global_order(30, 2, 1)[1::3][4:]
    sampler.set_skip(100)
    assert list(sampler) == []


@FEW
@given(
    size=st.integers(1, 80),
    worlds=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    drawn=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    drop_last=st.booleans(),
)
def test_any_number_of_ranks_goes_on_in_the_same_order(size, worlds, drawn, drop_last):
    order = global_order(size, 5, 2)
    state = None
    consumed = 0
    for world, count in zip(worlds, [*drawn, None], strict=False):
        count = None if world is worlds[-1] else count
        dealt = []
        states = []
        for rank in range(world):
            sampler = DistributedSampler(Numbers(size), world, rank, seed=5, drop_last=drop_last)
            sampler.set_epoch(2)
            if state is not None:
                sampler.load_state_dict(state)
                assert {**sampler.state_dict(), "rank": 0, "num_replicas": 0} == {
                    **state,
                    "rank": 0,
                    "num_replicas": 0,
                }
            dealt.append(list(islice(sampler, count)))
            states.append({**sampler.state_dict(), "rank": 0})
        assert all(one == states[0] for one in states)
        assert len({len(one) for one in dealt}) == 1
        union = [index for step in zip(*dealt, strict=True) for index in step]
        expected = order[consumed : consumed + len(union)]
        padding = len(union) - len(expected)
        assert union == expected + [order[i % size] for i in range(padding)]
        assert padding == 0 or not drop_last
        state, consumed = states[0], consumed + len(union)
    left = size - consumed
    assert left < worlds[-1] if drop_last else left <= 0


def test_a_state_under_way_counts_what_was_drawn():
    sampler = DistributedSampler(Numbers(20), 2, 0)
    under_way = iter(sampler)
    assert sampler.state_dict()["samples"] == 0
    first = [next(under_way) for _ in range(3)]
    state = sampler.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 6)
    rest = list(under_way)
    other = DistributedSampler(Numbers(20), 2, 0)
    other.load_state_dict(state)
    assert other.state_dict() == state  # saving right after loading loses nothing
    other.set_epoch(0)  # what training loops do
    assert list(other) == rest
    assert first + rest == global_order(20, 0, 0)[::2]


def test_a_finished_epoch_resumes_as_finished_and_the_next_is_whole():
    sampler = DistributedSampler(Numbers(9), 3, 0)
    list(sampler)
    other = DistributedSampler(Numbers(9), 3, 0)
    other.load_state_dict(sampler.state_dict())
    other.set_epoch(1)
    assert list(other) == global_order(9, 0, 1)[::3]
    other.load_state_dict(sampler.state_dict())
    assert list(other) == []


def test_an_iterator_that_was_overtaken_says_so():
    sampler = DistributedSampler(Numbers(9))
    old = iter(sampler)
    next(old)
    new = iter(sampler)
    next(new)
    with pytest.raises(OptionError, match="a newer one was made"):
        next(old)
    sampler.set_epoch(1)
    with pytest.raises(OptionError, match="set_epoch"):
        next(new)


def test_a_state_of_something_else_is_refused_by_name():
    state = DistributedSampler(Numbers(20, "a"), 2, 0, seed=1).state_dict()

    def refused(sampler: DistributedSampler, changed: dict, words: str) -> None:
        before = sampler.state_dict()
        with pytest.raises(StateMismatchError, match=words):
            sampler.load_state_dict({**state, **changed})
        assert sampler.state_dict() == before

    own = DistributedSampler(Numbers(20, "a"), seed=1)
    refused(
        DistributedSampler(Numbers(20, "a"), seed=2), {}, "seed: the state has 1, this sampler 2"
    )
    refused(
        DistributedSampler(Numbers(20, "b"), seed=1), {}, r"data.fingerprint: the state has 'a'"
    )
    refused(DistributedSampler(Numbers(21, "a"), seed=1), {}, r"data.samples: the state has 20")
    refused(DistributedSampler(Numbers(20, "a"), None, None, False, 1), {}, "shuffle")
    refused(own, {"version": 2}, "version: the state has 2, which a later shardmill wrote")
    refused(own, {"kind": "shardmill.MixtureSampler"}, "kind 'shardmill.MixtureSampler'")
    refused(own, {"samples": -1}, "samples: the state has -1")
    refused(own, {"epoch": 1.0}, "epoch: the state has 1.0")
    refused(own, {"epoch": True}, "epoch: the state has True")
    refused(own, {"more": 1}, r"unknown keys \[\'more\'\]")
    with pytest.raises(StateMismatchError, match=r"lacks \[\'samples\'\]"):
        own.load_state_dict({key: value for key, value in state.items() if key != "samples"})
    with pytest.raises(StateMismatchError, match="found a list"):
        own.load_state_dict([state])


@pytest.mark.parametrize(
    ("world", "rank", "words"),
    [
        (0, 0, "num_replicas=0"),
        (2, 2, "rank=2: wanted 0 to 1"),
        (2, -1, "rank=-1"),
        (1.5, 0, "1.5"),
    ],
)
def test_ranks_that_cannot_be_are_refused(world, rank, words):
    with pytest.raises(OptionError, match=words):
        DistributedSampler(Numbers(5), world, rank)


def test_epochs_and_skips_are_whole_numbers():
    sampler = DistributedSampler(Numbers(5))
    for change in (sampler.set_epoch, sampler.set_skip):
        with pytest.raises(OptionError):
            change(-1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_works_under_a_plain_dataloader(num_workers):
    dealt = []
    for rank in range(2):
        sampler = DistributedSampler(Numbers(23), 2, rank, seed=4)
        loader = DataLoader(
            Numbers(23), batch_size=3, sampler=sampler, num_workers=num_workers, drop_last=False
        )
        sampler.set_epoch(1)
        assert len(loader) == 4
        dealt.append([index for batch in loader for index in numbers_of(batch)])
    assert dealt == [global_order(23, 4, 1)[rank:22:2] for rank in range(2)]


@pytest.mark.slow
def test_ranks_come_from_torch_distributed_when_it_runs(tmp_path):
    from torch import multiprocessing

    multiprocessing.spawn(_of_its_own_rank, args=(2, str(tmp_path)), nprocs=2)
    dealt = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert dealt == [global_order(11, 0, 0)[rank:10:2] for rank in range(2)]


def _of_its_own_rank(rank: int, world: int, folder: str) -> None:
    from torch import distributed

    store = distributed.FileStore(f"{folder}/store", world)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    sampler = DistributedSampler(Numbers(11))
    torch.save(list(sampler), f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
