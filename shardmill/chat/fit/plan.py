"""Which tokens of each example its row holds.

In: rendered examples, seq_len, a policy.  Out: a plan: positions, never tokens.
Promise: a row is `example[:head] + example[start:stop]`, at most seq_len + 1 tokens, and one of its
tokens from the second on is trained (the first is nobody's label); what cannot give such a row is
in `dropped` with a reason. An example that fits stays as it is. The same input, the same plan.
Not here: where a policy cuts (cuts.py), copying tokens, padding, the shift (rows.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from shardmill.arguments import whole_number
from shardmill.chat.fit.cuts import CutFunction, Scene, drop_oldest_turns, keep_first, keep_last
from shardmill.errors import OptionError
from shardmill.records import BoolArray, ChatExamples, OffsetArray


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
