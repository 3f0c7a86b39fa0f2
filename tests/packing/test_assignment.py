"""Assignments in CSR form, and the runs under first fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.packing import BinAssignment
from shardmill.packing.runs import SortedRuns
from shardmill.packing.shuffled import shuffled


def test_bins_are_views_of_one_array() -> None:
    bins = BinAssignment.from_bins([[2, 0], [], [1]])
    assert (bins.num_bins, bins.num_items, len(bins)) == (3, 3, 3)
    assert bins.offsets.dtype == np.int64
    assert bins.offsets.tolist() == [0, 2, 2, 3]
    assert bins.indices.dtype == np.int32
    assert [bins.bin_indices(i).tolist() for i in range(3)] == [[2, 0], [], [1]]
    assert np.shares_memory(bins.bin_indices(0), bins.indices)


@pytest.mark.parametrize("bin_id", [-1, 1])
def test_a_bin_that_is_not_there_is_an_index_error(bin_id) -> None:
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
def test_bins_that_are_no_partition_are_refused(bins, num_items, message) -> None:
    with pytest.raises(OptionError, match=message):
        BinAssignment.from_bins(bins, num_items)


def test_no_bins_are_an_assignment_of_nothing() -> None:
    for bins in (BinAssignment.from_bins([]), BinAssignment.from_rows(np.empty(0, np.int32))):
        assert (bins.num_bins, bins.num_items, bins.offsets.tolist()) == (0, 0, [0])


@settings(deadline=None, max_examples=100)
@given(adds=st.lists(st.tuples(st.sets(st.integers(0, 500)), st.integers(0, 500)), max_size=20))
def test_runs_give_back_what_a_set_would(adds) -> None:
    runs, model = SortedRuns(), set()
    for keys, through in adds:
        fresh = sorted(keys - model)
        runs.add(np.array(fresh, dtype=np.int64))
        model.update(fresh)
        assert runs.smallest(7).tolist() == sorted(model)[:7]
        taken = sorted(key for key in model if key <= through)
        assert runs.take_through(through).tolist() == taken
        model.difference_update(taken)
    assert runs.smallest(1000).tolist() == sorted(model)


@given(num_items=st.integers(0, 300), seed=st.integers(0, 2**70))
@settings(deadline=None, max_examples=50)
def test_a_shuffle_is_a_bijection(num_items, seed) -> None:
    assert sorted(shuffled(num_items, seed).tolist()) == list(range(num_items))


def test_shuffles_are_the_same_everywhere() -> None:
    assert shuffled(8, 0).tolist() == [7, 5, 0, 4, 2, 6, 1, 3]
    assert shuffled(8, 1).tolist() == [1, 6, 2, 0, 5, 7, 4, 3]
