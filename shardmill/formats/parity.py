"""Compare two forms of the same data, token for token, however each is divided.

They are equal to the last token, document end and mask, or an error names the first difference.
Memory is that of what the streams yield at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardmill.errors import DamagedStoreError
from shardmill.records import JSON, IntArray, Ragged

_NONE: IntArray = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was compared and found equal."""

    unit: str  # "bins" or "documents"
    num_units: int
    num_tokens: int

    def to_json(self) -> dict[str, JSON]:
        return {"equal": True, self.unit: self.num_units, "tokens": self.num_tokens}


def check_documents(first: Iterable[Ragged], second: Iterable[Ragged], where: str) -> Parity:
    """Compare the ids and the length of every document. `where` names both sides."""
    streams = (iter(first), iter(second))
    rests = [Ragged(np.empty(0, np.int64), np.zeros(1, np.int64))] * 2  # not yet compared
    num_documents = num_tokens = 0
    while True:
        for side in (0, 1):
            while not len(rests[side]) and (batch := next(streams[side], None)) is not None:
                rests[side] = batch
        left, right = rests
        count = min(len(left), len(right))
        if not count:
            break
        one, other = left.slice(0, count), right.slice(0, count)
        if not np.array_equal(one.lengths, other.lengths):
            lengths = (one.lengths, other.lengths)
            raise difference(where, "the lengths of documents", *lengths, num_documents)
        if not np.array_equal(one.values, other.values):
            raise difference(where, "the token ids", one.values, other.values, num_tokens)
        num_documents += count
        num_tokens += len(one.values)
        rests = [left.slice(count, len(left)), right.slice(count, len(right))]
    if len(rests[0]) or len(rests[1]):
        raise difference(where, "one has more documents or tokens than the other")
    return Parity(unit="documents", num_units=num_documents, num_tokens=num_tokens)


def difference(
    where: str, what: str, left: IntArray = _NONE, right: IntArray = _NONE, before: int = 0
) -> DamagedStoreError:
    """The error for two forms that are not equal. `before`: what was equal before these arrays."""
    if left is not right:
        count = min(len(left), len(right))
        places = np.flatnonzero(left[:count] != right[:count])
        what += f" differ at {before + (int(places[0]) if len(places) else count):,}"
    return DamagedStoreError(
        f"{where}: not the same data: {what}; a file was changed or damaged meanwhile: remove the "
        "copy and convert again"
    )
