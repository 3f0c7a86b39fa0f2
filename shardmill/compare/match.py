"""Which documents of two heaps are in both.

In: the records of both stores that are in heaps of one number, and the border of splits.  Out: a
`Matched`.
Promise: pure; equal documents are paired as often as both sides have them, within splits of one
name.
Not here: reading and hashing; which of equal documents has no partner (order.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.compare.hashes import Hashes
from shardmill.records import BoolArray, OffsetArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surplus:
    """Documents that both sides have, and one of them more often."""

    hashes: Hashes  # (n,) the first of each
    more: OffsetArray  # (n,) how many more a has; below 0: b has more

    @classmethod
    def joined(cls, parts: Sequence[Surplus]) -> Surplus:
        """All of some, by hash."""
        hashes = np.concatenate([part.hashes for part in parts])
        order = np.argsort(hashes, kind="stable")
        return cls(hashes=hashes[order], more=np.concatenate([p.more for p in parts])[order])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matched:
    """What was found in one pair of heaps."""

    shared: tuple[OffsetArray, OffsetArray]  # places of each side whose document both have
    surplus: tuple[Surplus, ...]  # by split: what one side has more often
    both: OffsetArray  # (splits,) pairs
    both_anywhere: int  # pairs, whatever their splits
    other_mask: OffsetArray  # (splits,) pairs of equal tokens and unequal masks
    masked: OffsetArray  # places in a of such


def match(a: Hashes, b: Hashes, edges: tuple[OffsetArray, OffsetArray]) -> Matched:
    """`edges` of each side: the place of the first document of every split, and one behind all."""
    records = np.concatenate((a, b))
    side = np.repeat([0, 1], [len(a), len(b)])
    place = records[:, 3].astype(np.int64)
    split = np.concatenate([_split_of(x[:, 3], e) for x, e in zip((a, b), edges, strict=True)])
    num_splits = len(edges[0]) - 1
    columns = (records[:, 0], records[:, 1], split, records[:, 2])
    document, inside, masked = (_numbered(columns[:width]) for width in (2, 3, 4))
    paired, masked_too = (_paired(group, side, place) for group in (inside, masked))
    anywhere = _paired(document, side, place)
    left = side == 0
    counts = _counts(inside, side)
    common = ((counts[:, 0] > 0) & (counts[:, 1] > 0))[inside]
    both = np.bincount(split[paired & left], minlength=num_splits)
    equal = np.bincount(split[masked_too & left], minlength=num_splits)
    return Matched(
        shared=(place[common & left], place[common & ~left]),
        surplus=tuple(_surpluses(inside, counts, records[:, 0], split, num_splits)),
        both=both,
        both_anywhere=int(np.count_nonzero(anywhere & left)),
        other_mask=both - equal,
        masked=place[_unequal(inside, masked_too, paired, side, place)],
    )


def _split_of(places: Hashes, edges: OffsetArray) -> OffsetArray:
    return np.searchsorted(edges, places.astype(np.int64), side="right") - 1


def _numbered(columns: tuple[Hashes | OffsetArray, ...]) -> OffsetArray:
    """A number for each row, equal for equal rows."""
    order = np.lexsort(columns)
    differs = np.zeros(len(order), np.bool_)
    for column in columns:
        ordered = column[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(differs)
    return numbers


def _paired(group: OffsetArray, side: OffsetArray, place: OffsetArray) -> BoolArray:
    """Whether a record has a partner of its group on the other side; the first ones have."""
    most: OffsetArray = _counts(group, side).min(axis=1, initial=len(group))
    return np.less(_ranks(2 * group + side, place), most[group])


def _counts(group: OffsetArray, side: OffsetArray) -> OffsetArray:
    """(groups, 2) records of each group on each side."""
    num_groups = int(group.max(initial=-1)) + 1
    return np.bincount(2 * group + side, minlength=2 * num_groups).reshape(-1, 2)


def _surpluses(
    group: OffsetArray, counts: OffsetArray, first: Hashes, split: OffsetArray, num_splits: int
) -> Iterator[Surplus]:
    """For each split; `group` tells the splits apart."""
    wanted = (counts[:, 0] > 0) & (counts[:, 1] > 0) & (counts[:, 0] != counts[:, 1])
    rows = np.flatnonzero(wanted[group])
    rows = rows[np.unique(group[rows], return_index=True)[1]]  # one of each group
    more = (counts[:, 0] - counts[:, 1])[group[rows]]
    for number in range(num_splits):
        mine = split[rows] == number
        yield Surplus(hashes=first[rows[mine]], more=more[mine])


def _ranks(keys: OffsetArray, place: OffsetArray) -> OffsetArray:
    """How many records of the same key lie before each, by place."""
    order = np.lexsort((place, keys))
    ordered = keys[order]
    first = np.searchsorted(ordered, ordered, side="left")
    ranks = np.empty(len(keys), np.int64)
    ranks[order] = np.arange(len(keys)) - first
    return ranks


def _unequal(
    inside: OffsetArray,
    masked_too: BoolArray,
    paired: BoolArray,
    side: OffsetArray,
    place: OffsetArray,
) -> OffsetArray:
    """Rows of a whose tokens have a partner, and whose mask has none: as many as there are pairs
    left of their group."""
    left = side == 0
    num_groups = int(inside.max(initial=-1)) + 1
    pairs = np.bincount(inside[paired & left], minlength=num_groups)
    pairs -= np.bincount(inside[masked_too & left], minlength=num_groups)
    rows = np.flatnonzero(left & ~masked_too)
    found: OffsetArray = rows[_ranks(inside[rows], place[rows]) < pairs[inside[rows]]]
    return found
