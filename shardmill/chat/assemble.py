"""Texts and the fixed tokens around them, laid behind one another.

In: encoded texts, the form of each (which tokens stand left and right of it), whether it is
trained.  Out: the ids, which of them are trained, and where each text with its surroundings starts.
Promise: the ids of a text are copied as they are; the mask follows from the same numbers as the
ids, never from looking at them. Cost: a few passes over the tokens, none of them in Python.
Not here: what a form means (spec.py, bind.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from shardmill.records import BoolArray, IntArray, OffsetArray, Ragged

STRUCTURE, WORDS, END = 0, 1, 2
"""What a fixed token is: never trained; trained with its turn; its turn's end."""


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """Fixed tokens, encoded once."""

    ids: OffsetArray  # (n,)
    kinds: IntArray  # (n,) STRUCTURE, WORDS or END


NOTHING = Fixed(np.empty(0, np.int64), np.empty(0, np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What stands around a text."""

    left: tuple[Fixed, ...]
    right: tuple[Fixed, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """All texts with their surroundings."""

    values: IntArray  # (total,)
    mask: BoolArray  # (total,)
    offsets: OffsetArray  # (texts + 1,) text i with its surroundings is offsets[i]..offsets[i + 1]
    num_trained: OffsetArray  # (texts,) trained tokens of each


def assemble(
    texts: Ragged,
    numbers: IntArray,
    forms: Sequence[Form],
    trained: BoolArray,
    *,
    train_ends: bool,
) -> Assembled:
    """Text i stands between the fixed tokens of `forms[numbers[i]]`."""
    table = _table(forms, train_ends)
    sizes, left, right = texts.lengths, table.left.take(numbers), table.right.take(numbers)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(left + sizes + right, out=offsets[1:])
    # Fixed tokens left of a text, the text, fixed tokens right of it:  . . x x x . | . . x x .
    lengths = np.stack((left, sizes, right), axis=1).reshape(-1)
    flags = np.zeros((len(texts), 3), np.bool_)
    flags[:, 1] = trained
    mask: BoolArray = np.repeat(flags.reshape(-1), lengths)
    fixed, spots = table.places(numbers, offsets[:-1], sizes)
    is_text = np.ones(len(mask), np.bool_)
    is_text[spots] = False
    dtype = np.result_type(texts.values.dtype, np.min_scalar_type(int(table.ids.max(initial=0))))
    values: IntArray = np.empty(len(mask), dtype)
    values[is_text] = texts.values
    values[spots] = table.ids.astype(dtype).take(fixed)
    mask[spots] = table.wanted.take(fixed) & np.repeat(trained, left + right)
    num_trained = trained * (sizes + table.num_wanted.take(numbers))
    return Assembled(values, mask, offsets, num_trained)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The forms behind one another: form f is left[f] + right[f] tokens from starts[f] on."""

    ids: OffsetArray
    wanted: BoolArray  # which of the fixed tokens are trained when their turn is
    starts: OffsetArray
    left: OffsetArray
    right: OffsetArray
    num_wanted: OffsetArray  # per form

    def places(
        self, numbers: IntArray, offsets: OffsetArray, sizes: OffsetArray
    ) -> tuple[OffsetArray, OffsetArray]:
        """For every fixed token around the texts, in order: its place here, and in the result."""
        left, right = self.left.take(numbers), self.right.take(numbers)
        before = np.cumsum(left + right) - left - right
        from_table = self.starts.take(numbers) - before
        fixed: OffsetArray = np.repeat(from_table, left + right)
        count = np.arange(len(fixed))
        fixed += count
        # Those on the right of a text lie behind it, so as many places further as it is long.
        shifts = np.stack((offsets - before, offsets + sizes - before), axis=1)
        spots: OffsetArray = np.repeat(
            shifts.reshape(-1), np.stack((left, right), axis=1).reshape(-1)
        )
        spots += count
        return fixed, spots


def _table(forms: Sequence[Form], train_ends: bool) -> _Table:
    pieces = [NOTHING, *chain.from_iterable((*form.left, *form.right) for form in forms)]
    kinds = np.concatenate([piece.kinds for piece in pieces])
    wanted = (kinds == WORDS) | (kinds == END) if train_ends else kinds == WORDS
    left = np.array([_width(form.left) for form in forms], np.int64)
    right = np.array([_width(form.right) for form in forms], np.int64)
    ends = np.cumsum(left + right)
    wanted_before = np.concatenate(([0], np.cumsum(wanted)))
    return _Table(
        ids=np.concatenate([piece.ids for piece in pieces]),
        wanted=wanted,
        starts=ends - left - right,
        left=left,
        right=right,
        num_wanted=wanted_before[ends] - wanted_before[ends - left - right],
    )


def _width(pieces: tuple[Fixed, ...]) -> int:
    return sum(len(piece.ids) for piece in pieces)
