"""Which split gets which document, and where a budget cuts.

In: document lengths, in order.  Out: placements.
Promise: every document and token is in exactly one place: a split, or over budget; a document
belongs to one split only; the result does not depend on how the documents were batched.
Not here: tokens. These functions see lengths only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from shardmill.records import IntArray, OffsetArray, Ragged

_LONG_DOCUMENT = 300  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Documents `start..stop` of the batch go to `split`; the last loses `cut` tokens."""

    split: str | None  # None: over budget, all of it
    start: int
    stop: int
    cut: int = 0


class Filler:
    """Fills splits one after the other, each up to its limit. The one owner of the budget rule."""

    def __init__(
        self,
        fill: tuple[tuple[str, int | None], ...],
        filled: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`filled` tells the tokens that splits hold already."""
        self._open = [
            (split, limit) for split, limit in fill if limit is None or filled.get(split, 0) < limit
        ]
        self._tokens = filled.get(self._open[0][0], 0) if self._open else 0

    @property
    def full(self) -> bool:
        return not self._open

    def advance(self, lengths: OffsetArray) -> None:
        """Count documents that are placed elsewhere or later."""
        for _ in self.place(lengths):
            pass

    def place(self, lengths: OffsetArray) -> Iterator[Placement]:
        """Where the next documents go. `lengths` are all above 0."""
        ends = np.cumsum(lengths)
        start = 0
        while start < len(lengths):
            if self.full:
                yield Placement(split=None, start=start, stop=len(lengths))
                return
            split, limit = self._open[0]
            before = int(ends[start - 1]) if start else 0
            room = None if limit is None else limit - self._tokens
            if room is None or ends[-1] - before < room:
                self._tokens += int(ends[-1]) - before
                yield Placement(split=split, start=start, stop=len(lengths))
                return
            # The first document whose end reaches the limit closes the split.
            stop = int(np.searchsorted(ends, before + room, side="left")) + 1
            cut = int(ends[stop - 1]) - before - room
            self._open.pop(0)
            self._tokens = 0
            yield Placement(split=split, start=start, stop=stop, cut=cut)
            start = stop


def take(documents: Ragged, placement: Placement) -> Ragged:
    """The documents of a placement with the cut applied, without copying tokens."""
    part = documents.slice(placement.start, placement.stop)
    if not placement.cut:
        return part
    offsets = part.offsets.copy()
    offsets[-1] -= placement.cut
    return Ragged(part.values[: offsets[-1]], offsets)


def append_to_each(documents: Ragged, token: int, dtype: npt.DTypeLike) -> Ragged:
    """Each document with `token` behind it, in `dtype`, which holds every id.

    [4 5 | 6] with 9 -> [4 5 9 | 6 9]: document i moves right by i.
    """
    offsets = documents.offsets + np.arange(len(documents) + 1)
    values: IntArray = np.empty(offsets[-1], dtype)
    values[offsets[1:] - 1] = token
    if len(values) > _LONG_DOCUMENT * len(documents):
        # Few long documents: a copy of each is quicker than a mask over every token.
        for (start, stop), first in zip(
            pairwise(documents.offsets.tolist()), offsets.tolist(), strict=False
        ):
            values[first : first + stop - start] = documents.values[start:stop]
        return Ragged(values, offsets)
    is_text = np.ones(len(values), bool)
    is_text[offsets[1:] - 1] = False
    values[is_text] = documents.values
    return Ragged(values, offsets)
