"""Conversations of a store as rows of one length.

In: a store, a split, `seq_len`, a fit; then example numbers.  Out: rows, or inputs and labels.
Promise: a row is a function of its example, `seq_len` and the fit, not of the batch it comes in;
every row trains at least one token; an example that gives no row is told by number and reason,
and nothing takes its place: those with an excluded token are among them. The store is not touched:
another `seq_len` needs no build.
Not here: which examples come when (sampling), several examples in one row (packing).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.chat.fit import (
    Fit,
    FitCounts,
    FitPlan,
    FittedRows,
    collate_rows,
    fit_rows,
    plan_fit,
)
from shardmill.errors import OptionError
from shardmill.mapped import ChatSpace
from shardmill.mapped.space import ReaderName
from shardmill.records import IGNORE_INDEX, BoolArray, ChatExamples, IntArray, OffsetArray
from shardmill.shards import Manifest, open_store, read_exclusions
from shardmill.shards.exclude_entries import touched

log = logging.getLogger(__name__)
_CHUNK = 4096  # examples planned at a time
_IDLE = "nothing_trained_in_row"

EXCLUDED = "excluded"
"""The reason of an example that has an excluded token."""


class ChatBatch(TypedDict):
    """Inputs and labels of n examples."""

    input_ids: IntArray  # (n, seq_len) int64
    labels: IntArray  # (n, seq_len) int64; the next token, or IGNORE_INDEX where it is not trained
    loss_mask: BoolArray  # (n, seq_len) where labels count
    examples: OffsetArray  # (n,) the number of the example in each row


class ChatRows:
    """The conversations of a split, each as a row of `seq_len + 1` tokens."""

    def __init__(
        self,
        folder: str | Path,
        split: str = "train",
        *,
        seq_len: int,
        fit: Fit | str = Fit.DROP_OLDEST_TURNS,
        pad_id: int | None = None,
        reader: ReaderName = "auto",
    ) -> None:
        """`pad_id` None: the end of a turn, as the store's template has it. `reader`: as in
        `TokenSource`."""
        store = open_store(folder)
        self.space = ChatSpace(store, split, reader=reader)
        self.seq_len = whole_number(seq_len, "seq_len")
        if fit not in list(Fit):
            raise OptionError(f"fit={fit!r}: wanted one of {', '.join(Fit)}")
        self.fit = Fit(fit)
        self.pad_id = checked_pad_id(store.manifest, str(store.folder), pad_id)
        self._spans = read_exclusions(store).spans(split)  # as they were when it was opened
        self._told = False

    def __len__(self) -> int:
        """Examples of the split, those included that give no row at this length."""
        return len(self.space)

    def rows(self, indices: npt.ArrayLike) -> FittedRows:
        """The rows of these examples. `kept` and `dropped` count within `indices`."""
        examples, excluded = self._examples(indices)
        rows = fit_rows(examples, self.seq_len, fit=self.fit, pad_id=self.pad_id)
        if excluded.any():
            plan = _with_reason(rows.plan, excluded)
            rows = replace(rows, plan=plan, dropped=plan.dropped, counts=plan.counts)
        if rows.dropped and not self._told:
            self._told = True
            log.warning(
                "%r: some examples give no row (%s); `fit_counts()` counts them all",
                self,
                ", ".join(f"{reason}: {len(who):,}" for reason, who in rows.dropped.items()),
            )
        return rows

    def batch(self, indices: npt.ArrayLike) -> ChatBatch:
        """Inputs and labels, shifted. An example without a row is missing in `examples`."""
        rows = self.rows(indices)
        x, y, loss_mask = collate_rows(rows, IGNORE_INDEX)
        chosen = np.asarray(indices, np.int64)[rows.kept]
        return ChatBatch(input_ids=x, labels=y, loss_mask=loss_mask, examples=chosen)

    def fit_counts(self) -> FitCounts:
        """What becomes of every example and token of the split. Reads all of it, in parts."""
        starts = range(0, len(self), _CHUNK)
        parts = [np.arange(start, min(start + _CHUNK, len(self))) for start in starts]
        return reduce(add, (self._plan(part).counts for part in parts), FitCounts(dropped={}))

    def _plan(self, indices: OffsetArray) -> FitPlan:
        examples, excluded = self._examples(indices)
        plan = plan_fit(examples, self.seq_len, self.fit)
        return _with_reason(plan, excluded) if excluded.any() else plan

    def _examples(self, indices: npt.ArrayLike) -> tuple[ChatExamples, BoolArray]:
        """These examples, and which are excluded: those train nothing, so they give no row."""
        examples = self.space.examples(indices)
        if not len(self._spans):
            return examples, np.zeros(len(examples.ids), np.bool_)
        excluded = touched(self._spans, *self.space.spans(indices))
        mask = examples.mask & ~np.repeat(excluded, examples.ids.lengths)
        return replace(examples, mask=mask), excluded

    def __repr__(self) -> str:
        return (
            f"ChatRows({str(self.space.store.folder)!r}, {self.space.split!r}, "
            f"seq_len={self.seq_len:,}, fit={self.fit.value!r}, examples={len(self):,})"
        )


def _with_reason(plan: FitPlan, excluded: BoolArray) -> FitPlan:
    """The excluded ones told as such."""
    idle = plan.dropped[_IDLE]
    dropped = {**plan.dropped, _IDLE: idle[~excluded[idle]], EXCLUDED: np.flatnonzero(excluded)}
    left = {reason: who for reason, who in dropped.items() if len(who)}
    counts = replace(plan.counts, dropped={reason: len(who) for reason, who in left.items()})
    return replace(plan, dropped=left, counts=counts)


def _end_ids(options: Mapping[str, Any]) -> list[Any]:
    """What ends a turn, as the template says; none when the manifest says something else there."""
    found: Any = options
    for key in ("chat", "template", "end_ids"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, list) else []


def checked_pad_id(manifest: Manifest, where: str, asked: int | None) -> int:
    """The id asked for, or else the one that ends a turn in this store."""
    if asked is None:
        named = manifest.special_token_ids
        ends = _end_ids(manifest.options)
        asked = ends[-1] if ends else named.get("eot", named.get("eos"))
    if asked is None:
        raise OptionError(
            f"{where}: the store names no end of turn, 'eot' or 'eos' to pad with; pass pad_id, "
            "any id of the vocabulary: padding is never trained"
        )
    pad_id = whole_number(asked, "pad_id", least=0)
    if manifest.vocab_size is not None and pad_id >= manifest.vocab_size:
        raise OptionError(f"pad_id={pad_id:,}: the vocabulary has {manifest.vocab_size:,} ids")
    return pad_id
