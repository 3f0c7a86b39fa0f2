"""Examples to rows of one length.

cuts.py  where each policy cuts
plan.py  which tokens of each example its row holds
rows.py  the rows themselves, and their shift to inputs and labels

Where examples that are too long are cut, each policy a pure function on arrays.

In: examples that are longer than a row and train something.  Out: head, start, stop of each.
Promise: a row is `values[begin:begin + head] + values[start:stop]`, at most `row_len` tokens, and
holds the last trained token behind its first place (all but `keep_first`, which keeps the start).

How `drop_oldest_turns` makes room, in this order, until the example fits:

1. What lies behind the last trained turn goes: no trained token sees it.
2. The oldest exchanges go, whole. An exchange begins at the first turn that is not the system's,
   and at each user (or later system) turn right behind an assistant or tool turn. The exchange of
   the last trained turn stays, and so does what is before the first: prefix and system turns.
3. The system turns go, then the oldest turns of the last exchange: the row begins with a turn.
4. The beginning of the last trained turn goes: the row begins inside it and holds its end.

In 3 and 4 a prefix (a BOS) of at most a quarter of the row stays. The last trained turn stays up to
its end, its last trained token when more than a quarter of the row would follow that.
Not here: which examples are too long, counting, copying.

Which tokens of each example its row holds.

In: rendered examples, seq_len, a policy.  Out: a plan: positions, never tokens.
Promise: a row is `example[:head] + example[start:stop]`, at most seq_len + 1 tokens, and one of its
tokens from the second on is trained (the first is nobody's label); what cannot give such a row is
in `dropped` with a reason. An example that fits stays as it is. The same input, the same plan.
Not here: where a policy cuts (cuts.py), copying tokens, padding, the shift (rows.py).

Examples to rows of one length, and rows to inputs and labels.

In: rendered examples of any length.  Out: (n, seq_len + 1) ids and mask; from them x, y, loss_mask.
Promise: every row trains at least one token whose label is inside it; ids and mask are cut
together; padding is never trained; every example is a row or among the drops, with a reason.
No loop over examples or tokens. What is left out is said in cuts.py, and by policy in
FIT_SENTENCES.
Not here: packing several examples into a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.chat.policy import ASSISTANT, SYSTEM, TOOL
from shardmill.errors import OptionError
from shardmill.records import (
    IGNORE_INDEX,
    BoolArray,
    ChatExamples,
    IntArray,
    OffsetArray,
    next_token_pairs,
)

_SMALL_PART = 4  # up to 1/4 of a row may hold a prefix, or an untrained end, when room is short

Cuts: TypeAlias = tuple[OffsetArray, OffsetArray, OffsetArray]
CutFunction: TypeAlias = "Callable[[Scene, int], Cuts]"


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Some examples as positions in the flat array of all tokens."""

    begin: OffsetArray  # (n,) where each example begins
    end: OffsetArray  # (n,) and ends
    last: OffsetArray  # (n,) its last trained token; before `begin` when nothing is trained
    turns: OffsetArray  # (turns + 1,) starts of the turns of all examples, and a sentinel
    roles: npt.NDArray[np.uint8]  # (turns,) who speaks
    trained: OffsetArray  # positions of all trained tokens

    @classmethod
    def of(cls, examples: ChatExamples) -> Scene:
        offsets, total = examples.ids.offsets, len(examples.ids.values)
        turns, roles = examples.turn_starts, examples.turn_roles
        if examples.mask.shape != (total,) or turns.shape != roles.shape:
            raise OptionError(
                f"examples of {total:,} tokens with a mask of shape {examples.mask.shape}, "
                f"{len(turns):,} turn starts and {len(roles):,} turn roles: wanted one mask value "
                "a token and one role a turn"
            )
        trained = np.flatnonzero(examples.mask)
        return cls(
            begin=offsets[:-1],
            end=offsets[1:],
            last=last_before(trained, offsets[1:]),
            turns=np.append(turns, total + 1),
            roles=roles,
            trained=trained,
        )

    def take(self, chosen: OffsetArray) -> Scene:
        """The scene of some of the examples."""
        return replace(self, begin=self.begin[chosen], end=self.end[chosen], last=self.last[chosen])

    def trains(self, cuts: Cuts) -> BoolArray:
        """Is a token behind the first of each row trained? For rows without a head."""
        _, start, stop = cuts
        return last_before(self.trained, stop) > start

    def cuts_a_turn(self, cuts: Cuts) -> BoolArray:
        """Does a row begin or end inside a turn?"""
        _, start, stop = cuts
        first: BoolArray = (start > self.begin) & (_next(self.turns, start) != start)
        last: BoolArray = (stop < self.end) & (_next(self.turns, stop) != stop)
        return first | last


def keep_first(scene: Scene, row_len: int) -> Cuts:
    """truncate-right. May keep nothing that is trained: the caller looks."""
    return np.zeros_like(scene.begin), scene.begin, scene.begin + row_len


def keep_last(scene: Scene, row_len: int) -> Cuts:
    """truncate-left: the last tokens up to the end of the last trained turn."""
    stop = _stop(scene, row_len)
    return np.zeros_like(stop), np.maximum(scene.begin, stop - row_len), stop


def drop_oldest_turns(scene: Scene, row_len: int) -> Cuts:
    """Steps 1 to 4 of the module's head; each overrides the one before where that was too little.

    Example: prefix b, turns S U A U A, a row of 7:

        b S S U U A A A U A A   has 11 tokens, wanted 7
        b S S . . . . . U A A   step 2: head 3, from the second U on
    """
    stop = _stop(scene, row_len)
    begin, last, exchanges = scene.begin, scene.last, _exchanges(scene)
    # Step 2: the first exchange that fits behind all that comes before the exchanges.
    first = _next(exchanges, begin)
    head = np.where(first <= last, first - begin, 0)
    start = _next(exchanges, stop - (row_len - head))
    # Steps 3 and 4: what fits behind the prefix alone, a whole turn of the last exchange or a tail.
    prefix = _prefix(scene, row_len)
    tail = stop - (row_len - prefix)
    turn = _next(scene.turns, np.maximum(tail, last_before(exchanges, last + 1)))
    hard = np.where(turn <= last - (prefix == 0), turn, tail)
    too_little = start > last - (head == 0)
    head, start = np.where(too_little, prefix, head), np.where(too_little, hard, start)
    # Step 1 alone.
    enough = stop - begin <= row_len
    return np.where(enough, 0, head), np.where(enough, begin, start), stop


def _stop(scene: Scene, row_len: int) -> OffsetArray:
    """The end of the last trained turn, or right behind its last trained token."""
    turn_end = np.minimum(_next(scene.turns, scene.last + 1), scene.end)
    untrained = turn_end - scene.last - 1
    return np.where(untrained <= row_len // _SMALL_PART, turn_end, scene.last + 1)


def _prefix(scene: Scene, row_len: int) -> OffsetArray:
    """Tokens before the first turn, 0 when they are many; an example without turns has none."""
    first = _next(scene.turns, scene.begin)
    prefix = np.where(first <= scene.last, first - scene.begin, 0)
    return np.where(prefix <= row_len // _SMALL_PART, prefix, 0)


def last_before(positions: OffsetArray, limit: OffsetArray) -> OffsetArray:
    """The last of the ascending `positions` before each limit, in whatever example; else -1."""
    if not len(positions):
        return np.full_like(limit, -1)
    place = np.searchsorted(positions, limit) - 1
    return np.where(place < 0, -1, positions[place])


def _next(positions: OffsetArray, least: OffsetArray) -> OffsetArray:
    """The first of the ascending `positions` from `least` on; the sentinel when there is none."""
    place = np.searchsorted(positions, least)
    return positions[np.minimum(place, len(positions) - 1)]


def _exchanges(scene: Scene) -> OffsetArray:
    """Where the exchanges of these examples begin, and the sentinel.

    Those of other examples may be wrong, or missing.
    """
    roles, turns = scene.roles, scene.turns
    answers = (roles == ASSISTANT) | (roles == TOOL)
    begins = np.zeros(len(turns), np.bool_)
    begins[1:-1] = answers[:-1] & ~answers[1:]
    begins[np.searchsorted(turns, scene.begin)] = False  # the answer before is another example's
    talk = np.flatnonzero(roles != SYSTEM)
    place = np.searchsorted(turns[talk], scene.begin)
    begins[talk[place[place < len(talk)]]] = True
    begins[-1] = True
    return turns[begins]


class Fit(StrEnum):
    """What happens to an example that is longer than a row; FIT_SENTENCES says it in words."""

    DROP_OLDEST_TURNS = "drop-oldest-turns"
    TRUNCATE_LEFT = "truncate-left"
    TRUNCATE_RIGHT = "truncate-right"
    DROP = "drop"
    ERROR = "error"


FIT_SENTENCES: Mapping[Fit, str] = {
    Fit.DROP_OLDEST_TURNS: "leave out the oldest exchanges, keep the system turn and the last "
    "trained turn; cut that from the left when it is too long alone",
    Fit.TRUNCATE_LEFT: "keep the last tokens up to the end of the last trained turn, wherever "
    "that cuts",
    Fit.TRUNCATE_RIGHT: "keep the first tokens, wherever that cuts; drop the example when none "
    "of them is trained",
    Fit.DROP: "drop the example",
    Fit.ERROR: "stop with an error",
}

_CUTS: Mapping[Fit, CutFunction] = {
    Fit.DROP_OLDEST_TURNS: drop_oldest_turns,
    Fit.TRUNCATE_LEFT: keep_last,
    Fit.TRUNCATE_RIGHT: keep_first,
}

FIT_REASONS: Mapping[str, str] = {
    "too_long": "the example is longer than a row",
    "nothing_trained_in_row": "no token that the row could hold is trained",
}
"""Reason code to sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCounts:
    """What became of some examples. Every example and every token is in one bucket."""

    whole: int = 0  # examples with all their tokens
    turns_dropped: int = 0  # examples without some of their turns, the others whole
    truncated: int = 0  # examples with a turn that is not whole
    dropped: Mapping[str, int]  # examples that gave no row, by reason
    tokens_kept: int = 0
    tokens_cut: int = 0  # of examples that gave a row
    tokens_dropped: int = 0  # of those that gave none

    @property
    def examples(self) -> int:
        return self.whole + self.turns_dropped + self.truncated + sum(self.dropped.values())

    def __add__(self, other: FitCounts) -> FitCounts:
        reasons = sorted({*self.dropped, *other.dropped})
        return FitCounts(
            whole=self.whole + other.whole,
            turns_dropped=self.turns_dropped + other.turns_dropped,
            truncated=self.truncated + other.truncated,
            dropped={r: self.dropped.get(r, 0) + other.dropped.get(r, 0) for r in reasons},
            tokens_kept=self.tokens_kept + other.tokens_kept,
            tokens_cut=self.tokens_cut + other.tokens_cut,
            tokens_dropped=self.tokens_dropped + other.tokens_dropped,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FitPlan:
    """For each example of the input, the tokens of its row, counted from the example's start."""

    head: OffsetArray  # (examples,) tokens 0..head
    start: OffsetArray  # (examples,) and start..stop; head <= start <= stop
    stop: OffsetArray  # (examples,) all three are 0 for an example that gives no row
    dropped: Mapping[str, OffsetArray]  # reason -> the examples that give no row, ascending
    counts: FitCounts

    @property
    def lengths(self) -> OffsetArray:
        """(examples,) tokens of each row; 0 for an example that gives none."""
        return self.head + self.stop - self.start

    @property
    def kept(self) -> OffsetArray:
        """The examples that give a row, ascending."""
        return np.flatnonzero(self.stop)


def plan_fit(examples: ChatExamples, seq_len: int, fit: Fit) -> FitPlan:
    """The plan for rows of seq_len + 1 tokens."""
    row_len, fit = whole_number(seq_len, "seq_len") + 1, _known(fit)
    scene = Scene.of(examples)
    lengths = scene.end - scene.begin
    trains = scene.last > scene.begin  # a token that is a label; the first of a row is none
    head, start, stop = np.zeros_like(lengths), np.zeros_like(lengths), lengths * trains
    dropped = {"nothing_trained_in_row": ~trains}
    partial = np.zeros_like(trains)
    long = np.flatnonzero(stop > row_len)
    if len(long) and fit is Fit.ERROR:
        raise _too_long(long, lengths, row_len)
    if len(long) and fit is Fit.DROP:
        stop[long] = 0
        dropped["too_long"] = trains & (stop == 0)
    elif len(long):
        few = scene.take(long)
        cuts = _CUTS[fit](few, row_len)
        partial[long] = few.cuts_a_turn(cuts)
        head[long], start[long], stop[long] = cuts[0], cuts[1] - few.begin, cuts[2] - few.begin
        if fit is Fit.TRUNCATE_RIGHT:
            unfit = long[~few.trains(cuts)]
            stop[unfit] = 0
            dropped["nothing_trained_in_row"][unfit] = True
    return FitPlan(
        head=head,
        start=start,
        stop=stop,
        dropped={reason: np.flatnonzero(who) for reason, who in dropped.items() if who.any()},
        counts=_count(lengths, head + stop - start, partial, dropped),
    )


def _known(fit: str) -> Fit:
    try:
        return Fit(fit)
    except ValueError as unknown:
        raise OptionError(f"fit={fit!r}: wanted one of {', '.join(Fit)}") from unknown


def _too_long(long: OffsetArray, lengths: OffsetArray, row_len: int) -> OptionError:
    first = int(long[0])
    return OptionError(
        f"example {first} of this batch has {lengths[first]:,} tokens, a row holds {row_len:,} "
        f"(seq_len + 1); {len(long):,} of {len(lengths):,} examples are too long: use a larger "
        f"seq_len, or another fit than 'error' ({', '.join(Fit)})"
    )


def _count(
    lengths: OffsetArray, kept: OffsetArray, partial: BoolArray, dropped: Mapping[str, BoolArray]
) -> FitCounts:
    gives_row = kept > 0
    whole = gives_row & (kept == lengths)
    cut = gives_row & ~whole
    total, num_kept = int(lengths.sum()), int(kept.sum())
    of_rows = int(lengths[gives_row].sum())
    return FitCounts(
        whole=int(whole.sum()),
        turns_dropped=int((cut & ~partial).sum()),
        truncated=int((cut & partial).sum()),
        dropped={reason: int(who.sum()) for reason, who in dropped.items() if who.any()},
        tokens_kept=num_kept,
        tokens_cut=of_rows - num_kept,
        tokens_dropped=total - of_rows,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedRows:
    """Examples as rows of one length, not shifted."""

    ids: OffsetArray  # (n, seq_len + 1) int64, padded on the right
    mask: BoolArray  # (n, seq_len + 1) True where this very token is a training target
    kept: OffsetArray  # (n,) which example of the input each row is, ascending
    lengths: OffsetArray  # (n,) tokens of each row that are not padding
    dropped: Mapping[str, OffsetArray]  # reason -> the examples that gave no row, ascending
    counts: FitCounts
    plan: FitPlan  # which tokens of which example these are


def fit_rows(
    examples: ChatExamples, seq_len: int, *, fit: Fit = Fit.DROP_OLDEST_TURNS, pad_id: int
) -> FittedRows:
    """Rows of seq_len + 1 tokens, in the order of the examples."""
    pad_id = whole_number(pad_id, "pad_id", least=0)
    plan = plan_fit(examples, seq_len, fit)
    kept = plan.kept
    lengths = plan.lengths[kept]
    ids, mask = _kept_tokens(examples, plan)
    row_len = seq_len + 1
    filled = np.arange(row_len) < lengths[:, None]
    rows = np.full((len(kept), row_len), pad_id, np.int64)
    rows[filled] = ids
    trained = np.zeros((len(kept), row_len), np.bool_)
    trained[filled] = mask
    return FittedRows(
        ids=rows,
        mask=trained,
        kept=kept,
        lengths=lengths,
        dropped=plan.dropped,
        counts=plan.counts,
        plan=plan,
    )


def _kept_tokens(examples: ChatExamples, plan: FitPlan) -> tuple[IntArray, BoolArray]:
    """The tokens of all rows behind one another.

    head 2, start 3, stop 5 of 6 tokens: 2 stay, 1 goes, 2 stay, 1 goes.
    """
    values, mask = examples.ids.values, examples.mask
    if plan.counts.tokens_kept == len(values):
        return values, mask
    rest = examples.ids.lengths - plan.stop
    runs = np.stack([plan.head, plan.start - plan.head, plan.stop - plan.start, rest], axis=1)
    stays = np.repeat(np.tile([True, False], 2 * len(runs)), runs.reshape(-1))
    return values[stays], mask[stays]


def collate_rows(
    rows: FittedRows, ignore_index: int = IGNORE_INDEX
) -> tuple[IntArray, IntArray, BoolArray]:
    """x, y (int64) and loss_mask (bool), each (n, seq_len)."""
    x, y = next_token_pairs(rows.ids, rows.mask, dtype=rows.ids.dtype, ignore_index=ignore_index)
    return x, y, rows.mask[..., 1:].copy()


__all__ = [
    "FIT_REASONS",
    "FIT_SENTENCES",
    "Fit",
    "FitCounts",
    "FitPlan",
    "FittedRows",
    "collate_rows",
    "fit_rows",
    "plan_fit",
]
