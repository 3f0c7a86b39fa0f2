"""Guarantees of packers and pack plans as tests.

Expected values come from lengths and plain Python, never from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from shardmill.errors import missing_extra
from shardmill.packing import PackPlan

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise missing_extra("hypothesis", "dev") from missing

RowPacker: TypeAlias = Callable[[Sequence[int], int], Iterable[Sequence[int]]]
"""Lengths and the capacity of a row -> for each row, the numbers of its examples."""


def example_lengths(capacity: int, *, max_examples: int = 60) -> st.SearchStrategy[list[int]]:
    """Lengths of examples that fit a row, including 0 and the whole row."""
    return st.lists(
        st.integers(0, capacity) | st.sampled_from([1, capacity]), max_size=max_examples
    )


def assert_packer_laws(pack: RowPacker, lengths: Sequence[int], capacity: int) -> None:
    """Guarantee 7 for a packer of your own: its rows cover the examples, and packing again gives
    the same rows. For a packer that gives a `PackPlan`, see also `assert_is_partition`."""
    rows = [list(row) for row in pack(list(lengths), capacity)]
    assert_rows_cover(rows, lengths, capacity)
    again = [list(row) for row in pack(list(lengths), capacity)]
    assert again == rows, f"packed again: {again} instead of {rows}"


def assert_rows_cover(rows: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int) -> None:
    """Every example with tokens is in exactly one row, none of which is empty or over capacity."""
    placed = [number for row in rows for number in row]
    assert len(set(placed)) == len(placed), f"an example is in two places: {rows}"
    wanted = {number for number, length in enumerate(lengths) if length}
    assert wanted <= set(placed), f"in no row: {sorted(wanted - set(placed))}"
    unknown = sorted(set(placed) - set(range(len(lengths))))
    assert not unknown, f"examples that do not exist: {unknown}"
    for at, row in enumerate(rows):
        tokens = sum(lengths[number] for number in row)
        assert row, f"row {at} is empty"
        assert tokens <= capacity, f"row {at} holds {tokens} tokens of {capacity}"


def assert_is_partition(plan: PackPlan, lengths: Sequence[int], *, long: str = "error") -> None:
    """Every token of every example is in exactly one row, but for those that the rule `long` takes
    out of examples over capacity."""
    rows = [plan.rows.bin_indices(row).tolist() for row in range(plan.rows.num_bins)]
    assert sorted(piece for row in rows for piece in row) == list(range(len(plan.pieces)))
    assert all(row for row in rows), "an empty row"
    found: dict[int, list[tuple[int, int]]] = {}
    for example, start, stop in zip(
        plan.pieces.example.tolist(),
        plan.pieces.start.tolist(),
        plan.pieces.stop.tolist(),
        strict=True,
    ):
        found.setdefault(example, []).append((start, stop))
    capacity = plan.metrics.capacity
    for example, length in enumerate(lengths):
        kept = _kept(length, capacity, long)
        wanted = [(at, min(at + capacity, kept)) for at in range(0, kept, capacity)]
        assert found.pop(example, []) == wanted, f"example {example} of {length} tokens"
    assert not found, f"pieces of examples that do not exist: {sorted(found)}"


def assert_rows_hold_their_pieces(plan: PackPlan, *, max_per_row: int | None = None) -> None:
    """No row is over capacity or over `max_per_row`; pieces are in the order of the examples, at
    multiples of `align_to`, and do not overlap."""
    lengths, positions = plan.pieces.lengths.tolist(), plan.positions().tolist()
    at = 0
    for row in range(plan.rows.num_bins):
        pieces = plan.rows.bin_indices(row).tolist()
        assert pieces == sorted(pieces), f"row {row}: {pieces}"
        assert max_per_row is None or len(pieces) <= max_per_row, f"row {row}: {pieces}"
        free = 0
        for piece in pieces:
            position = positions[at]
            assert position % plan.align_to == 0, f"row {row}, piece {piece}: {position}"
            assert free <= position < free + plan.align_to, f"row {row}, piece {piece}: {position}"
            free = position + lengths[piece]
            at += 1
        assert free <= plan.metrics.capacity, f"row {row} holds {free} tokens"


def assert_metrics_add_up(plan: PackPlan, lengths: Sequence[int]) -> None:
    """Every token that came in is counted once, and there are at least as many rows as needed."""
    metrics = plan.metrics
    came = metrics.num_tokens + metrics.truncated_tokens + metrics.dropped_tokens
    assert came == sum(lengths)
    assert metrics.num_examples == len(lengths)
    assert metrics.num_empty == sum(length == 0 for length in lengths)
    assert metrics.num_items == len(plan.pieces)
    assert metrics.num_rows == len(plan) >= metrics.lower_bound
    assert metrics.padding == metrics.num_rows * metrics.capacity - metrics.num_tokens >= 0
    assert 0 <= metrics.utilisation <= 1


def _kept(length: int, capacity: int, long: str) -> int:
    """How many tokens of an example must be in rows."""
    if length <= capacity or long == "split":
        return length
    assert long in {"truncate", "drop"}, f"{length} tokens in rows of {capacity}"
    return capacity if long == "truncate" else 0
