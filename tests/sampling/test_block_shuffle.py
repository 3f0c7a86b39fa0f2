"""BlockShuffle: a bijection that reads whole blocks, and how well it mixes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.sampling import BlockShuffle, Permutation, items_per_block
from shardmill.testing.sampling import assert_epochs_do_not_repeat, assert_is_bijection

SEEDS = st.integers(0, 2**64 - 1)


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(0, 1500),
    block_items=st.integers(1, 40) | st.integers(1, 2000),
    buffer_blocks=st.integers(1, 20),
    seed=SEEDS,
)
def test_every_item_comes_once(n: int, block_items: int, buffer_blocks: int, seed: int) -> None:
    order = BlockShuffle(n, seed, block_items=block_items, buffer_blocks=buffer_blocks)
    assert_is_bijection(order)


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(20_001, 2**63 - 1) | st.just(2**63 - 1),
    block_items=st.sampled_from([1, 7, 2048, 10**9, 2**62, 2**70]),
    buffer_blocks=st.sampled_from([1, 2, 16, 2**70]),
    seed=SEEDS,
)
def test_a_huge_order_has_an_exact_inverse(
    n: int, block_items: int, buffer_blocks: int, seed: int
) -> None:
    order = BlockShuffle(n, seed, "x", block_items=block_items, buffer_blocks=buffer_blocks)
    assert_is_bijection(order, num_scattered=300)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 400),
    block_items=st.integers(1, 30),
    buffer_blocks=st.integers(1, 5),
    seed=SEEDS,
)
def test_a_group_reads_its_own_blocks_and_nothing_else(
    n: int, block_items: int, buffer_blocks: int, seed: int
) -> None:
    order = BlockShuffle(n, seed, block_items=block_items, buffer_blocks=buffer_blocks)
    items, group = order.take(np.arange(n)), order.group_of(np.arange(n))
    assert group.tolist() == sorted(group.tolist())
    assert set(group.tolist()) == set(range(order.num_groups))
    num_blocks = 0
    for number in range(order.num_groups):
        ranges = order.ranges(number).tolist()
        assert len(ranges) <= buffer_blocks
        assert all(start % min(block_items, n) == 0 for start, _ in ranges)
        read = sorted(item for start, stop in ranges for item in range(start, stop))
        assert sorted(items[group == number].tolist()) == read
        num_blocks += len(ranges)
    assert num_blocks == -(-n // block_items)


def test_scattered_and_neighbouring_indices_get_the_same_items() -> None:
    order = BlockShuffle(100_003, 1, block_items=64, buffer_blocks=4)
    whole = order.take(np.arange(100_003))
    scattered = np.random.default_rng(0).permutation(100_003)
    assert np.array_equal(order.take(scattered), whole[scattered])
    assert np.array_equal(order.find(whole[scattered]), scattered)
    assert [order[index] for index in (0, 50_000, 100_002)] == whole[[0, 50_000, 100_002]].tolist()


def test_the_numbers_never_change() -> None:
    small = BlockShuffle(20, 7, "x", block_items=4, buffer_blocks=2)
    assert small.take(range(20)).tolist() == [
        9, 16, 17, 11, 19, 18, 8, 10, 5, 6, 7, 15, 12, 13, 4, 14, 1, 2, 0, 3
    ]  # fmt: skip
    large = BlockShuffle(10**12, 7, block_items=2048)
    assert large.take([0, 1, 2, 10**12 - 1]).tolist() == [
        525161472121, 346214067225, 525161473400, 557246494080
    ]  # fmt: skip


def test_every_epoch_has_its_own_order() -> None:
    assert_epochs_do_not_repeat(
        lambda epoch: BlockShuffle(500, 3, "epoch", epoch, block_items=32, buffer_blocks=4), 20
    )


def test_the_fingerprint_covers_everything_that_decides_the_order() -> None:
    def fingerprint(n=100, seed=0, path=("a",), block_items=8, buffer_blocks=2):
        options = {"block_items": block_items, "buffer_blocks": buffer_blocks}
        return BlockShuffle(n, seed, *path, **options).fingerprint

    others = [
        fingerprint(n=101), fingerprint(seed=1), fingerprint(path=("b",)),
        fingerprint(block_items=9), fingerprint(buffer_blocks=3),
        Permutation(100, 0, "a").fingerprint,
    ]  # fmt: skip
    assert fingerprint() == fingerprint()
    assert len({fingerprint(), *others}) == 7


def test_it_survives_pickling() -> None:
    order = BlockShuffle(1000, 3, block_items=10, buffer_blocks=4)
    expected = order.take(range(1000)).tolist()
    assert pickle.loads(pickle.dumps(order)).take(range(1000)).tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_items": 0}, "block_items=0: wanted at least 1"),
        ({"block_items": 2.0}, "block_items=2.0.*: wanted a whole number"),
        ({"block_items": 4, "buffer_blocks": 0}, "buffer_blocks=0: wanted at least 1"),
    ],
)
def test_a_wrong_size_is_refused_by_name(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BlockShuffle(10, 0, **options)


@pytest.mark.parametrize("group", [-1, 4])
def test_a_group_outside_is_refused(group: int) -> None:
    with pytest.raises(IndexError, match=f"index {group} of 4"):
        BlockShuffle(100, 0, block_items=10, buffer_blocks=3).ranges(group)


def test_a_block_holds_four_mebibytes_of_items_and_at_least_one() -> None:
    assert items_per_block(2048) == 2048
    assert items_per_block(2050) == 2046
    assert items_per_block(10**9) == 1
    assert items_per_block(100, block_bytes=1000) == 10


def test_a_batch_holds_as_many_neighbours_as_the_buffer_size_says() -> None:
    """Two items of a batch are of the same block once in `buffer_blocks` pairs, and inside a group
    neighbours are as far apart as in a true shuffle."""
    order = BlockShuffle(64 * 4096, 2, block_items=256, buffer_blocks=16)
    items = order.take(np.arange(64 * 4096)).reshape(-1, 32)
    block = items // 256
    same = np.mean([(block == np.roll(block, lag, axis=1)).mean() for lag in range(1, 32)])
    assert 0.9 / 16 < same < 1.1 / 16
    place = order.find(np.arange(4096 * 64)).reshape(-1, 256)  # where the items of a block come
    apart = np.abs(np.diff(place, axis=1))
    assert apart.max() < 16 * 256
    assert 0.95 / 3 < apart.mean() / (16 * 256) < 1.05 / 3
