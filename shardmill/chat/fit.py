"""Fit rendered examples into rows of `seq_len + 1` tokens, one example to a row.

Each row is `example[:head] + example[start:stop]`. At least one of its tokens from the second on is
trained (the first is no label). Ids and mask are cut together, padding is never trained, and an
example that gives no such row is dropped with a reason. There is no loop over examples or tokens.

`drop-oldest-turns` shortens an example in this order until it fits:

1. What follows the last trained turn goes, because no trained token sees it.
2. The oldest exchanges go, whole. An exchange starts at the first turn that is not the system's,
   and at each user (or later system) turn right after an assistant or tool turn. The exchange of
   the last trained turn stays, and so does what precedes the first: prefix and system turns.
3. The system turns go, then the oldest turns of the last exchange, so the row starts with a turn.
4. The beginning of the last trained turn goes: the row starts inside it and holds its end.

In 3 and 4 a prefix (a BOS) of at most a quarter of the row stays. The last trained turn stays up to
its end, or up to its last trained token if more than a quarter of the row would follow that token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.chat.policy import ASSISTANT, SYSTEM, TOOL
from shardmill.errors import OptionError
from shardmill.records import BoolArray, ChatExamples, IntArray, OffsetArray


class Fit(StrEnum):
    """What happens to an example that is longer than a row; FIT_SENTENCES explains each."""

    DROP_OLDEST_TURNS = "drop-oldest-turns"
    TRUNCATE_LEFT = "truncate-left"
    TRUNCATE_RIGHT = "truncate-right"
    DROP = "drop"
    ERROR = "error"


FIT_SENTENCES: Mapping[Fit, str] = {
    Fit.DROP_OLDEST_TURNS: "leave out the oldest exchanges, keep the system turn and the last "
    "trained turn; cut that turn from the left if it is too long by itself",
    Fit.TRUNCATE_LEFT: "keep the last tokens up to the end of the last trained turn, wherever "
    "that cuts",
    Fit.TRUNCATE_RIGHT: "keep the first tokens, wherever that cuts; drop the example if none "
    "of them is trained",
    Fit.DROP: "drop the example",
    Fit.ERROR: "stop with an error",
}

FIT_REASONS: Mapping[str, str] = {
    "too_long": "the example is longer than a row",
    "nothing_trained_in_row": "no token that the row could hold is trained",
}
"""Why an example gave no row: reason code -> sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCounts:
    """What happened to some examples. Every example and every token is counted once."""

    whole: int = 0  # examples with all their tokens
    turns_dropped: int = 0  # examples that lost turns, the remaining turns whole
    truncated: int = 0  # examples with a turn that is not whole
    dropped: Mapping[str, int]  # examples that gave no row, by reason
    tokens_kept: int = 0
    tokens_cut: int = 0  # of examples that gave a row
    tokens_dropped: int = 0  # of examples that gave none

    @property
    def examples(self) -> int:
        return self.whole + self.turns_dropped + self.truncated + sum(self.dropped.values())

    def __add__(self, other: FitCounts) -> FitCounts:
        dropped = Counter(self.dropped) + Counter(other.dropped)
        names = [one.name for one in fields(self) if one.name != "dropped"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return FitCounts(dropped=dict(sorted(dropped.items())), **sums)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FitPlan:
    """The tokens that each example keeps: 0..head and start..stop, counted from its start."""

    head: OffsetArray  # (examples,)
    start: OffsetArray  # (examples,) head <= start <= stop
    stop: OffsetArray  # (examples,) all three are 0 for an example that gives no row
    dropped: Mapping[str, OffsetArray]  # reason -> the examples that give no row, ascending
    sizes: OffsetArray  # (examples,) tokens of each example
    partial: BoolArray  # (examples,) whether its row holds a turn that is not whole

    @property
    def lengths(self) -> OffsetArray:
        """(examples,) tokens of each row; 0 for an example that gives none."""
        return self.head + self.stop - self.start

    @property
    def kept(self) -> OffsetArray:
        """The examples that give a row, ascending."""
        return np.flatnonzero(self.stop)

    @property
    def counts(self) -> FitCounts:
        kept = self.lengths
        gives_row = kept > 0
        cut = gives_row & (kept < self.sizes)
        num_kept, of_rows = int(kept.sum()), int(self.sizes[gives_row].sum())
        return FitCounts(
            whole=int((gives_row & ~cut).sum()),
            turns_dropped=int((cut & ~self.partial).sum()),
            truncated=int((cut & self.partial).sum()),
            dropped={reason: len(who) for reason, who in self.dropped.items()},
            tokens_kept=num_kept,
            tokens_cut=of_rows - num_kept,
            tokens_dropped=int(self.sizes.sum()) - of_rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedRows:
    """Examples as rows of one length, not shifted. Row i is example `plan.kept[i]`."""

    ids: OffsetArray  # (n, seq_len + 1) int64, padded on the right
    mask: BoolArray  # (n, seq_len + 1) True where this token is a training target
    plan: FitPlan


def fit_rows(
    examples: ChatExamples, seq_len: int, *, fit: Fit = Fit.DROP_OLDEST_TURNS, pad_id: int
) -> FittedRows:
    """Rows of seq_len + 1 tokens, in the order of the examples."""
    pad_id = whole_number(pad_id, "pad_id", least=0)
    plan = plan_fit(examples, seq_len, fit)
    ids: IntArray = examples.ids.values
    mask = examples.mask
    if plan.lengths.sum() < len(ids):
        # head 2, start 3, stop 5 of 6 tokens: 2 stay, 1 goes, 2 stay, 1 goes.
        rest = plan.sizes - plan.stop
        runs = np.stack([plan.head, plan.start - plan.head, plan.stop - plan.start, rest], axis=1)
        stays = np.repeat(np.tile([True, False], 2 * len(runs)), runs.reshape(-1))
        ids, mask = ids[stays], mask[stays]
    lengths = plan.lengths[plan.kept]
    filled = np.arange(seq_len + 1) < lengths[:, None]
    rows = np.full(filled.shape, pad_id, np.int64)
    rows[filled] = ids
    trained = np.zeros(filled.shape, np.bool_)
    trained[filled] = mask
    return FittedRows(ids=rows, mask=trained, plan=plan)


def plan_fit(examples: ChatExamples, seq_len: int, fit: Fit) -> FitPlan:
    """Which tokens of each example its row of seq_len + 1 tokens holds."""
    row_len = whole_number(seq_len, "seq_len") + 1
    if fit not in list(Fit):
        raise OptionError(f"{{fit}}: wanted one of {', '.join(Fit)}", fit=fit)
    layout = _layout(examples)
    lengths = layout.end - layout.begin
    trains = layout.last > layout.begin  # the first token of a row is no label
    head, start, stop = np.zeros_like(lengths), np.zeros_like(lengths), lengths * trains
    dropped = {"nothing_trained_in_row": ~trains}
    partial = np.zeros_like(trains)
    long = np.flatnonzero(stop > row_len)
    if len(long) and fit == Fit.ERROR:
        raise OptionError(
            f"example {long[0]} of this batch has {lengths[long[0]]:,} tokens, a row holds "
            f"{row_len:,} (seq_len + 1); {len(long):,} of {len(lengths):,} examples are too long: "
            f"use a larger seq_len, or another fit than 'error' ({', '.join(Fit)})"
        )
    if len(long) and fit == Fit.DROP:
        stop[long] = 0
        dropped["too_long"] = trains & (stop == 0)
    elif len(long):
        few = replace(
            layout, begin=layout.begin[long], end=layout.end[long], last=layout.last[long]
        )
        head[long], first, after = _CUTS[Fit(fit)](few, row_len)
        start[long], stop[long] = first - few.begin, after - few.begin
        starts_inside = (first > few.begin) & (_first_from(few.turns, first) != first)
        stops_inside = (after < few.end) & (_first_from(few.turns, after) != after)
        partial[long] = starts_inside | stops_inside
        if fit == Fit.TRUNCATE_RIGHT:
            idle = long[_last_before(few.trained, after) <= first]
            stop[idle] = 0
            dropped["nothing_trained_in_row"][idle] = True
    return FitPlan(
        head=head,
        start=start,
        stop=stop,
        dropped={reason: np.flatnonzero(who) for reason, who in dropped.items() if who.any()},
        sizes=lengths,
        partial=partial,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Some examples as positions in the flat array of all tokens."""

    begin: OffsetArray  # (n,) where each example begins
    end: OffsetArray  # (n,) and ends
    last: OffsetArray  # (n,) its last trained token; before `begin` if nothing is trained
    turns: OffsetArray  # (turns + 1,) starts of the turns of all examples, and a sentinel
    roles: npt.NDArray[np.uint8]  # (turns,)
    trained: OffsetArray  # positions of all trained tokens


def _layout(examples: ChatExamples) -> _Layout:
    offsets, total = examples.ids.offsets, len(examples.ids.values)
    turns, roles = examples.turn_starts, examples.turn_roles
    if examples.mask.shape != (total,) or turns.shape != roles.shape:
        raise OptionError(
            f"examples of {total:,} tokens with a mask of shape {examples.mask.shape}, "
            f"{len(turns):,} turn starts and {len(roles):,} turn roles: wanted one mask value "
            "per token and one role per turn"
        )
    trained = np.flatnonzero(examples.mask)
    last = _last_before(trained, offsets[1:])
    return _Layout(offsets[:-1], offsets[1:], last, np.append(turns, total + 1), roles, trained)


# Where each policy cuts examples that are too long and train something: (head, start, stop) in the
# flat array. All but `_keep_first` keep the last trained token.

Cuts = tuple[OffsetArray, OffsetArray, OffsetArray]


def _keep_first(layout: _Layout, row_len: int) -> Cuts:
    """truncate-right. The row may train nothing; the caller checks."""
    return np.zeros_like(layout.begin), layout.begin, layout.begin + row_len


def _keep_last(layout: _Layout, row_len: int) -> Cuts:
    """truncate-left: the last tokens up to the end of the last trained turn."""
    stop = _stop(layout, row_len)
    return np.zeros_like(stop), np.maximum(layout.begin, stop - row_len), stop


def _drop_oldest_turns(layout: _Layout, row_len: int) -> Cuts:
    """Steps 1 to 4 of the module docstring; each overrides the one before where that is too long.

    Example: prefix b, turns S U A U A, a row of 7:

        b S S U U A A A U A A   has 11 tokens, wanted 7
        b S S . . . . . U A A   step 2: head 3, from the second U on
    """
    stop = _stop(layout, row_len)
    begin, last, exchanges = layout.begin, layout.last, _exchanges(layout)
    # Step 2: the first exchange that fits after everything that precedes the exchanges.
    first = _first_from(exchanges, begin)
    head = np.where(first <= last, first - begin, 0)
    start = _first_from(exchanges, stop - (row_len - head))
    # Steps 3 and 4: what fits after the prefix alone, a whole turn of the last exchange or a tail.
    first_turn = _first_from(layout.turns, begin)
    prefix = np.where(first_turn <= last, first_turn - begin, 0)  # 0 for examples without turns
    prefix = np.where(prefix <= row_len // 4, prefix, 0)
    tail = stop - (row_len - prefix)
    turn = _first_from(layout.turns, np.maximum(tail, _last_before(exchanges, last + 1)))
    hard = np.where(turn <= last - (prefix == 0), turn, tail)
    too_long = start > last - (head == 0)
    head, start = np.where(too_long, prefix, head), np.where(too_long, hard, start)
    # Step 1 alone.
    enough = stop - begin <= row_len
    return np.where(enough, 0, head), np.where(enough, begin, start), stop


_CUTS: Mapping[Fit, Callable[[_Layout, int], Cuts]] = {
    Fit.DROP_OLDEST_TURNS: _drop_oldest_turns,
    Fit.TRUNCATE_LEFT: _keep_last,
    Fit.TRUNCATE_RIGHT: _keep_first,
}


def _stop(layout: _Layout, row_len: int) -> OffsetArray:
    """The end of the last trained turn, or of its last trained token if much follows that."""
    turn_end = np.minimum(_first_from(layout.turns, layout.last + 1), layout.end)
    untrained = turn_end - layout.last - 1
    return np.where(untrained <= row_len // 4, turn_end, layout.last + 1)


def _exchanges(layout: _Layout) -> OffsetArray:
    """Where the exchanges of these examples start, and the sentinel.

    Exchanges of other examples may be wrong or missing.
    """
    roles, turns = layout.roles, layout.turns
    answers = (roles == ASSISTANT) | (roles == TOOL)
    begins = np.zeros(len(turns), np.bool_)
    begins[1:-1] = answers[:-1] & ~answers[1:]
    begins[np.searchsorted(turns, layout.begin)] = False  # the answer before is another example's
    talk = np.flatnonzero(roles != SYSTEM)
    at = np.searchsorted(turns[talk], layout.begin)
    begins[talk[at[at < len(talk)]]] = True
    begins[-1] = True
    return turns[begins]


def _last_before(positions: OffsetArray, limit: OffsetArray) -> OffsetArray:
    """The last of the ascending `positions` before each limit, in any example; else -1."""
    if not len(positions):
        return np.full_like(limit, -1)
    at = np.searchsorted(positions, limit) - 1
    return np.where(at < 0, -1, positions[at])


def _first_from(positions: OffsetArray, least: OffsetArray) -> OffsetArray:
    """The first of the ascending `positions` from `least` on; the last if there is none."""
    at = np.searchsorted(positions, least)
    return positions[np.minimum(at, len(positions) - 1)]
