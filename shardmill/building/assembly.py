"""Fill the staged store: every unit in the order of the plan, from the journal or newly made.

In: units, a committer, perhaps an engine.  Out: all documents in the store, in order.
Promise: whatever was done before, by whichever process, the store gets the documents of the sources
from the start, each once; a segment is read only if its hashes are right, and what is damaged is
made again here. An error comes out as it would in one process, the first in the order of the plan.
Not here: how a unit becomes portions (task.py, render.py), publication (run.py).

Put the journal's documents, in order, into the store, and balance the books.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from shardmill.building.encode import Filler, no_memory, take
from shardmill.building.origins import OriginLog
from shardmill.building.progress import ProgressMeter
from shardmill.building.scheduler import Crew, UnitFailedError
from shardmill.building.segments import (
    DamagedSegmentError,
    Portion,
    Receipt,
    SourceCounts,
    keep_receipts,
    load_segment,
)
from shardmill.building.spec import Feed
from shardmill.building.units import Unit
from shardmill.building.worker import UnitJournal
from shardmill.records import Cursor, Drop
from shardmill.store import ChatLedger, DocumentLedger, Ledger, StoreWriter, TokenLedger

log = logging.getLogger(__name__)


NO_TOKENS = "no_tokens"


class Destination(Protocol):
    """Where portions go."""

    def __call__(self, feed: int, portion: Portion) -> Mapping[str, int]:
        """What of it was kept: it is in the store when the call returns."""

    def full(self, feed: int) -> bool:
        """Whether nothing more of a feed would be kept."""


class DocumentPlaces:
    """Documents go to the splits that their feeds fill."""

    def __init__(
        self,
        feeds: Sequence[Feed],
        out: StoreWriter,
        filled: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`filled` tells the tokens that splits hold already, when there is one feed."""
        self._names = [feed.source.name for feed in feeds]
        self._fillers = [Filler(feed.fill, filled) for feed in feeds]
        self._out = out

    def __call__(self, feed: int, portion: Portion) -> Mapping[str, int]:
        kept: Counter[str] = Counter()
        for placement in self._fillers[feed].place(portion.documents.lengths):
            if placement.split is not None:
                part = take(portion.documents, placement)
                self._out.append(placement.split, part, where=self._names[feed])
                kept.update(documents=len(part), tokens=len(part.values))
        return kept

    def full(self, feed: int) -> bool:
        return self._fillers[feed].full


class ExamplePlaces:
    """Conversations go to the split that is written with them, whole."""

    def __init__(self, name: str, splits: Sequence[str], out: StoreWriter) -> None:
        self._name, self._splits, self._out = name, splits, out

    def __call__(self, feed: int, portion: Portion) -> Mapping[str, int]:  # noqa: ARG002 - one feed
        if portion.chat is None:
            assert not len(portion.documents), "a conversation comes with its mask and turns"
            return {}
        examples, splits = portion.chat.examples, portion.chat.splits
        for number, split in enumerate(self._splits):
            chosen = splits == number
            part = examples.keep(chosen)
            self._out.append_examples(split, part, where=self._name)
        return {
            "documents": len(examples.ids),
            "tokens": len(examples.ids.values),
            "turns": len(examples.turn_starts),
            "trained_tokens": int(np.count_nonzero(examples.mask)),
        }

    def full(self, feed: int) -> bool:  # noqa: ARG002 - nothing is limited
        return False


class Books:
    """The sums of a build: what was read and made, and what of it was kept."""

    def __init__(self, before: Ledger | None = None) -> None:
        """`before` is a ledger of documents to go on from."""
        self._made: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        if before is not None:
            documents, tokens = before.documents, before.tokens
            made = documents.kept + documents.over_budget
            self._made.update(
                read=documents.read, documents=made, tokens=tokens.encoded + tokens.separators
            )
            self._counts.update(before.repaired, empty=documents.empty)
            self._dropped.update(documents.dropped)
            self._kept.update(documents=documents.kept, tokens=tokens.kept)

    def take_back(self, reason: str, num_rows: int) -> None:
        """Dropped rows that will be counted again."""
        self._dropped -= Counter({reason: num_rows})

    def add(
        self,
        portion: Portion,
        account: SourceCounts,
        drops: Sequence[Drop],
        kept: Mapping[str, int],
    ) -> None:
        documents = portion.documents
        self._made.update(
            read=account.num_read, documents=len(documents), tokens=len(documents.values)
        )
        self._counts.update(account.counts)
        self._dropped.update(drop.reason for drop in drops)
        self._kept.update(kept)

    def ledger(self, *, separators: bool = False, chat: bool = False) -> Ledger:
        """Every row read and every token made, each in one bucket."""
        made, kept, counts = self._made, self._kept, self._counts
        num_separators = made["documents"] if separators else 0
        books = ChatLedger(turns=kept["turns"], trained_tokens=kept["trained_tokens"])
        return Ledger(
            documents=DocumentLedger(
                read=made["read"],
                kept=kept["documents"],
                empty=counts["empty"],
                over_budget=made["documents"] - kept["documents"],
                dropped=dict(sorted(self._dropped.items())),
            ),
            tokens=TokenLedger(
                encoded=made["tokens"] - num_separators,
                separators=num_separators,
                kept=kept["tokens"],
                over_budget=made["tokens"] - kept["tokens"],
            ),
            repaired={"invalid_utf8": counts["invalid_utf8"]} if counts["invalid_utf8"] else {},
            chat=books if chat else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the one feed of a store stood when it was finished."""

    ledger: Ledger
    num_given: int  # texts
    held: tuple[int, ...]  # texts without a token that belong into the next portion's list of such,
    # counted back from its first: -1 is the last one before


class Committer:
    """Writes portions to the store as they come, in the order of the plan.

    The store is staged beside the journal and made anew by a resume, so a document may be here
    before its segment is sealed.
    """

    def __init__(
        self,
        names: Sequence[str],
        out: StoreWriter,
        place: Destination,
        standing: Standing | None = None,
        origins: OriginLog | None = None,
    ) -> None:
        """`names` are those of the sources, one for each feed. `standing`: `out` has taken over a
        store, and its one feed goes on. `origins` is told where each grain begins."""
        self._names, self._out, self._place = names, out, place
        self._origins = origins
        self._given = [0] * len(names)  # texts of each feed so far
        self._rows = [0] * len(names)  # of the file that each feed stands in
        self._held: tuple[int, ...] = ()
        self.books = Books(standing.ledger if standing else None)
        if standing is not None:
            self._given, self._held = [standing.num_given], standing.held
            self.books.take_back(NO_TOKENS, len(standing.held))

    def add(self, feed: int, portion: Portion, account: SourceCounts, *, start: int = 0) -> None:
        """The next portion of a feed, of a unit that begins with grain `start`."""
        if account.begins:
            self._rows[feed] = 0
        if self._origins is not None:
            rows = self._rows[feed]
            self._origins.note(feed, start + account.grain, rows, self._out.num_documents)
        numbered = [drop.numbered(self._rows[feed]) for drop in portion.drops]
        drops = [*numbered, *self._void_drops(feed, portion)]
        self._rows[feed] += account.num_rows
        self._given[feed] += account.num_given
        self.books.add(portion, account, drops, self._place(feed, portion))
        self._out.record_drops(drops)

    def given(self, feed: int) -> int:
        """How many texts or conversations of a feed were added."""
        return self._given[feed]

    def full(self, feed: int) -> bool:
        return self._place.full(feed)

    def _void_drops(self, feed: int, portion: Portion) -> list[Drop]:
        name, first = self._names[feed], self._given[feed]
        places, self._held = (*self._held, *portion.void), ()
        return [void_drop(name, first + place) for place in places]


def void_drop(source: str, number: int) -> Drop:
    """For a text without a token, by its number among those that a source gave."""
    return Drop(id=f"{source}: document {number}", reason=NO_TOKENS)


MakePortions = Callable[
    [Unit, "Cursor | None", int], Generator[tuple[Portion, SourceCounts], None, None]
]
"""(unit, where to go on, texts of the feed before that) -> its portions."""


class Stage:
    """The units of a build on their way into the store."""

    def __init__(
        self,
        journal: Path,
        committer: Committer,
        meter: ProgressMeter,
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

        def add(portion: Portion, account: SourceCounts) -> bool:
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
