"""Every packer gives a partition; the decreasing packers give exactly the rows of the textbook."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.packing import (
    PACKERS,
    Algorithm,
    PackPlan,
    best_fit_decreasing,
    concatenate,
    cut_examples,
    first_fit_decreasing,
    first_fit_shuffle,
    packer_named,
    takes_seed,
)
from shardmill.packing.packers import first_fit
from shardmill.testing.packing import (
    assert_is_partition,
    assert_metrics_add_up,
    assert_rows_hold_their_pieces,
)

LIMITS = st.none() | st.integers(1, 5)


def packer(name: str) -> Callable[..., PackPlan]:
    return packer_named(name, 7 if takes_seed(name) else None)


def rows_of(plan: PackPlan) -> list[list[int]]:
    return [plan.rows.bin_indices(row).tolist() for row in range(len(plan))]


def by_the_book(sizes, order, capacity, limit, choose) -> list[list[int]]:
    """One item after the other; `choose` picks among the rows that take it, given their rooms."""
    rows: list[list[int]] = []
    for item in order:
        rooms = [capacity - sum(sizes[other] for other in row) for row in rows]
        fitting = [
            row
            for row, room in enumerate(rooms)
            if room >= sizes[item] and (limit is None or len(rows[row]) < limit)
        ]
        if fitting:
            rows[choose(fitting, rooms)].append(item)
        else:
            rows.append([item])
    return [sorted(row) for row in rows]


def first(fitting, rooms) -> int:
    return fitting[0]


def fullest(fitting, rooms) -> int:
    return min(fitting, key=lambda row: (rooms[row], row))


@st.composite
def problems(draw):
    """Lengths up to a capacity, with many equals or few."""
    capacity = draw(st.integers(1, 60))
    largest = draw(st.integers(1, capacity))
    sizes = st.sampled_from(
        draw(st.lists(st.integers(1, largest), min_size=1, max_size=6))
    ) | st.integers(1, largest)
    return draw(st.lists(sizes, max_size=80)), capacity


@settings(deadline=None, max_examples=200)
@given(problem=problems(), limit=LIMITS)
def test_best_fit_decreasing_equals_the_textbook(problem, limit) -> None:
    lengths, capacity = problem
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    plan = best_fit_decreasing(lengths, capacity, max_per_row=limit)
    assert rows_of(plan) == by_the_book(lengths, order, capacity, limit, fullest)


@settings(deadline=None, max_examples=200)
@given(problem=problems(), limit=LIMITS)
def test_first_fit_decreasing_equals_the_textbook(problem, limit) -> None:
    lengths, capacity = problem
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    wanted = by_the_book(lengths, order, capacity, limit, first)
    assert rows_of(first_fit_decreasing(lengths, capacity, max_per_row=limit)) == wanted
    # the tree that places items one by one gives the same rows
    row_of = {item: row for row, items in enumerate(wanted) for item in items}
    sizes = np.array(sorted(lengths, reverse=True), dtype=np.int64)
    assert first_fit(sizes, capacity, limit).tolist() == [row_of[item] for item in order]


@pytest.mark.parametrize(("capacity", "most"), [(6, 6), (10, 4)])
@pytest.mark.parametrize("limit", [None, 2, 3])
def test_all_small_problems_equal_the_textbook(capacity, most, limit) -> None:
    num_problems = 0
    for count in range(1, most + 1):
        for lengths in combinations_with_replacement(range(capacity, 0, -1), count):
            best = by_the_book(lengths, range(count), capacity, limit, fullest)
            assert rows_of(best_fit_decreasing(lengths, capacity, max_per_row=limit)) == best
            wanted = by_the_book(lengths, range(count), capacity, limit, first)
            assert rows_of(first_fit_decreasing(lengths, capacity, max_per_row=limit)) == wanted
            num_problems += 1
    assert num_problems == {6: 923, 10: 1000}[capacity]


@settings(deadline=None, max_examples=100)
@given(problem=problems(), limit=LIMITS)
def test_first_fit_in_any_order_equals_the_textbook(problem, limit) -> None:
    lengths, capacity = problem
    wanted = by_the_book(lengths, range(len(lengths)), capacity, limit, first)
    rows: dict[int, list[int]] = {}
    for item, row in enumerate(first_fit(np.array(lengths, np.int64), capacity, limit).tolist()):
        rows.setdefault(row, []).append(item)
    assert [rows[row] for row in sorted(rows)] == wanted


@settings(deadline=None, max_examples=100)
@given(problem=problems(), limit=LIMITS)
def test_concatenate_ends_a_row_where_the_next_does_not_fit(problem, limit) -> None:
    lengths, capacity = problem
    rows: list[list[int]] = []
    for item, length in enumerate(lengths):
        last = rows[-1] if rows else None
        if last is None or sum(lengths[i] for i in last) + length > capacity or len(last) == limit:
            rows.append([])
        rows[-1].append(item)
    assert rows_of(concatenate(lengths, capacity, max_per_row=limit)) == rows


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 90), max_size=60),
    steps=st.integers(1, 12),
    align_to=st.sampled_from([1, 2, 5]),
    limit=LIMITS,
    long=st.sampled_from(["truncate", "split", "drop"]),
    name=st.sampled_from(sorted(PACKERS)),
)
def test_every_packer_keeps_the_guarantees(lengths, steps, align_to, limit, long, name) -> None:
    def make() -> PackPlan:
        return packer(name)(
            lengths, steps * align_to, max_per_row=limit, align_to=align_to, long=long
        )

    plan = make()
    assert_is_partition(plan, lengths, long=long)
    assert_rows_hold_their_pieces(plan, max_per_row=limit)
    assert_metrics_add_up(plan, lengths)
    again = make()
    np.testing.assert_array_equal(plan.rows.offsets, again.rows.offsets)
    np.testing.assert_array_equal(plan.rows.indices, again.rows.indices)
    np.testing.assert_array_equal(plan.pieces.example, again.pieces.example)
    np.testing.assert_array_equal(plan.pieces.start, again.pieces.start)
    assert plan.metrics == again.metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pack", "limit"),
    [(best_fit_decreasing, None), (best_fit_decreasing, 3), (first_fit_decreasing, None)],
)
def test_a_hundred_thousand_lengths_keep_the_guarantees(pack, limit) -> None:
    numbers = np.random.default_rng(5).lognormal(5.5, 1.0, 100_000)
    lengths = np.clip(numbers, 1, 2048).astype(np.int64)
    plan = pack(lengths, 2048, max_per_row=limit)
    assert_is_partition(plan, lengths.tolist())
    assert_rows_hold_their_pieces(plan, max_per_row=limit)
    assert_metrics_add_up(plan, lengths.tolist())
    if limit is None:
        assert plan.metrics.num_rows <= 1.001 * plan.metrics.lower_bound


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 2])
def test_thirty_thousand_distinct_sizes_equal_first_fit_one_by_one(limit) -> None:
    lengths = np.random.default_rng(6).permutation(30_000) + 1
    order = np.argsort(-lengths)
    row_of = np.empty(len(lengths), np.int64)
    row_of[order] = first_fit(lengths[order], 45_000, limit)
    plan = first_fit_decreasing(lengths, 45_000, max_per_row=limit)
    rows = np.repeat(np.arange(len(plan)), np.diff(plan.rows.offsets))
    assert row_of[plan.rows.indices].tolist() == rows.tolist()
    plan = best_fit_decreasing(lengths, 45_000, max_per_row=limit)
    assert_is_partition(plan, lengths.tolist())
    assert_rows_hold_their_pieces(plan, max_per_row=limit)


def test_splitting_with_an_overlap_repeats_that_many_tokens() -> None:
    lengths = np.array([3, 0, 8, 4])
    cut = cut_examples(lengths, 4, "split", overlap=1)
    assert cut.example.tolist() == [0, 2, 2, 2, 3]
    assert list(zip(cut.start.tolist(), cut.stop.tolist(), strict=True)) == [
        (0, 3),
        (0, 4),
        (3, 7),
        (6, 8),
        (0, 4),
    ]
    assert cut_examples(lengths, 4, "split").stop.tolist() == [3, 4, 8, 4]


def test_pieces_of_examples_longer_than_32_bits_count() -> None:
    plan = best_fit_decreasing([5, 2**33 + 3, 0, 2**32], 2**32, long="split")
    assert plan.pieces.example.tolist() == [0, 1, 1, 1, 3]
    assert plan.pieces.start.tolist() == [0, 0, 2**32, 2**33, 0]
    assert plan.pieces.stop.tolist() == [5, 2**32, 2**33, 2**33 + 3, 2**32]
    cut = best_fit_decreasing([5, 2**33], 8, long="truncate")
    assert cut.pieces.stop.tolist() == [5, 8]
    assert cut.metrics.truncated_tokens == 2**33 - 8


def test_a_plan_says_which_piece_goes_where() -> None:
    plan = best_fit_decreasing([3, 25, 0, 7, 10], 10, long="split")
    assert plan.pieces.example.tolist() == [0, 1, 1, 1, 3, 4]
    assert plan.pieces.start.tolist() == [0, 0, 10, 20, 0, 0]
    assert plan.pieces.stop.tolist() == [3, 10, 20, 25, 7, 10]
    assert rows_of(plan) == [[1], [2], [5], [0, 4], [3]]
    assert plan.positions().tolist() == [0, 0, 0, 0, 3, 0]
    metrics = plan.metrics
    assert (metrics.num_rows, metrics.lower_bound, metrics.num_tokens) == (5, 5, 45)
    assert (metrics.num_split, metrics.num_empty, metrics.padding) == (1, 1, 5)
    assert metrics.utilisation == 0.9


def test_truncated_and_dropped_tokens_are_counted() -> None:
    cut = first_fit_decreasing([12, 30, 4], 10, long="truncate").metrics
    assert (cut.num_truncated, cut.truncated_tokens, cut.num_tokens) == (2, 22, 24)
    left_out = first_fit_decreasing([12, 30, 4], 10, long="drop").metrics
    assert (left_out.num_dropped, left_out.dropped_tokens, left_out.num_tokens) == (2, 42, 4)
    assert first_fit_decreasing([12, 30, 4], 10, long="drop").pieces.long.tolist() == [0, 1]


def test_aligned_pieces_start_at_multiples() -> None:
    plan = concatenate([3, 5, 8], 16, align_to=4)
    assert rows_of(plan) == [[0, 1], [2]]
    assert plan.positions().tolist() == [0, 4, 0]
    assert plan.metrics.lower_bound == 2


def test_the_seed_decides_the_shuffle() -> None:
    lengths = [5, 4, 3, 6, 2, 7, 1, 8, 9, 2, 3, 4]
    plans = [rows_of(first_fit_shuffle(lengths, 12, seed=seed)) for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    # literal, so that no machine and no version of numpy may change it
    assert plans[0] == [[4, 6, 7], [2, 8], [0, 5], [1, 10, 11], [3, 9]]


@pytest.mark.parametrize("name", sorted(PACKERS))
def test_no_lengths_give_an_empty_plan(name) -> None:
    for lengths in ([], [0, 0]):
        plan = packer(name)(lengths, 8, max_per_row=2)
        assert (len(plan), plan.metrics.num_rows, plan.metrics.utilisation) == (0, 0, 1.0)
        assert plan.positions().tolist() == []


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 11], {}, r"example 1: 11 tokens, but a row holds 10 \(1 of 2 examples are too long\)"),
        ([3, -1], {}, "example 1: -1 tokens"),
        ([1.5], {}, "dtype float64"),
        ([[1]], {}, r"shape \(1, 1\)"),
        ([True], {}, "dtype bool"),
        ([3], {"align_to": 4}, "capacity=10 is not a multiple of align_to=4: .* use 8"),
        ([3], {"align_to": 0}, "align_to=0: wanted at least 1"),
        ([3], {"max_per_row": 0}, "max_per_row=0: wanted at least 1"),
        ([3], {"long": "cut"}, "long='cut': wanted one of error, truncate, split, drop"),
    ],
)
def test_wrong_arguments_are_refused(lengths, options, message) -> None:
    with pytest.raises(OptionError, match=message):
        best_fit_decreasing(lengths, 10, **options)


def test_packers_are_found_by_name_with_the_seed_they_need() -> None:
    assert tuple(PACKERS) == get_args(Algorithm)
    assert packer_named("concatenate") is concatenate
    with pytest.raises(OptionError, match="algorithm='magic': wanted one of best-fit, first-fit"):
        packer_named("magic")
    with pytest.raises(OptionError, match="algorithm='first-fit-shuffle' needs a seed"):
        packer_named("first-fit-shuffle")
    with pytest.raises(OptionError, match="algorithm='best-fit' takes no seed"):
        packer_named("best-fit", 1)
    with pytest.raises(TypeError, match="seed"):
        first_fit_shuffle([1, 2], 10)  # type: ignore[call-arg]


@pytest.mark.parametrize(("lengths", "capacity"), [([2**62] * 3, 2**62), ([1], 2**63)])
def test_sums_that_would_overflow_are_refused(lengths, capacity) -> None:
    with pytest.raises(OptionError, match="which no real data has"):
        best_fit_decreasing(lengths, capacity)
