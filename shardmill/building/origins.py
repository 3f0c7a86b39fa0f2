"""Which grain of input every document of a store came from.

In: portions in the order in which they are committed; of a store that goes on, what it had.
Out: the table that lies beside the store.
Promise: a function of the input, its order and the limits alone: workers, units, kills and resumes
do not show, and a store that was added to has the table of a build of all.
Not here: its bytes (shards), reading it (blame).
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.building.spec import Feed
from shardmill.building.units import FeedGrains, FreshGrains, Rest
from shardmill.protocols import ConversationSource, Source, continues
from shardmill.store import OldStore, Origins, read_origins
from shardmill.store.origins import COLUMNS, GRAIN, MARK

log = logging.getLogger(__name__)

_MARK_HEX = 15  # digits: 60 bits, so that a mark is a count


def mark_of(grain: Source | ConversationSource) -> int:
    """A number that tells this grain from others of the same input, on every machine."""
    if isinstance(grain, Rest):
        return mark_of(grain.grain)
    files: Any = getattr(grain, "files", ())
    if isinstance(files, tuple) and files:
        known = [[files[0].name, files[-1].name], len(files), getattr(grain, "part", "")]
        named = json.dumps(known)
    else:
        named = json.dumps(grain.name)
    return int(hashlib.sha256(named.encode()).hexdigest()[:_MARK_HEX], 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOrigins:
    """What is known of a store's one feed before more of it is read."""

    rows: Sequence[list[int]]  # of a table, as far as grains gave a portion
    num_before: int  # grains that are in the store as a whole
    marks: Sequence[int]  # of those, and of the one in which old files and new ones meet


class OriginLog:
    """The table in the making."""

    def __init__(
        self, feeds: Sequence[FeedGrains], splits: Sequence[str], before: KnownOrigins | None = None
    ) -> None:
        """`before`: what is known of the grains in front of those of the one feed."""
        self._feeds, self._splits = feeds, tuple(sorted(splits))
        self._rows = list(before.rows) if before else []
        self._marks = before.marks if before else ()
        self._first = before.num_before if before else 0
        # The grain whose row is missing next, for each feed.
        self._next = [self._rows[-1][GRAIN] + 1 if self._rows else 0] * len(feeds)

    def note(self, feed: int, grain: int, rows: int, count: Callable[[str], int]) -> None:
        """A portion of this grain comes, behind `rows` rows of its file; `count` tells how many
        documents a split has so far."""
        grain += self._first
        documents = [count(split) for split in self._splits]
        for number in range(self._next[feed], grain + 1):
            # A grain that gave no portion begins where the next one does.
            known = rows if number == grain else 0
            self._rows.append([feed, number, self._mark(feed, number), known, *documents])
        self._next[feed] = max(self._next[feed], grain + 1)

    def _mark(self, feed: int, number: int) -> int:
        if number < self._first:
            return self._marks[number]
        return mark_of(self._feeds[feed].grains[number - self._first])

    def finish(self, feeds: Sequence[Feed]) -> Origins:
        """All of it."""
        table = np.array(self._rows, np.int64).reshape(-1, len(COLUMNS) + len(self._splits))
        fill = tuple(tuple(split for split, _ in feed.fill) for feed in feeds)
        return Origins(fill=fill, splits=self._splits, table=table)


def known_origins(
    old: OldStore, feed: Feed, fresh: FreshGrains, void: Sequence[int]
) -> KnownOrigins | None:
    """The rows of the grains of a store that goes on; None, announced, when it has no table.

    `void` are the numbers of its texts without a token, in order.
    """
    found = read_origins(old.folder, old.manifest)
    if found is None:
        log.info("%s: knows no origins of its documents, so it will know none", old.folder)
        return None
    grains, num_old = fresh.seen, fresh.num_old
    marks = [mark_of(grain) for grain in grains]
    rows: list[list[int]] = found.table[found.table[:, GRAIN] < len(grains)].tolist()
    if any(row[MARK] != marks[row[GRAIN]] for row in rows if row[GRAIN] < num_old):
        log.info("%s: its input is cut otherwise with the new files: counted again", old.folder)
        rows = _counted(old, feed, grains, void)
    for row in rows:
        row[MARK] = marks[row[GRAIN]]  # the last one ends elsewhere now
    return KnownOrigins(rows=rows, num_before=num_old, marks=marks)


def _counted(
    old: OldStore, feed: Feed, grains: Sequence[Source], void: Sequence[int]
) -> list[list[int]]:
    """The rows of grains that are read again; nothing of them is encoded."""
    splits = old.manifest.splits
    rows: list[list[int]] = []
    given = lines = 0
    for number, grain in enumerate(grains):
        lines = lines if continues(grain) else 0
        left, firsts = given - bisect_left(void, given), {}
        for split, _ in feed.fill:
            firsts[split] = min(left, splits[split].documents)
            left -= firsts[split]
        rows.append([0, number, 0, lines, *(firsts[split] for split in sorted(splits))])
        for batch in grain.batches():
            given += len(batch.texts)
            lines += batch.num_rows
    return rows
