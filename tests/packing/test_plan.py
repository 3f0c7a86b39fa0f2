"""Assignments in CSR form, and the order of a shuffle."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.packing import BinAssignment, plan_of_bins
from shardmill.packing.packers import shuffled


def test_bins_are_views_of_one_array() -> None:
    bins = BinAssignment.from_bins([[2, 0], [], [1]])
    assert (bins.num_bins, bins.num_items, len(bins)) == (3, 3, 3)
    assert bins.offsets.dtype == np.int64
    assert bins.offsets.tolist() == [0, 2, 2, 3]
    assert bins.indices.dtype == np.int32
    assert [bins.bin_indices(i).tolist() for i in range(3)] == [[2, 0], [], [1]]
    assert np.shares_memory(bins.bin_indices(0), bins.indices)


@pytest.mark.parametrize("bin_id", [-1, 1])
def test_a_missing_bin_is_an_index_error(bin_id) -> None:
    with pytest.raises(IndexError, match="bin_id out of range"):
        BinAssignment.from_bins([[0]]).bin_indices(bin_id)


@pytest.mark.parametrize(
    ("bins", "num_items", "message"),
    [
        ([[0, 3]], 3, "Sequence index out of range: 3, wanted 0..2"),
        ([[-1]], 1, "Sequence index out of range: -1"),
        ([[0], [0]], 2, "item 0 is in 2 bins"),
        ([[0]], 2, "item 1 is in 0 bins"),
        ([[0, 2]], None, "Sequence index out of range: 2, wanted 0..1"),
    ],
)
def test_bins_that_are_not_a_partition_are_refused(bins, num_items, message) -> None:
    with pytest.raises(OptionError, match=message):
        BinAssignment.from_bins(bins, num_items)


def test_no_bins_are_an_empty_assignment() -> None:
    for bins in (BinAssignment.from_bins([]), BinAssignment.from_rows(np.empty(0, np.int32))):
        assert (bins.num_bins, bins.num_items, bins.offsets.tolist()) == (0, 0, [0])


@settings(deadline=None, max_examples=100)
@given(choices=st.lists(st.integers(0, 40), max_size=200))
def test_rows_of_items_become_items_of_rows(choices) -> None:
    numbers = {row: number for number, row in enumerate(sorted(set(choices)))}  # without gaps
    row_of = [numbers[row] for row in choices]
    bins = BinAssignment.from_rows(np.array(row_of, dtype=np.int32))
    assert [bins.bin_indices(row).tolist() for row in range(len(bins))] == [
        [item for item, row in enumerate(row_of) if row == wanted] for wanted in range(len(numbers))
    ]


@pytest.mark.parametrize("num_rows", [2**16, 2**16 + 1, 150_000])
def test_more_than_2_to_the_16_rows_are_kept_apart(num_rows) -> None:
    order = np.random.default_rng(0).permutation(2 * num_rows)
    bins = BinAssignment.from_rows((order % num_rows).astype(np.int32))
    assert bins.offsets.tolist() == list(range(0, 2 * num_rows + 1, 2))
    place = np.argsort(order)
    wanted = np.sort(np.stack((place[:num_rows], place[num_rows:]), axis=1), axis=1)
    np.testing.assert_array_equal(bins.indices, wanted.reshape(-1))


@given(num_items=st.integers(0, 300), seed=st.integers(0, 2**70))
@settings(deadline=None, max_examples=50)
def test_a_shuffle_is_a_bijection(num_items, seed) -> None:
    assert sorted(shuffled(num_items, seed).tolist()) == list(range(num_items))


def test_shuffles_are_the_same_everywhere() -> None:
    assert shuffled(8, 0).tolist() == [7, 5, 0, 4, 2, 6, 1, 3]
    assert shuffled(8, 1).tolist() == [1, 6, 2, 0, 5, 7, 4, 3]


@pytest.mark.parametrize("bins", [[[0.9], [1.2]], [["a"]], [[0, None]], [[[0], [1, 2]]], [[True]]])
def test_items_that_are_not_whole_numbers_are_refused(bins) -> None:
    with pytest.raises(OptionError, match=r"bin 0: .*wanted the numbers of its items"):
        BinAssignment.from_bins(bins)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), capacity=st.integers(1, 12))
def test_bins_of_others_are_cut_at_the_capacity_and_every_token_is_counted(data, capacity) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), max_size=12))
    order = data.draw(st.permutations(range(len(lengths))))
    edges = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=5)))
    bins = [order[start:stop] for start, stop in pairwise([0, *edges, len(order)])]
    plan = plan_of_bins(BinAssignment.from_bins(bins), np.array(lengths, np.int64), capacity)
    wanted, cut, gone = [], {}, {}
    for one in bins:
        room, row = capacity, []
        for example in one:
            kept = min(lengths[example], room)
            room -= kept
            if kept:
                row.append((example, kept))
            if kept < lengths[example]:
                (cut if kept else gone)[example] = lengths[example] - kept
        wanted += [row] if row else []
    pieces = plan.pieces
    found = [
        [(int(pieces.example[at]), int(pieces.stop[at])) for at in plan.rows.bin_indices(row)]
        for row in range(len(plan))
    ]
    assert found == wanted
    assert not pieces.start.any()
    assert sorted(pieces.example.tolist()) == pieces.example.tolist()
    metrics = plan.metrics
    assert (metrics.num_truncated, metrics.truncated_tokens) == (len(cut), sum(cut.values()))
    assert (metrics.num_dropped, metrics.dropped_tokens) == (len(gone), sum(gone.values()))
    assert (metrics.num_rows, metrics.num_items) == (len(wanted), sum(map(len, wanted)))
    assert metrics.num_tokens + metrics.truncated_tokens + metrics.dropped_tokens == sum(lengths)
    assert (metrics.num_examples, metrics.num_empty) == (len(lengths), lengths.count(0))
    assert metrics.lower_bound <= metrics.num_rows
