"""Compare a pack plan with the examples it is of.

In: a plan and the lengths of the examples.  Out: sentences about what is wrong.
Promise: a piece outside its example, a row over its room, an example that is in rows twice or
nowhere and not left out, and another number of tokens than the metrics say are found; memory grows
with examples and pieces.
Not here: whether the file is whole and of this store (plans.py), the loss mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardmill.records import OffsetArray
from shardmill.shards.plan_entries import REASONS, PlanArrays
from shardmill.shards.plans import StoredPlan


def piece_spans(arrays: PlanArrays, lengths: OffsetArray) -> tuple[OffsetArray, OffsetArray]:
    """(pieces,) which tokens of its example each piece is: start and stop."""
    stops = lengths[arrays.examples]
    starts = np.zeros_like(stops)
    starts[arrays.cut_pieces] = arrays.cut_starts
    stops[arrays.cut_pieces] = arrays.cut_stops
    return starts, stops


def content_problems(plan: StoredPlan, lengths: OffsetArray) -> Iterator[str]:
    """What cannot be true of a plan of examples of these lengths."""
    arrays, facts = plan.arrays, plan.facts
    starts, stops = piece_spans(arrays, lengths)
    wrong = (starts < 0) | (starts >= stops) | (stops > lengths[arrays.examples])
    if wrong.any():
        piece = int(np.flatnonzero(wrong)[0])
        yield (
            f"piece {piece:,} is {starts[piece]:,}..{stops[piece]:,} of example "
            f"{arrays.examples[piece]:,}, which has {lengths[arrays.examples[piece]]:,} tokens"
        )
        return
    if int((stops - starts).sum()) != facts.metrics.num_tokens:
        yield f"its pieces have {int((stops - starts).sum()):,} tokens, its metrics say otherwise"
    step = facts.options.align_to
    ends = np.cumsum(-(-(stops - starts) // step) * step)
    last = np.cumsum(arrays.counts, dtype=np.int64) - 1
    used = np.diff(ends[last], prepend=0)
    if (used > facts.options.capacity).any():
        row = int(np.flatnonzero(used > facts.options.capacity)[0])
        yield f"row {row:,} has {used[row]:,} tokens and room for {facts.options.capacity:,}"
    yield from _lost_examples(arrays, lengths, starts, stops)


def _lost_examples(
    arrays: PlanArrays, lengths: OffsetArray, starts: OffsetArray, stops: OffsetArray
) -> Iterator[str]:
    order = np.lexsort((starts, arrays.examples))
    example = arrays.examples[order]
    again = example[1:] == example[:-1]
    # of two pieces of an example the second may begin with the last token of the first
    twice = np.flatnonzero(again & (starts[order][1:] < stops[order][:-1] - 1))
    if len(twice):
        yield f"example {example[twice[0]]:,} has tokens in more than one row"
    seen = lengths == 0
    for name in ("examples", *REASONS):
        seen[getattr(arrays, name)] = True
    if not seen.all():
        lost = np.flatnonzero(~seen)
        yield f"example {lost[0]:,} is in no row and not left out ({len(lost):,} such examples)"
