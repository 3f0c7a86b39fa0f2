"""Guarantees of orders and ranks as tests.

Expected values come from plain sets and integer arithmetic, never from the code under test. Small
orders are checked completely, large ones at both ends and at scattered indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from shardmill.sampling import Order, epochs, rank_slice
from shardmill.sampling.order import Indices

WHOLE = 20_000
"""Orders of up to this many items are checked at every index."""


class RankSlice(Protocol):
    """The samples of `start..stop` that one rank reads, as `rank_slice` gives them."""

    def __call__(self, start: int, stop: int, /, *, rank: int, world: int) -> Sequence[int]: ...


def assert_is_bijection(order: Order, *, num_scattered: int = 4096) -> None:
    """Every item comes once, `find` undoes `take` and `take` undoes `find`, one at a time or many,
    in any order; an index outside is an IndexError."""
    indices = _some_indices(len(order), num_scattered)
    items = order.take(indices)
    assert items.dtype == np.int64
    assert items.shape == indices.shape
    if len(order) <= WHOLE:
        assert sorted(items.tolist()) == list(range(len(order)))
    assert len(np.unique(items)) == len(indices)
    assert ((items >= 0) & (items < len(order))).all()
    np.testing.assert_array_equal(order.find(items), indices)
    np.testing.assert_array_equal(order.take(order.find(indices)), indices)
    np.testing.assert_array_equal(order.take(indices[::-1]), items[::-1])
    for at in {0, len(indices) // 2, len(indices) - 1} if len(indices) else ():
        assert order.take(indices[at : at + 1]).tolist() == [items[at]]
    for outside in (-1, len(order)):
        if outside < 2**63:
            _assert_refused(order.take, outside)
            _assert_refused(order.find, outside)


def assert_epochs_do_not_repeat(make_order: Callable[[int], Order], num_epochs: int) -> None:
    """In the endless stream every item comes once per epoch, and every epoch has its own order
    (checked from 20 items on: fewer may repeat an order by chance)."""
    num_items = len(make_order(0))
    numbers, items = epochs(make_order, np.arange(num_epochs * num_items))
    assert numbers.tolist() == np.repeat(np.arange(num_epochs), num_items).tolist()
    rows = items.reshape(num_epochs, num_items)
    assert (np.sort(rows, axis=1) == np.arange(num_items)).all()
    if num_items >= 20:
        assert len({row.tobytes() for row in rows}) == num_epochs


def assert_ranks_cover(start: int, stop: int, *, world: int, split: RankSlice = rank_slice) -> None:
    """Together the ranks read every sample of `start..stop` once; their numbers differ by at most
    one."""
    parts = [list(split(start, stop, rank=rank, world=world)) for rank in range(world)]
    assert sorted(sample for part in parts for sample in part) == list(range(start, stop))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


def _assert_refused(call: Callable[[list[int]], object], index: int) -> None:
    try:
        call([index])
    except IndexError:
        return
    raise AssertionError(f"index {index} was accepted")


def _some_indices(num_items: int, num_scattered: int) -> Indices:
    if num_items <= WHOLE:
        return np.arange(num_items)
    step = max(1, num_items // num_scattered)
    scattered = np.arange(num_scattered, dtype=np.int64) * step
    ends = [*range(64), *range(num_items - 64, num_items)]
    return np.unique(np.concatenate([scattered[scattered < num_items], np.array(ends, np.int64)]))
