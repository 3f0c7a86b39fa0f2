"""Small chat stores, options and plain-Python oracles that all tests of pack plans share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from shardmill.records import ChatExamples
from shardmill.store import PlanOptions, StoredPlan
from shardmill.testing.stores import make_examples


@st.composite
def plan_options(draw) -> PlanOptions:
    """Options that every example can be packed with."""
    algorithm = draw(st.sampled_from(["best-fit", "first-fit", "first-fit-shuffle", "concatenate"]))
    align_to = draw(st.sampled_from([1, 1, 2, 3]))
    return PlanOptions(
        seq_len=align_to * draw(st.integers(1, 14)),
        algorithm=algorithm,
        seed=draw(st.integers(0, 2**62 - 1)) if algorithm == "first-fit-shuffle" else None,
        max_per_row=draw(st.none() | st.integers(1, 3)),
        align_to=align_to,
        long=draw(st.sampled_from(["truncate", "split", "drop"])),
    )


def talk(
    *turns: tuple[int, int, int],
) -> tuple[list[int], list[tuple[int, list[tuple[int, bool]]]]]:
    """A conversation of turns (role, tokens, whether they are trained); ids count up."""
    number, said = 10, []
    for role, count, trained in turns:
        said.append((role, [(number + at, bool(trained)) for at in range(count)]))
        number += count
    return [1], said


FIVE = make_examples(
    [
        talk((1, 2, 0), (2, 2, 1)),  # 5 tokens, labels at 3 and 4
        talk((2, 1, 1)),  # 2 tokens, a label at 1
        talk((1, 9, 0), (2, 3, 1)),  # 13 tokens, labels at 10, 11 and 12
        ([], [(2, [(7, True)])]),  # 1 token, which nothing predicts
        talk((1, 1, 0), (2, 2, 1)),  # 4 tokens, labels at 2 and 3
    ]
)


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
