"""Examples to rows of one length, and rows to inputs and labels.

In: rendered examples of any length.  Out: (n, seq_len + 1) ids and mask; from them x, y, loss_mask.
Promise: every row trains at least one token whose label is inside it; ids and mask are cut
together; padding is never trained; every example is a row or among the drops, with a reason.
No loop over examples or tokens. What is left out is said in cuts.py, and by policy in
FIT_SENTENCES.
Not here: packing several examples into a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardmill.arguments import whole_number
from shardmill.chat.fit.plan import Fit, FitCounts, FitPlan, plan_fit
from shardmill.records import IGNORE_INDEX, BoolArray, ChatExamples, IntArray, OffsetArray


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


def next_token_pairs(
    ids: IntArray, mask: BoolArray, ignore_index: int = IGNORE_INDEX
) -> tuple[IntArray, IntArray, BoolArray]:
    """x, y, loss_mask, each one shorter than `ids` along the last axis. The one place that shifts.

    y[i] is the token behind x[i] where that is trained, else `ignore_index`; loss_mask[i] says
    which. All three are contiguous and share no memory with each other or the input.

        ids   1  4  9  2  5  9         x  1  4  9  2  5
        mask  .  .  .  .  x  x         y  .  .  .  5  9
    """
    loss_mask = mask[..., 1:].copy()
    y = np.full(loss_mask.shape, ignore_index, ids.dtype)
    np.copyto(y, ids[..., 1:], where=loss_mask)
    return ids[..., :-1].copy(), y, loss_mask


def collate_rows(
    rows: FittedRows, ignore_index: int = IGNORE_INDEX
) -> tuple[IntArray, IntArray, BoolArray]:
    """x, y (int64) and loss_mask (bool), each (n, seq_len)."""
    return next_token_pairs(rows.ids, rows.mask, ignore_index)
