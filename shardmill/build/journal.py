"""What an earlier run left in the journal, and the units of this one around it.

In: the folder of segments, the grains of each feed.  Out: units in order, and what of them is done.
Promise: receipts count only for the same plan and unchanged input; units that were begun keep their
borders, whatever the size of a unit is now; every grain is in one unit.
Not here: whether the segments are whole; that shows when they are read (stage.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.build.segments import Receipt, read_receipts
from shardmill.build.units import FeedGrains, Unit, make_unit, unit_ranges
from shardmill.errors import BuildError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPlan:
    """All the work of a build."""

    units: tuple[tuple[Unit, ...], ...]  # of each feed, in order
    begun: dict[str, list[Receipt]]  # what is sealed already, by the folder of the unit

    def is_done(self, unit: Unit) -> bool:
        receipts = self.begun.get(unit.key.folder)
        return bool(receipts and receipts[-1].last)


def plan_work(folder: Path, feeds: Sequence[FeedGrains], *, plan: str, unit_bytes: int) -> WorkPlan:
    """The units of a build; what is in the journal and does not belong there is removed."""
    begun: dict[str, list[Receipt]] = {}
    borders: list[dict[int, int]] = [{} for _ in feeds]
    for path in sorted(folder.iterdir()):
        receipts = _usable(path, feeds, plan)
        if not receipts or _crosses(borders[receipts[0].feed], receipts[0]):
            shutil.rmtree(path)
            continue
        begun[path.name] = receipts
        borders[receipts[0].feed][receipts[0].start] = receipts[0].stop
    units = tuple(
        tuple(
            make_unit(feed, number, start, stop, plan=plan)
            for start, stop in unit_ranges(feed.sizes, unit_bytes, borders[number])
        )
        for number, feed in enumerate(feeds)
    )
    check_cover(units, feeds)
    return WorkPlan(units=units, begun=begun)


def check_cover(units: Sequence[Sequence[Unit]], feeds: Sequence[FeedGrains]) -> None:
    """No grain missing, none twice: the last line of defence of a resumed build."""
    for mine, feed in zip(units, feeds, strict=True):
        edges = [0, *(unit.key.stop for unit in mine)]
        if [unit.key.start for unit in mine] != edges[:-1] or edges[-1] != len(feed.grains):
            raise BuildError(
                f"source {feed.source.name!r}: its units do not cover its {len(feed.grains):,} "
                "grains once each: start again with overwrite=True"
            )


def _usable(path: Path, feeds: Sequence[FeedGrains], plan: str) -> list[Receipt]:
    """The receipts of a unit's folder, if they are of this plan and this input."""
    receipts = read_receipts(path)
    if not receipts:
        return []
    key = receipts[0].key
    known = 0 <= key.feed < len(feeds) and 0 <= key.start < key.stop
    if not known or key.stop > len(feeds[key.feed].grains) or key.plan != plan:
        return []
    unit = make_unit(feeds[key.feed], key.feed, key.start, key.stop, plan=plan)
    return receipts if unit.key == key and path.name == key.folder else []


def _crosses(borders: dict[int, int], receipt: Receipt) -> bool:
    """Whether a unit shares grains with one that is kept. Folders come in the order of starts."""
    return any(start <= receipt.start < stop for start, stop in borders.items())
