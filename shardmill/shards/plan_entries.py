"""What a pack plan on disk says of itself, as frozen records.

In: nothing.  Out: the classes that the header of a plan is made of, and its arrays.
Promise: the types alone refuse unknown keys, missing keys, negative and absurd numbers;
`plan_problems` finds everything else that cannot be true of a plan without looking at its store.
Not here: bytes (plans.py), choosing rows (packing), the tokens (mapped).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from shardmill.records import IntArray
from shardmill.shards.entries import Count, Sha256

Algorithm: TypeAlias = Literal["best-fit", "first-fit", "first-fit-shuffle", "concatenate"]
LongRule: TypeAlias = Literal["error", "truncate", "split", "drop"]


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides which tokens share a row. Equal options, equal plan."""

    seq_len: Count  # inputs of a row; it has one token more
    algorithm: Algorithm = "best-fit"
    seed: Count | None = None  # of "first-fit-shuffle", and of no other
    max_per_row: Count | None = None  # pieces
    align_to: Count = 1  # every piece starts at a multiple of it; seq_len is one
    long: LongRule = "error"  # what becomes of an example over `capacity` tokens

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for: `seq_len + 1`. With `align_to` above 1 `seq_len`, which
        is a multiple of it, so that the last piece too can be rounded up; the token behind is
        then padding in every row."""
        return self.seq_len + 1 if self.align_to == 1 else self.seq_len


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pieces that are in no row, for one reason."""

    pieces: Count
    tokens: Count
    labels: Count  # trained ones among them


class PlanMetrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How well rows are filled, and where every token and every trained label went.

    `num_tokens - repeated_tokens + truncated_tokens` and the tokens left out are all tokens of the
    split; `trained_labels + truncated_labels` and the labels left out are all its labels: its
    trained tokens but those that are the first of their example, which nothing predicts.
    A token that a piece in a row and one left out share is in the row, so it is not left out.
    """

    num_rows: Count
    lower_bound: Count  # no plan of these pieces has less rows
    num_examples: Count
    num_empty: Count  # examples without tokens
    num_pieces: Count  # in rows
    num_tokens: Count  # in rows
    repeated_tokens: Count  # in two rows: the last of a piece is the first of the next, if split
    trained_labels: Count
    num_split: Count  # examples
    num_truncated: Count
    truncated_tokens: Count
    truncated_labels: Count
    left_out: dict[str, LeftOut]  # by reason, each of REASONS


class PlanFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of which store a plan is, how it was made, and what came of it."""

    store: Sha256  # fingerprint: a plan means these tokens and no others
    split: str
    options: PlanOptions
    metrics: PlanMetrics

    @property
    def row_len(self) -> int:
        """Tokens of a row, padding included."""
        return self.options.seq_len + 1

    @property
    def utilisation(self) -> float:
        """Tokens for each place of a row, 0 to 1; 1 when there are no rows."""
        places = self.metrics.num_rows * self.row_len
        return self.metrics.num_tokens / places if places else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanArrays:
    """Rows as lists of pieces. A piece is a whole example, unless it is among the cuts.

    Pieces of all rows behind one another are numbered; cuts are told by that number.
    """

    counts: IntArray  # (rows,) pieces of each row, at least 1
    examples: IntArray  # (pieces,) which example each is of
    cut_pieces: IntArray  # (cuts,) numbers of pieces, rising
    cut_starts: IntArray  # (cuts,) such a piece is start..stop of its example
    cut_stops: IntArray
    too_long: IntArray  # numbers of the examples left out for this reason, rising
    trains_nothing: IntArray  # the same, once for each piece that was left out


NAMES = tuple(PlanArrays.__dataclass_fields__)
REASONS = ("too_long", "trains_nothing")
"""Why a piece is in no row; each is also the name of an array."""


def option_problems(options: PlanOptions) -> Iterator[str]:
    """What cannot be asked of a plan, found and wanted."""
    seq_len, step = options.seq_len, options.align_to
    if not 1 <= seq_len < 2**31 - 1:
        yield f"seq_len={seq_len:,}: wanted 1 to {2**31 - 2:,}"
    elif step < 1 or seq_len % step:
        near = max(seq_len // max(step, 1), 1) * max(step, 1)
        yield f"seq_len={seq_len:,} is no multiple of align_to={step:,}; take seq_len={near:,}"
    if (options.algorithm == "first-fit-shuffle") != (options.seed is not None):
        needs = "needs a seed" if options.seed is None else "takes no seed: it shuffles nothing"
        yield f"algorithm={options.algorithm!r} {needs}"
    if options.max_per_row == 0:
        yield "max_per_row=0: wanted at least 1"


def plan_problems(facts: PlanFacts, arrays: PlanArrays) -> Iterator[str]:
    """What cannot be true of any plan, most telling first."""
    metrics, counts = facts.metrics, arrays.counts
    yield from option_problems(facts.options)
    pieces = len(arrays.examples)
    found = len(counts), pieces, int(counts.sum(dtype=np.int64))
    if found != (metrics.num_rows, metrics.num_pieces, metrics.num_pieces):
        yield f"rows, pieces, pieces of all rows are {found}, but its metrics say otherwise"
    if len(counts) and not 1 <= counts.min() <= counts.max() <= _most_pieces(facts.options):
        yield f"rows of {counts.min():,} to {counts.max():,} pieces"
    left_out = {name: entry.pieces for name, entry in metrics.left_out.items()}
    if left_out != {name: len(getattr(arrays, name)) for name in REASONS}:
        yield f"other pieces are listed as left out than its metrics say: {left_out}"
    for name in ("examples", *REASONS):
        numbers = getattr(arrays, name)
        if len(numbers) and numbers.max() >= metrics.num_examples:
            yield f"{name}: example {numbers.max():,} of {metrics.num_examples:,}"
    yield from _cut_problems(arrays, pieces)


def _most_pieces(options: PlanOptions) -> int:
    """Every piece takes a place of its own."""
    most = -(-options.capacity // max(options.align_to, 1))
    return most if options.max_per_row is None else min(most, options.max_per_row)


def _cut_problems(arrays: PlanArrays, pieces: int) -> Iterator[str]:
    cuts = arrays.cut_pieces
    if not len(cuts) == len(arrays.cut_starts) == len(arrays.cut_stops):
        yield "its cuts have other numbers of starts and stops"
    elif len(cuts) and ((cuts[1:] <= cuts[:-1]).any() or cuts[-1] >= pieces):
        yield f"its cuts do not rise within the {pieces:,} pieces"
    elif (arrays.cut_starts >= arrays.cut_stops).any():
        yield "a cut without tokens"
