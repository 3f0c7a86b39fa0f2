"""Which samples are not given, and what is given in their place.

In: excluded spans of a split, how a source is cut into items; then items that an order gave.
Out: the same items, those excluded replaced by stand-ins of the same source.
Promise: an item with an excluded token is never given. Its stand-in is a pure function of (seed,
name, epoch, item) and of what is excluded: the first item behind it that is not, in an order drawn
for that. So no other item moves, and more exclusions change a stand-in only when they meet it.
Without exclusions nothing is computed. Nothing grows with the source.
Not here: the file (shards), raw tokens: `open_tokens` and the like do not know exclusions.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shardmill.errors import OptionError, StateMismatchError
from shardmill.records import JSON, BoolArray, OffsetArray
from shardmill.sampling import Permutation
from shardmill.sampling.order import by_value
from shardmill.sampling.seeds import fingerprint_of
from shardmill.store.exclusions import count_tokens, merge_spans, touched
from shardmill.store.readers import PackSpace

log = logging.getLogger(__name__)

_WALK = 64  # items looked at one after the other, before those that are left are listed
_FEW = 2**16  # items that may be listed
_PIECES = 2**20  # of a plan, looked at together


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExcludedItems:
    """What a source does not give. It pickles by value, so a copy gives what the first one does."""

    name: str  # of the source: part of what decides stand-ins
    num_items: int  # of the source
    ranges: OffsetArray  # (k, 2) the items that are not given, start and stop, merged
    num_tokens: int  # excluded ones of the split
    sha256: str  # of the excluded spans

    @property
    def num_excluded(self) -> int:
        return count_tokens(self.ranges)

    @property
    def num_left(self) -> int:
        return self.num_items - self.num_excluded

    def hits(self, items: OffsetArray) -> BoolArray:
        """Which of these items are not given."""
        # edges of the ranges rise, each once: behind an odd number of them is inside a range
        inside: BoolArray = (self.ranges.reshape(-1).searchsorted(items, side="right") & 1) == 1
        return inside

    def left(self) -> OffsetArray:
        """The items that are given, all of them. For few."""
        edges = np.concatenate(([0], self.ranges.reshape(-1), [self.num_items])).reshape(-1, 2)
        parts = [np.arange(start, stop) for start, stop in edges.tolist()]
        return np.concatenate(parts)

    def replace(self, items: OffsetArray, epochs: OffsetArray, *, seed: int) -> OffsetArray:
        """The items with stand-ins for those that are not given."""
        places = np.flatnonzero(self.hits(items))
        if not len(places):
            return items
        self.check_left()
        replaced = items.copy()
        for epoch, chosen in by_value(epochs[places]):
            own = places[chosen]
            path = ("source", self.name, "epoch", epoch, "stand-in")
            replaced[own] = stand_ins(items[own], self, Permutation(self.num_items, seed, *path))
        return replaced

    def check_left(self) -> None:
        if not self.num_left:
            raise OptionError(
                f"source {self.name!r}: all of its {self.num_items:,} samples have an excluded "
                f"token, so nothing can take their place; give it weight 0, leave it out, or take "
                f"an entry back with `shardmill exclude --remove`"
            )


@runtime_checkable
class Excluding(Protocol):
    """A source that knows exclusions."""

    excluded: ExcludedItems | None  # None: it gives all its items


def stand_ins(items: OffsetArray, excluded: ExcludedItems, order: Permutation) -> OffsetArray:
    """For each item the first one behind it in `order`, round and round, that is given."""
    places, found = order.find(items), items.copy()
    waiting = np.arange(len(items))
    walked = 0
    while len(waiting):
        if walked >= _WALK and excluded.num_left <= _FEW:
            found[waiting] = _nearest(places[waiting], excluded.left(), order)
            break
        places[waiting] = (places[waiting] + 1) % excluded.num_items
        found[waiting] = order.take(places[waiting])
        waiting = waiting[excluded.hits(found[waiting])]
        walked += 1
    return found


def _nearest(places: OffsetArray, left: OffsetArray, order: Permutation) -> OffsetArray:
    """The same without walking: the next of all items that are left."""
    at = order.find(left)
    by_place = np.argsort(at)
    following = at[by_place].searchsorted(places, side="right") % len(left)
    return left[by_place[following]]


def excluded_windows(
    spans: OffsetArray, *, name: str, num_items: int, stride: int, length: int
) -> ExcludedItems | None:
    """Of items that are `length` tokens, one every `stride` tokens; None: none is excluded.

    stride 4, length 5, span 8..9: windows 1 (4..9) and 2 (8..13).
    """
    if not len(spans):
        return None
    first = (spans[:, 0] - length) // stride + 1
    behind = (spans[:, 1] - 1) // stride + 1
    ranges = merge_spans(np.stack((first, behind), axis=1).clip(0, num_items))
    return _excluded(spans, ranges, name=name, num_items=num_items)


def excluded_rows(spans: OffsetArray, space: PackSpace, *, name: str) -> ExcludedItems | None:
    """Of the rows of a pack plan: those with a piece that has an excluded token."""
    if not len(spans):
        return None
    starts = np.asarray(space.store.document_starts(space.split))
    stops = np.append(starts[1:], space.store.num_tokens(space.split))
    hit, examples = touched(spans, starts, stops), space.plan.arrays.examples
    ends = np.cumsum(space.plan.arrays.counts, dtype=np.int64)
    rows = [NO_ROWS]
    for begin in range(0, len(examples), _PIECES):
        pieces = begin + np.flatnonzero(hit[examples[begin : begin + _PIECES]])
        rows.append(np.unique(ends.searchsorted(pieces, side="right")))
    candidates = np.unique(np.concatenate(rows))
    met = candidates[_rows_met(spans, space, candidates)]  # a cut piece may end before the span
    ranges = merge_spans(np.stack((met, met + 1), axis=1))
    return _excluded(spans, ranges, name=name, num_items=len(space))


NO_ROWS: OffsetArray = np.empty(0, np.int64)


def _rows_met(spans: OffsetArray, space: PackSpace, rows: OffsetArray) -> BoolArray:
    found = space.pieces(rows)
    met = touched(spans, found.starts, found.starts + found.lengths)
    row = np.repeat(np.arange(len(rows)), np.diff(found.offsets))
    return np.bincount(row[met], minlength=len(rows)) > 0


def _excluded(
    spans: OffsetArray, ranges: OffsetArray, *, name: str, num_items: int
) -> ExcludedItems | None:
    if not len(ranges):
        return None
    return ExcludedItems(
        name=name,
        num_items=num_items,
        ranges=ranges,
        num_tokens=count_tokens(spans),
        sha256=hashlib.sha256(spans.astype("<i8").tobytes()).hexdigest(),
    )


def exclusion_facts(excluded: Mapping[str, ExcludedItems]) -> JSON:
    """What a state says of the exclusions it was saved under, sources by name; None: nothing."""
    if not excluded:
        return None
    told: JSON = [[name, one.sha256] for name, one in sorted(excluded.items())]
    return {
        "sha256": fingerprint_of(exclusions=told)[:16],
        "tokens": sum(one.num_tokens for one in excluded.values()),
    }


def tell_change(before: Any, now: JSON, who: str) -> None:
    """Say in one warning that a state was saved under other exclusions; refuse no state."""
    if before == now:
        return
    log.warning(
        "%s: the exclusions changed since this state was saved, from %s to %s; samples that are "
        "excluded now are replaced by others of their source, every other one keeps its place",
        *(who, _told(before), _told(now)),
    )


def _told(facts: Any) -> str:
    match facts:
        case None:
            return "none"
        case {"sha256": str(sha256), "tokens": int(tokens)} if len(facts) == 2:
            return f"{sha256:.16} ({tokens:,} tokens)"
    raise StateMismatchError(
        f"exclusions: the state has {facts!r:.80}; it was changed since it was saved"
    )
