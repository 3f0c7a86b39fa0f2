"""Turn receipts, in the order of the plan, into the store's indexes, ledger and list of drops.

No token passes through here. Every document and token is in exactly one bucket of the ledger. The
table of origins records where each chunk of input begins in each split.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from shardmill.building.exact import JoinedUnits
from shardmill.building.plan import FeedChunks, mark_of
from shardmill.building.segments import ChunkLine, DropLine, Segment, SplitPart
from shardmill.building.splits import FillState, HashSplit
from shardmill.records import Drop
from shardmill.store import Origins, StoreWriter
from shardmill.store.manifest import ChatLedger, DocumentLedger, Ledger, TokenLedger
from shardmill.store.plans import COLUMNS


class LedgerCounter:
    """Sums what was read and made, and what of it was kept."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def add(
        self,
        *,
        read: int,
        documents: int,
        tokens: int,
        counts: Mapping[str, int],
        drops: Iterable[Drop],
    ) -> None:
        """What was read, encoded and left out."""
        self._made.update(read=read, documents=documents, tokens=tokens)
        self._counts.update(counts)
        self._dropped.update(drop.reason for drop in drops)

    def keep(self, **kept: int) -> None:
        """`documents`, `tokens`; of conversations `turns` and `trained_tokens`."""
        self._kept.update(kept)

    def ledger(self, *, separators: bool = False, chat: bool = False) -> Ledger:
        """Every row read and every token made, each in one bucket."""
        made, kept, counts = self._made, self._kept, self._counts
        num_separators = made["documents"] if separators else 0
        trained = ChatLedger(turns=kept["turns"], trained_tokens=kept["trained_tokens"])
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
            chat=trained if chat else None,
        )


class UnitEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A unit in the record of a finished store, by which files are added to it later."""

    mark: str
    after: FillState
    lines: list[ChunkLine]
    splits: dict[str, SplitPart]


class OriginLog:
    """The table of origins while it grows."""

    def __init__(self, feeds: Sequence[FeedChunks], splits: Sequence[str]) -> None:
        self._feeds, self._splits = feeds, tuple(sorted(splits))
        self._rows = array("q")  # one after another
        self._next = [0] * len(feeds)  # of each feed, the next chunk without a row

    def note(self, feed: int, chunk: int, rows: int, documents: Mapping[str, int]) -> None:
        """A chunk that gave something comes next, after `rows` rows of its file and so many
        documents of each split."""
        before = [documents[split] for split in self._splits]
        for number in range(self._next[feed], chunk + 1):
            # A chunk that gave nothing begins where the next one does.
            known = rows if number == chunk else 0
            mark = mark_of(self._feeds[feed].chunks[number])
            self._rows.extend((feed, number, mark, known, *before))
        self._next[feed] = max(self._next[feed], chunk + 1)

    def finish(self, units: Sequence[bytes] | None, by_hash: HashSplit | None) -> Origins:
        table = np.array(self._rows, np.int64).reshape(-1, len(COLUMNS) + len(self._splits))
        fill = tuple(tuple(split for split, _ in feed.fill) for feed in self._feeds)
        return Origins(
            fill=fill,
            splits=self._splits,
            table=table,
            by_hash=None if by_hash is None else (by_hash.seed, by_hash.fractions),
            units=None if units is None else b"".join(units),
        )


class Finisher:
    """Takes the segments of all feeds in order."""

    def __init__(
        self,
        feeds: Sequence[FeedChunks],
        out: StoreWriter | JoinedUnits,
        origins: OriginLog | None,
    ) -> None:
        self.counter = LedgerCounter()
        self.units: list[bytes] = []  # of UnitEntry, as JSON
        self._feeds, self._out, self._origins = feeds, out, origins
        self._feed = -1
        self._rows = self._given = 0  # of the current file, and texts of the current feed
        self._documents: Counter[str] = Counter()  # kept, by split

    def add(self, segment: Segment, after: FillState) -> None:
        """The next unit; `after` is the state of the splits of its feed then."""
        if segment.feed != self._feed:
            self._feed, self._rows, self._given = segment.feed, 0, 0
        # Sums of a unit, not of each of its chunks: a Counter takes longer than the arrays.
        lines, counts = list(segment.lines), Counter[str]()
        if self._origins is not None:
            unit = UnitEntry(
                mark=segment.mark, after=after, lines=lines, splits=dict(segment.splits)
            )
            self.units.append(msgspec.json.encode(unit) + b"\n")
        drops = [drop for line in lines for drop in self._add_chunk(line, counts)]
        self.counter.add(
            read=sum(line.num_read for line in lines),
            documents=sum(line.num_documents for line in lines),
            tokens=sum(line.num_tokens for line in lines),
            counts=counts,
            drops=drops,
        )
        self._out.record_drops(drops)
        for split, entry in segment.splits.items():
            lengths, turns = segment.lengths[split], segment.turns.get(split)
            self._out.adopt(split, entry.shards, lengths, turns)
            self.counter.keep(
                documents=entry.documents,
                tokens=entry.tokens,
                turns=entry.turns,
                trained_tokens=entry.trained_tokens,
            )

    def _add_chunk(self, line: ChunkLine, counts: Counter[str]) -> list[Drop]:
        """Its drops; its counts are added to `counts`."""
        if not line.continues:
            self._rows = 0
        if self._origins is not None:
            self._origins.note(self._feed, line.chunk, self._rows, self._documents)
        drops = [self._numbered(drop) for drop in line.drops]
        for name, count in line.counts.items():
            counts[name] += count
        self._rows += line.num_rows
        self._given += line.num_given
        for (split, _), count in zip(self._feeds[self._feed].fill, line.kept, strict=True):
            self._documents[split] += count
        return drops

    def _numbered(self, drop: DropLine) -> Drop:
        """With its number in its file, or among the texts of its source."""
        if drop.document is not None:
            return Drop(id=f"{drop.id}: document {self._given + drop.document}", reason=drop.reason)
        return Drop(id=drop.id, reason=drop.reason, row=drop.row).numbered(self._rows)
