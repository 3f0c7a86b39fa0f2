"""Guarantees of packers, pack plans and packed shards as tests.

Expected values come from lengths, examples and plain Python, never from the code under test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.errors import missing_extra
from shardmill.formats.packed import PackedBin, PackedShard, SequenceSpoolWriter
from shardmill.packing import PackPlan
from shardmill.records import ChatExamples
from shardmill.store import PlanOptions, StoredPlan

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise missing_extra("hypothesis", "dev") from missing

__all__ = [
    "Bin",
    "PlainPiece",
    "RowPacker",
    "TokenSequence",
    "aligned_slowly",
    "assert_holds_bins",
    "assert_is_partition",
    "assert_metrics_add_up",
    "assert_packer_laws",
    "assert_packs_every_piece",
    "assert_plan_adds_up",
    "assert_rows_cover",
    "assert_rows_hold_their_pieces",
    "assert_same_plan",
    "assert_trains_the_same_labels",
    "example_lengths",
    "labels_of",
    "packed_bins",
    "pieces_by_rule",
    "plain",
    "plain_row",
    "positions_of",
    "rows_of_plan",
    "token_sequences",
    "write_spool",
]

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


def assert_same_plan(make_plan: Callable[[], PackPlan]) -> None:
    """Making a plan twice gives the same plan."""
    one, other = make_plan(), make_plan()
    np.testing.assert_array_equal(one.rows.offsets, other.rows.offsets)
    np.testing.assert_array_equal(one.rows.indices, other.rows.indices)
    np.testing.assert_array_equal(one.pieces.example, other.pieces.example)
    np.testing.assert_array_equal(one.pieces.start, other.pieces.start)
    assert one.metrics == other.metrics


def _kept(length: int, capacity: int, long: str) -> int:
    """How many tokens of an example must be in rows."""
    if length <= capacity or long == "split":
        return length
    assert long in {"truncate", "drop"}, f"{length} tokens in rows of {capacity}"
    return capacity if long == "truncate" else 0


class PlainPiece(NamedTuple):
    """`start..stop` of the tokens of an example."""

    example: int
    start: int
    stop: int


def rows_of_plan(plan: StoredPlan, lengths: Sequence[int]) -> list[list[PlainPiece]]:
    """The pieces of every row, read from the arrays one by one."""
    arrays = plan.arrays
    starts, stops = arrays.cut_starts.tolist(), arrays.cut_stops.tolist()
    cuts = dict(zip(arrays.cut_pieces.tolist(), zip(starts, stops, strict=True), strict=True))
    pieces = [
        PlainPiece(example, *cuts.get(number, (0, lengths[example])))
        for number, example in enumerate(arrays.examples.tolist())
    ]
    ends = np.cumsum(arrays.counts, dtype=np.int64).tolist()
    return [pieces[end - count : end] for end, count in zip(ends, arrays.counts, strict=True)]


def positions_of(pieces: Sequence[PlainPiece], align_to: int) -> list[int]:
    """Where in its row each piece starts."""
    positions, at = [], 0
    for piece in pieces:
        positions.append(at)
        at += -(-(piece.stop - piece.start) // align_to) * align_to
    return positions


def labels_of(examples: ChatExamples, piece: PlainPiece) -> set[tuple[int, int]]:
    """(example, position) of the trained tokens of a piece, except its first token."""
    begin = int(examples.ids.offsets[piece.example])
    inner = range(piece.start + 1, piece.stop)
    return {(piece.example, at) for at in inner if examples.mask[begin + at]}


def pieces_by_rule(lengths: Sequence[int], options: PlanOptions) -> list[PlainPiece]:
    """The pieces of examples of these lengths, including those that train nothing."""
    room, found = options.capacity, []
    for example, length in enumerate(lengths):
        stops = [length] if length <= room else [room]
        if length > room and options.long == "drop":
            continue
        while options.long == "split" and stops[-1] < length:
            stops.append(min(stops[-1] - 1 + room, length))  # its first token is the last before
        starts = [0, *(stop - 1 for stop in stops[:-1])]
        found += [PlainPiece(example, *span) for span in zip(starts, stops, strict=True)]
    return [piece for piece in found if piece.start < piece.stop]


def assert_packs_every_piece(plan: StoredPlan, examples: ChatExamples) -> None:
    """Every piece is in exactly one row or left out by number and reason; no row is over capacity;
    every row trains a label, and every label of the examples is trained once."""
    options, lengths = plan.facts.options, examples.ids.lengths.tolist()
    wanted = pieces_by_rule(lengths, options)
    idle = [piece for piece in wanted if not labels_of(examples, piece)]
    rows = rows_of_plan(plan, lengths)
    assert sorted(piece for row in rows for piece in row) == sorted(set(wanted) - set(idle))
    assert plan.arrays.trains_nothing.tolist() == [piece.example for piece in idle]
    dropped = [number for number, length in enumerate(lengths) if length > options.capacity]
    assert plan.arrays.too_long.tolist() == (dropped if options.long == "drop" else [])
    for number, row in enumerate(rows):
        assert row == sorted(row), f"row {number}: {row}"
        assert options.max_per_row is None or len(row) <= options.max_per_row, f"row {number}"
        end = positions_of(row, options.align_to)[-1] + row[-1].stop - row[-1].start
        assert end <= options.capacity, f"row {number} holds {end} tokens"
        assert any(labels_of(examples, piece) for piece in row), f"row {number} trains nothing"
    found = [label for row in rows for piece in row for label in labels_of(examples, piece)]
    assert sorted(found) == sorted(set(found)), "a label is trained twice"
    assert set(found) == set[tuple[int, int]]().union(
        *(labels_of(examples, piece) for piece in wanted)
    )
    if options.long in ("error", "split"):
        whole = [PlainPiece(number, 0, length) for number, length in enumerate(lengths)]
        assert len(found) == sum(len(labels_of(examples, piece)) for piece in whole)


def assert_plan_adds_up(plan: StoredPlan, examples: ChatExamples) -> None:
    """Guarantee 4: the metrics equal a count of the rows, and they sum to the split."""
    metrics, lengths = plan.facts.metrics, examples.ids.lengths.tolist()
    rows = rows_of_plan(plan, lengths)
    tokens = [(p.example, at) for row in rows for p in row for at in range(p.start, p.stop)]
    out = metrics.left_out
    assert metrics.num_rows == len(rows) >= metrics.lower_bound
    assert metrics.num_examples == len(lengths)
    assert metrics.num_empty == sum(length == 0 for length in lengths)
    assert metrics.num_pieces == sum(map(len, rows))
    assert metrics.num_tokens == len(tokens)
    assert metrics.repeated_tokens == len(tokens) - len(set(tokens))
    left_out = sum(entry.tokens for entry in out.values())
    assert len(set(tokens)) + metrics.truncated_tokens + left_out == sum(lengths)
    whole = [PlainPiece(number, 0, length) for number, length in enumerate(lengths)]
    in_rows = sum(len(labels_of(examples, piece)) for row in rows for piece in row)
    assert metrics.trained_labels == in_rows
    every = sum(len(labels_of(examples, piece)) for piece in whole)
    unseen = sum(entry.labels for entry in out.values())
    assert in_rows + metrics.truncated_labels + unseen == every
    long = sum(length > plan.facts.options.capacity for length in lengths)
    rules = {"split": metrics.num_split, "truncate": metrics.num_truncated}
    rules |= {"drop": out["too_long"].pieces}
    assert rules == {rule: long * (rule == plan.facts.options.long) for rule in rules}
    assert out["trains_nothing"].pieces == len(plan.arrays.trains_nothing)
    assert out["trains_nothing"].labels == 0


def plain_row(
    plan: StoredPlan, pieces: Sequence[PlainPiece], examples: ChatExamples, pad_id: int
) -> tuple[list[int], list[bool], list[int]]:
    """Ids, trained labels and starts of one row, token by token."""
    ids, trained = [pad_id] * plan.facts.row_len, [False] * plan.facts.row_len
    positions = positions_of(pieces, plan.facts.options.align_to)
    for piece, position in zip(pieces, positions, strict=True):
        labels = labels_of(examples, piece)
        for at in range(piece.start, piece.stop):
            ids[position + at - piece.start] = int(examples.ids[piece.example][at])
            trained[position + at - piece.start] = (piece.example, at) in labels
    return ids, trained, positions


TokenSequence = tuple[list[int], list[int]]
"""Ids, and for each whether this very token is trained (0 or 1)."""
Bin = tuple[list[int], list[int], list[int]]
"""Ids, loss mask as stored, starts."""


def token_sequences(
    *, max_sequences: int = 12, max_tokens: int = 9, largest: int = 2**15, min_tokens: int = 0
) -> st.SearchStrategy[list[TokenSequence]]:
    """Sequences of ids up to `largest`, each token trained or not; some may have none."""
    return st.lists(_tokens(largest, min_tokens, max_tokens), max_size=max_sequences)


def _tokens(largest: int, least: int, most: int) -> st.SearchStrategy[TokenSequence]:
    token = st.tuples(st.integers(0, largest), st.integers(0, 1))
    return st.lists(token, min_size=least, max_size=most).map(
        lambda pairs: ([i for i, _ in pairs], [m for _, m in pairs])
    )


def packed_bins(
    *, pack_size: int, max_bins: int = 8, largest: int = 2**15
) -> st.SearchStrategy[list[Bin]]:
    """Bins of 1 to `pack_size` tokens, with starts that rise from 0."""

    def with_starts(tokens: TokenSequence) -> st.SearchStrategy[Bin]:
        inner = range(1, len(tokens[0]))
        starts = st.sets(st.sampled_from(inner)) if inner else st.just(set[int]())
        return starts.map(lambda found: (*tokens, [0, *sorted(found)]))

    one = _tokens(largest, 1, pack_size).flatmap(with_starts)
    return st.lists(one, max_size=max_bins)


def write_spool(
    folder: Path, sequences: Sequence[TokenSequence], dtype: npt.DTypeLike = np.int32
) -> Path:
    """A finished spool of these sequences."""
    with SequenceSpoolWriter(folder, dtype=dtype) as spool:
        for ids, mask in sequences:
            spool.append(ids, mask)
    return folder


def plain(found: PackedBin) -> Bin:
    """A bin as lists."""
    return found.input_ids.tolist(), found.loss_mask.tolist(), found.seq_starts.tolist()


def assert_holds_bins(shard: PackedShard, bins: Sequence[Bin]) -> None:
    """These bins, in this order, and no others."""
    assert len(shard) == len(bins)
    for number, (ids, mask, starts) in enumerate(bins):
        found = shard.read_bin(number)
        assert plain(found) == (ids, mask, starts), f"bin {number}"
        assert found.seq_boundaries == [*starts, len(ids)], f"bin {number}"


def assert_trains_the_same_labels(shard: PackedShard, sequences: Sequence[TokenSequence]) -> None:
    """Of the alignment "label": cut at its boundaries, a shard holds exactly these sequences, each
    with the labels of its trained tokens except the first, which nothing predicts."""
    assert shard.loss_mask_alignment == "label"
    wanted = Counter(
        (tuple(ids), tuple(at for at in range(1, len(ids)) if mask[at]))
        for ids, mask in sequences
        if ids
    )
    found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for number in range(len(shard)):
        ids, mask, _ = plain(shard.read_bin(number))
        for start, stop in pairwise(shard.read_bin(number).seq_boundaries):
            assert mask[stop - 1] == 0, f"bin {number}: the last position of a sequence is trained"
            labels = tuple(at + 1 - start for at in range(start, stop - 1) if mask[at])
            found[tuple(ids[start:stop]), labels] += 1
    assert found == wanted


def aligned_slowly(sequences: Sequence[TokenSequence], alignment: str) -> Bin:
    """One bin of these sequences, token by token, as the two alignments are defined."""
    ids = [number for part, _ in sequences for number in part]
    token_mask = [bit for _, part in sequences for bit in part]
    lengths = [len(part) for part, _ in sequences if part]
    starts = list(accumulate(lengths, initial=0))[: len(lengths)]
    if alignment == "roll_right":
        return ids, ([0, *token_mask[:-1]] if ids else []), starts
    ends = {stop - 1 for stop in [*starts[1:], len(ids)]}
    mask = [0 if at in ends else token_mask[at + 1] for at in range(len(ids))]
    return ids, mask, starts
