"""How a template writes a trained assistant turn, learnt from the plainest conversations.

In: an example.  Out: its `Shape`; `Refuted` when the turn has none that could be right.
Promise: the shape holds the words first and, behind them, an end that the policy allows.
Not here: whether every other turn has the same shape (judge.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardmill.chat.proof.example import Example
from shardmill.chat.proof.reader import Reader
from shardmill.records import IntArray

TRIMS: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "both": str.strip,
    "left": str.lstrip,
    "right": str.rstrip,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """How a template writes every trained assistant turn."""

    opening: IntArray  # ids before the words
    tail: IntArray  # ids behind the end
    leads: tuple[str | None, ...]  # blanks each reading has before the words; None: no such reading
    end: str  # what is trained behind the words
    end_markers: list[int]
    trim: str = "none"  # one of TRIMS


def span(example: Example, turn: int) -> tuple[int, int]:
    """The trained part of a turn; empty at its end when there is none."""
    start, stop = example.bounds[turn : turn + 2]
    places = np.flatnonzero(example.mask[start:stop]) + start
    if not len(places):
        return stop, stop
    first, last = int(places[0]), int(places[-1]) + 1
    if last - first != len(places):
        raise example.refute("words", f"the trained part of turn {turn} has gaps")
    return first, last


def learn_shape(example: Example, turn: int, reader: Reader, markers: frozenset[int]) -> Shape:
    start, stop = example.bounds[turn : turn + 2]
    first, last = span(example, turn)
    if first == last:
        raise example.refute("words", f"turn {turn} must be trained, and is not")
    text = example.checked[example.groups[turn][-1]].text or ""
    read = reader.readings(example.ids, first, last)
    leads = tuple(_lead(found, text, reader.text(example.ids[first : first + 1])) for found in read)
    good = [found[len(lead) :] for lead, found in zip(leads, read, strict=True) if lead is not None]
    if not good:
        raise example.refute(
            "words", f"turn {turn} trains {read[0]!r}: wanted {text!r} and its end"
        )
    shape = Shape(
        opening=example.ids[start:first],
        tail=example.ids[last:stop],
        leads=leads,
        end=good[0][len(text) :],
        end_markers=markers_in(example.ids[first:last], markers),
    )
    _check_end(example, turn, shape, markers)
    return shape


def _check_end(example: Example, turn: int, shape: Shape, markers: frozenset[int]) -> None:
    behind = markers_in(shape.tail, markers)
    if example.policy.train_on_eot:
        if not shape.end_markers:
            raise example.refute(
                "end", f"turn {turn} trains no special token behind its words: nothing would stop"
            )
        if behind:
            raise example.refute("end", f"turn {turn} trains only a part of its end")
    elif shape.end_markers or shape.end.strip():
        raise example.refute(
            "end", f"turn {turn} trains {shape.end!r} behind its words, with train_on_eot=False"
        )


def _lead(found: str, text: str, first_token: str) -> str | None:
    """The blanks before the words, if they are part of the first word's own token."""
    lead = found[: len(found) - len(found.lstrip())]
    if not found[len(lead) :].startswith(text):
        return None
    return lead if not lead or first_token.strip() else None


def markers_in(ids: IntArray, markers: frozenset[int]) -> list[int]:
    return [number for number in ids.tolist() if number in markers]


def learn_trim(example: Example, shape: Shape, reader: Reader) -> str:
    """Which way of trimming makes the padded answer right."""
    turn = len(example.roles) - 1
    text = example.checked[-1].text or ""
    first, last = span(example, turn)
    read = reader.readings(example.ids, first, last)
    for name, trim in TRIMS.items():
        for lead, found in zip(shape.leads, read, strict=True):
            if lead is not None and found == lead + trim(text) + shape.end:
                return name
    raise example.refute(
        "words", f"turn {turn} trains {read[0]!r}: wanted {text + shape.end!r}, or trimmed"
    )
