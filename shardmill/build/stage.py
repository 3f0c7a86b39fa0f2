"""Fill the staged store: every unit in the order of the plan, from the journal or newly made.

In: units, a committer, perhaps an engine.  Out: all documents in the store, in order.
Promise: whatever was done before, by whichever process, the store gets the documents of the sources
from the start, each once; a segment is read only if its hashes are right, and what is damaged is
made again here. An error comes out as it would in one process, the first in the order of the plan.
Not here: how a unit becomes portions (task.py, render.py), publication (run.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from shardmill.build.commit import Committer
from shardmill.build.crew import Crew, UnitFailedError
from shardmill.build.memory import no_memory
from shardmill.build.meter import Meter
from shardmill.build.portion import Account, Portion
from shardmill.build.segments import (
    DamagedSegmentError,
    Receipt,
    keep_receipts,
    load_segment,
)
from shardmill.build.task import UnitJournal
from shardmill.build.units import Unit
from shardmill.records import Cursor

log = logging.getLogger(__name__)

MakePortions = Callable[
    [Unit, "Cursor | None", int], Generator[tuple[Portion, Account], None, None]
]
"""(unit, where to go on, texts of the feed before that) -> its portions."""


class Stage:
    """The units of a build on their way into the store."""

    def __init__(
        self,
        journal: Path,
        committer: Committer,
        meter: Meter,
        *,
        dtype: str,
        make_portions: MakePortions,
    ) -> None:
        self._journal, self._committer, self._meter = journal, committer, meter
        self._dtype, self._make_portions = dtype, make_portions

    def fill(self, units: Sequence[Unit], begun: dict[str, list[Receipt]], crew: Crew) -> None:
        """Commit units that follow one another; those that `crew` has are made there.

        `begun` are the receipts that were found in the journal, by the folder of their unit.
        """
        for unit in units:
            if self._committer.full(unit.key.feed):
                continue
            done = self._commit_sealed(unit, begun.get(unit.key.folder, []), crew)
            full = self._committer.full(unit.key.feed)
            if not full and not (done and done[-1].last):
                self._make_here(unit, done)

    def _commit_sealed(self, unit: Unit, found: list[Receipt], crew: Crew) -> list[Receipt]:
        """Commit what is sealed, waiting for the crew; gives the receipts that are in the store."""
        folder, feed = self._journal / unit.key.folder, unit.key.feed
        mine = crew.has(unit)
        done: list[Receipt] = []
        try:
            for receipt in crew.receipts(unit) if mine else iter(found):
                self._commit(folder, receipt)
                done.append(receipt)
                if self._committer.full(feed):
                    break
        except UnitFailedError as failed:
            log.info("%s: failed in a worker, trying it here: %s", unit.name, failed)
        except DamagedSegmentError as damage:
            log.warning("%s; it is made again", damage)
            if mine:
                crew.settle(unit)
            keep_receipts(folder, done)
        return done

    def _commit(self, folder: Path, receipt: Receipt) -> None:
        for portion, account in load_segment(folder, receipt, self._dtype):
            self._committer.add(receipt.feed, portion, account, start=receipt.start)
            if self._committer.full(receipt.feed):
                return

    def _make_here(self, unit: Unit, done: Sequence[Receipt]) -> None:
        """Make the rest of a unit in this process: its portions go to journal and store at once."""
        folder, feed = self._journal / unit.key.folder, unit.key.feed
        folder.mkdir(exist_ok=True)
        cursor = done[-1].cursor if done else None

        def add(portion: Portion, account: Account) -> bool:
            self._committer.add(feed, portion, account, start=unit.key.start)
            self._meter.count(
                feed,
                documents=account.num_given,
                tokens=len(portion.documents.values),
                num_bytes=account.num_bytes,
            )
            self._meter.reach(feed, unit.key.start, account.cursor)
            self._meter.tell(feed)
            return self._committer.full(feed)

        def sealed(receipt: Receipt) -> None:
            self._meter.reach_end(receipt)
            self._meter.tell(feed)

        given = self._committer.given(feed)
        try:
            with closing(self._make_portions(unit, cursor, given)) as portions:
                UnitJournal(unit, folder, done).write(portions, add=add, sealed=sealed)
        except MemoryError as error:
            raise no_memory(unit.name) from error


def in_groups(units: Sequence[Sequence[Unit]], alone: Sequence[bool]) -> Iterator[list[Unit]]:
    """Units that may be at work together. A feed stands `alone` that can become full, since the
    rest of it is stopped then, or that is read in this process."""
    group: list[Unit] = []
    for mine, stands_alone in zip(units, alone, strict=True):
        if stands_alone:
            if group:
                yield group
            yield list(mine)
            group = []
        else:
            group += mine
    if group:
        yield group
