"""Endless streams of epochs, and who reads what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.sampling import InOrder, Order, Permutation, epochs, rank_slice
from shardmill.testing.sampling import (
    assert_epochs_do_not_repeat,
    assert_is_bijection,
    assert_ranks_cover,
)


def test_no_shuffle_is_an_order_too() -> None:
    assert_is_bijection(InOrder(100))
    assert InOrder(100).take([3, 99]).tolist() == [3, 99]
    assert InOrder(100, 5, "x").fingerprint == InOrder(100).fingerprint
    assert InOrder(100).fingerprint != InOrder(101).fingerprint
    assert isinstance(InOrder(1), Order)
    assert isinstance(Permutation(1, 0), Order)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 60), num_epochs=st.integers(1, 30), seed=st.integers(0, 2**64 - 1))
def test_every_item_comes_once_per_epoch(n: int, num_epochs: int, seed: int) -> None:
    assert_epochs_do_not_repeat(lambda epoch: Permutation(n, seed, "epoch", epoch), num_epochs)


def test_positions_of_an_endless_stream_in_any_order() -> None:
    def make_order(epoch: int) -> Permutation:
        return Permutation(7, 1, "epoch", epoch)

    numbers, items = epochs(make_order, [20, 0, 7 * 10**12, 6, 14])
    assert numbers.tolist() == [2, 0, 10**12, 0, 2]
    assert items.tolist() == [
        make_order(2)[6],
        make_order(0)[0],
        make_order(10**12)[0],
        make_order(0)[6],
        make_order(2)[0],
    ]
    assert [array.tolist() for array in epochs(make_order, [])] == [[], []]


def test_epochs_of_nothing_and_before_the_first_are_refused() -> None:
    with pytest.raises(OptionError, match="an order of no items has no epochs"):
        epochs(lambda epoch: Permutation(0, 0, epoch), [0])
    with pytest.raises(IndexError, match="index -1 of"):
        epochs(lambda epoch: Permutation(5, 0, epoch), [-1])


@settings(deadline=None, max_examples=200)
@given(start=st.integers(0, 2**40), size=st.integers(0, 200), world=st.integers(1, 70))
def test_ranks_are_a_disjoint_cover(start: int, size: int, world: int) -> None:
    assert_ranks_cover(start, start + size, world=world)


@settings(deadline=None, max_examples=100)
@given(
    runs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6)), min_size=1)
)
def test_changing_ranks_and_batches_never_changes_which_sample_comes_next(
    runs: list[tuple[int, int, int]],
) -> None:
    """Stopped and resumed with another world and batch size, from one number."""
    consumed, seen = 0, []
    for world, batch_size, steps in runs:
        for _ in range(steps):
            stop = consumed + world * batch_size
            parts = [rank_slice(consumed, stop, rank=rank, world=world) for rank in range(world)]
            assert [len(part) for part in parts] == [batch_size] * world
            seen += [sample for part in parts for sample in part]
            consumed = stop
    assert sorted(seen) == list(range(consumed))


def test_a_rank_reads_consecutive_samples() -> None:
    assert [list(rank_slice(10, 20, rank=rank, world=3)) for rank in range(3)] == [
        [10, 11, 12],
        [13, 14, 15],
        [16, 17, 18, 19],
    ]


@pytest.mark.parametrize(
    ("start", "stop", "rank", "world", "message"),
    [
        (0, 8, 2, 2, "rank=2: wanted 0 to 1, for world=2"),
        (0, 8, -1, 2, "rank=-1: wanted at least 0"),
        (0, 8, 0, 0, "world=0: wanted at least 1"),
        (9, 8, 0, 1, "start=9, stop=8: wanted start <= stop"),
        (-1, 8, 0, 1, "start=-1: wanted at least 0"),
        (0, 2**63, 0, 1, "stop=9,223,372,036,854,775,808: wanted at most"),
    ],
)
def test_a_wrong_rank_or_range_is_refused(
    start: int, stop: int, rank: int, world: int, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        rank_slice(start, stop, rank=rank, world=world)


class _Twice:
    """An order that gives its first item twice."""

    def __len__(self) -> int:
        return 5

    def take(self, indices):
        return np.maximum(np.asarray(indices), 1)

    find = take
    fingerprint = "x"


def test_the_guarantees_detect_violations() -> None:
    with pytest.raises(AssertionError):
        assert_is_bijection(_Twice())
    with pytest.raises(AssertionError):
        assert_epochs_do_not_repeat(lambda epoch: Permutation(20, 0), 2)
    with pytest.raises(AssertionError):
        assert_ranks_cover(
            0, 5, world=2, split=lambda start, stop, rank, world: range(start + rank, stop, 3)
        )
