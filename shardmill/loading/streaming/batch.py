"""Rows become a batch: inputs, labels, segments, all of one shape.

In: rows of seq_len + 1 tokens with their segments.  Out: a `Batch` [A, B, T] of fresh arrays.
Promise: the only place of this room where tokens are shifted. A label is trained on unless it is
padding, or the loss rules take it out.
Not here: making rows, filling up the last batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.loading.streaming.records import Tokens
from shardmill.records import Batch, next_token_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRules:
    """Which labels besides padding are not trained on."""

    mask_boundary_loss: bool = True  # the label that belongs to the next document
    train_on_eos: bool = True  # False: labels that are `eos_id` are not trained on
    eos_id: int | None = None

    def __post_init__(self) -> None:
        if not self.train_on_eos and self.eos_id is None:
            raise OptionError(
                "train_on_eos=False needs eos_id, the id that is not trained on, found None: give "
                "a tokenizer with an EOS, or keep train_on_eos=True"
            )


def make_batch(tokens: Tokens, segments: Tokens, *, grad_accum: int, loss: LossRules) -> Batch:
    """(A * B, T + 1) arrays as [A, B, T]: rows 0..B-1 are the first microbatch."""
    grad_accum = whole_number(grad_accum, "grad_accum")
    _check_shapes(tokens, segments, grad_accum)
    shape = (grad_accum, len(tokens) // grad_accum, tokens.shape[1] - 1)
    trained = segments != 0  # padding is not
    if loss.mask_boundary_loss:
        trained[:, 1:] &= segments[:, :-1] == segments[:, 1:]
    if not loss.train_on_eos:
        trained &= tokens != loss.eos_id
    input_ids, labels = next_token_pairs(tokens, trained, dtype=np.int32)
    segment_ids = np.array(segments[:, :-1], dtype=np.int32, order="C")
    return Batch(
        input_ids=input_ids.reshape(shape),
        labels=labels.reshape(shape),
        attention_mask=(segment_ids > 0).reshape(shape),
        segment_ids=segment_ids.reshape(shape),
    )


def _check_shapes(tokens: Tokens, segments: Tokens, grad_accum: int) -> None:
    if tokens.ndim != 2 or tokens.shape != segments.shape or tokens.shape[1] < 2:
        raise OptionError(
            f"tokens {tokens.shape} and segments {segments.shape}: wanted two arrays of one shape "
            "(rows, seq_len + 1)"
        )
    if not len(tokens) or len(tokens) % grad_accum:
        raise OptionError(
            f"{len(tokens):,} rows: wanted a positive multiple of grad_accum={grad_accum:,}"
        )
