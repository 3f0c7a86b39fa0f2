"""Samples that must not be trained on, and the samples that replace them.

A window or row with an excluded token is never given. Its replacement is a pure function of (seed,
source name, epoch, item) and of what is excluded: the next item that is allowed in an order drawn
for this purpose. So no other item moves, and further exclusions change a replacement only when they
hit it. Nothing here grows with the source, and without exclusions nothing is computed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.errors import OptionError, StateMismatchError
from shardmill.records import JSON, BoolArray, OffsetArray
from shardmill.sampling import Permutation
from shardmill.sampling.order import by_value, fingerprint_of
from shardmill.store.exclusions import count_tokens, merge_spans, touched
from shardmill.store.readers import PackSpace

log = logging.getLogger(__name__)

_WALK = 64  # items tried one after the other before all allowed items are listed
_FEW = 2**16  # allowed items that may be listed
_PIECES = 2**20  # pieces of a plan looked at together


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExcludedItems:
    """The items that a source does not give. It pickles by value, so copies agree."""

    name: str  # of the source; part of what decides replacements
    num_items: int  # of the source
    ranges: OffsetArray  # (k, 2) excluded items, start and stop, merged
    num_tokens: int  # excluded tokens of the split
    sha256: str  # of the excluded spans

    @property
    def num_excluded(self) -> int:
        return count_tokens(self.ranges)

    @property
    def num_left(self) -> int:
        return self.num_items - self.num_excluded

    def hits(self, items: OffsetArray) -> BoolArray:
        """Which of these items are excluded."""
        # the edges of the ranges ascend: after an odd number of them an item is inside a range
        inside: BoolArray = (self.ranges.reshape(-1).searchsorted(items, side="right") & 1) == 1
        return inside

    def replace(self, items: OffsetArray, epochs: OffsetArray, *, seed: int) -> OffsetArray:
        """The items, with a replacement for each excluded one."""
        places = np.flatnonzero(self.hits(items))
        if not len(places):
            return items
        self.check_left()
        replaced = items.copy()
        for epoch, chosen in by_value(epochs[places]):
            own = places[chosen]
            # "stand-in" is part of the random path: another word would give other replacements
            path = ("source", self.name, "epoch", epoch, "stand-in")
            order = Permutation(self.num_items, seed, *path)
            replaced[own] = replacements(items[own], self, order)
        return replaced

    def check_left(self) -> None:
        if not self.num_left:
            raise OptionError(
                f"source {self.name!r}: all of its {self.num_items:,} samples have an excluded "
                f"token, so nothing can replace them; give it weight 0, leave it out, or remove an "
                f"entry with `shardmill exclude --remove`"
            )


def replacements(items: OffsetArray, excluded: ExcludedItems, order: Permutation) -> OffsetArray:
    """For each item the next allowed one after it in `order`, which wraps around."""
    places, found = order.find(items), items.copy()
    waiting = np.arange(len(items))
    walked = 0
    while len(waiting):
        if walked >= _WALK and excluded.num_left <= _FEW:
            found[waiting] = _next_of_all(places[waiting], excluded, order)
            break
        places[waiting] = (places[waiting] + 1) % excluded.num_items
        found[waiting] = order.take(places[waiting])
        waiting = waiting[excluded.hits(found[waiting])]
        walked += 1
    return found


def _next_of_all(places: OffsetArray, excluded: ExcludedItems, order: Permutation) -> OffsetArray:
    """The same without walking, from a list of all allowed items."""
    edges = np.concatenate(([0], excluded.ranges.reshape(-1), [excluded.num_items]))
    allowed = np.concatenate(
        [np.arange(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]
    )
    at = order.find(allowed)
    by_place = np.argsort(at)
    following = at[by_place].searchsorted(places, side="right") % len(allowed)
    return allowed[by_place[following]]


def excluded_windows(
    spans: OffsetArray, *, name: str, num_items: int, stride: int, length: int
) -> ExcludedItems | None:
    """Windows of `length` tokens, one every `stride` tokens, that meet a span; None: no window.

    stride 4, length 5, span 8..9: windows 1 (4..9) and 2 (8..13).
    """
    if not len(spans):
        return None
    first = (spans[:, 0] - length) // stride + 1
    stop = (spans[:, 1] - 1) // stride + 1
    ranges = merge_spans(np.stack((first, stop), axis=1).clip(0, num_items))
    return _excluded(spans, ranges, name=name, num_items=num_items)


def excluded_rows(spans: OffsetArray, space: PackSpace, *, name: str) -> ExcludedItems | None:
    """Rows of a pack plan with a piece that has an excluded token; None: no row."""
    if not len(spans):
        return None
    starts = np.asarray(space.store.document_starts(space.split))
    stops = np.append(starts[1:], space.store.num_tokens(space.split))
    hit, examples = touched(spans, starts, stops), space.plan.arrays.examples
    ends = np.cumsum(space.plan.arrays.counts, dtype=np.int64)
    rows = [np.empty(0, np.int64)]
    for begin in range(0, len(examples), _PIECES):
        pieces = begin + np.flatnonzero(hit[examples[begin : begin + _PIECES]])
        rows.append(np.unique(ends.searchsorted(pieces, side="right")))
    candidates = np.unique(np.concatenate(rows))
    # a piece that was cut may end before the excluded span of its example
    found = space.pieces(candidates)
    row = np.repeat(np.arange(len(candidates)), np.diff(found.offsets))
    met = row[touched(spans, found.starts, found.starts + found.lengths)]
    hit_rows = candidates[np.bincount(met, minlength=len(candidates)) > 0]
    ranges = merge_spans(np.stack((hit_rows, hit_rows + 1), axis=1))
    return _excluded(spans, ranges, name=name, num_items=len(space))


def excluded_items(spans: OffsetArray, hit: BoolArray, *, name: str) -> ExcludedItems | None:
    """The items that are `hit` by these spans; None: no item."""
    at = np.flatnonzero(hit)
    ranges = merge_spans(np.stack((at, at + 1), axis=1))
    return _excluded(spans, ranges, name=name, num_items=len(hit))


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
    """What a state records of the exclusions, by source name; None: nothing is excluded."""
    if not excluded:
        return None
    hashes: JSON = [[name, one.sha256] for name, one in sorted(excluded.items())]
    return {
        "sha256": fingerprint_of(exclusions=hashes)[:16],
        "tokens": sum(one.num_tokens for one in excluded.values()),
    }


def warn_of_change(before: Any, now: JSON, who: str) -> None:
    """Warn when a state was saved under other exclusions. Such a state is not refused."""
    if before == now:
        return
    log.warning(
        "%s: the exclusions changed since this state was saved, from %s to %s; samples that are "
        "excluded now are replaced by others of their source, every other one keeps its place",
        *(who, _shown(before), _shown(now)),
    )


def _shown(facts: Any) -> str:
    match facts:
        case None:
            return "none"
        case {"sha256": str(sha256), "tokens": int(tokens)} if len(facts) == 2:
            return f"{sha256:.16} ({tokens:,} tokens)"
    raise StateMismatchError(
        f"exclusions: the state has {facts!r:.80}; it was changed since it was saved"
    )
