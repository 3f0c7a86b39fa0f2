"""Put encoded batches, in the order of the plan, into the store, and count every row and token.

Which split gets a document depends on the lengths before it and nothing else. Every document and
token is in exactly one bucket of the ledger. The table of origins records where each chunk of input
begins in each split.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.building.journal import EncodedBatch
from shardmill.building.plan import Feed, FeedChunks, Fill
from shardmill.protocols import ConversationSource, Source
from shardmill.records import Drop, OffsetArray, Ragged
from shardmill.store import Origins, Store, StoreWriter
from shardmill.store.manifest import ChatLedger, DocumentLedger, Ledger, TokenLedger
from shardmill.store.plans import COLUMNS, GRAIN

NO_TOKENS = "no_tokens"
_MARK_HEX = 15  # digits: 60 bits, so that a mark fits an int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Documents `start..stop` of a batch go to `split`; the last loses `cut` tokens."""

    split: str | None  # None: over budget, all of it
    start: int
    stop: int
    cut: int = 0

    def take(self, documents: Ragged) -> Ragged:
        """Its documents with the cut applied, without copying tokens."""
        part = documents.slice(self.start, self.stop)
        if not self.cut:
            return part
        offsets = part.offsets.copy()
        offsets[-1] -= self.cut
        return Ragged(part.values[: offsets[-1]], offsets)


class Filler:
    """Fills splits one after the other, each up to its limit. The one owner of the budget rule."""

    def __init__(self, fill: Fill, filled: Mapping[str, int]) -> None:
        """`filled` are the tokens that splits have already."""
        self._open = [
            (split, limit) for split, limit in fill if limit is None or filled.get(split, 0) < limit
        ]
        self._tokens = filled.get(self._open[0][0], 0) if self._open else 0

    @property
    def full(self) -> bool:
        return not self._open

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
            left = None if limit is None else limit - self._tokens
            if left is None or ends[-1] - before < left:
                self._tokens += int(ends[-1]) - before
                yield Placement(split=split, start=start, stop=len(lengths))
                return
            # The first document whose end reaches the limit closes the split.
            stop = int(np.searchsorted(ends, before + left, side="left")) + 1
            cut = int(ends[stop - 1]) - before - left
            self._open.pop(0)
            self._tokens = 0
            yield Placement(split=split, start=start, stop=stop, cut=cut)
            start = stop


class LedgerCounter:
    """Sums what was read and made, and what of it was kept."""

    def __init__(self, before: Ledger | None = None) -> None:
        """`before` is a ledger of documents to continue."""
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

    def add(self, batch: EncodedBatch, drops: Sequence[Drop], kept: Mapping[str, int]) -> None:
        documents = batch.documents
        self._made.update(
            read=batch.num_read, documents=len(documents), tokens=len(documents.values)
        )
        self._counts.update(batch.counts)
        self._dropped.update(drop.reason for drop in drops)
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


def mark_of(chunk: Source | ConversationSource) -> int:
    """A number that identifies this chunk among those of the same input, on every machine."""
    whole: Any = getattr(chunk, "whole_chunk", chunk)
    files: Any = getattr(whole, "files", ())
    if isinstance(files, tuple) and files:
        named = json.dumps(
            [[files[0].name, files[-1].name], len(files), getattr(whole, "part", "")]
        )
    else:
        named = json.dumps(whole.name)
    return int(hashlib.sha256(named.encode()).hexdigest()[:_MARK_HEX], 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendPlan:
    """What a build must know to append to a store."""

    old: Store
    sha256: str  # of its meta.json
    feed: Feed  # old files, then new ones
    chunks: FeedChunks | None = None  # of the new files; None: there are none
    num_given: int = 0  # texts, by the old files
    held: tuple[int, ...] = ()  # texts without a token that belong to the next batch's list of
    # them, as positions before its first text: -1 is the last one before
    whole: Sequence[Source] = ()  # the chunks without a new file
    origins: Sequence[list[int]] | None = None  # rows of the table, for old chunks that gave a
    # batch; None: the store does not know the origins of its documents


class OriginLog:
    """The table of origins while it grows."""

    def __init__(
        self,
        feeds: Sequence[FeedChunks],
        splits: Sequence[str],
        rows: Sequence[list[int]] = (),
        whole: Sequence[Source] = (),
    ) -> None:
        """`rows` and `whole`: of the chunks before those of the one feed, see `AppendPlan`."""
        self._feeds, self._splits = feeds, tuple(sorted(splits))
        self._rows, self._whole = list(rows), whole
        # For each feed, the next chunk without a row.
        self._next = [self._rows[-1][GRAIN] + 1 if self._rows else 0] * len(feeds)

    def note(self, feed: int, chunk: int, rows: int, out: StoreWriter) -> None:
        """A batch of this chunk comes next, after `rows` rows of its file."""
        first = len(self._whole)
        chunk += first
        documents = [out.num_documents(split) for split in self._splits]
        for number in range(self._next[feed], chunk + 1):
            if number < first:
                mark = mark_of(self._whole[number])
            else:
                mark = mark_of(self._feeds[feed].chunks[number - first])
            # A chunk that gave no batch begins where the next one does.
            known = rows if number == chunk else 0
            self._rows.append([feed, number, mark, known, *documents])
        self._next[feed] = max(self._next[feed], chunk + 1)

    def finish(self) -> Origins:
        table = np.array(self._rows, np.int64).reshape(-1, len(COLUMNS) + len(self._splits))
        fill = tuple(tuple(split for split, _ in feed.fill) for feed in self._feeds)
        return Origins(fill=fill, splits=self._splits, table=table)


class Assembly:
    """Writes batches to the store as they come, in the order of the plan, and keeps the counts.

    The store is staged beside the journal and made again by a resume, so a document may be here
    before its segment is sealed.
    """

    def __init__(
        self,
        feeds: Sequence[FeedChunks],
        splits: Sequence[str],
        out: StoreWriter,
        append: AppendPlan | None = None,
        origins: OriginLog | None = None,
    ) -> None:
        """With `append`, `out` has taken over a store and its one feed continues."""
        filled = {split: out.num_tokens(split) for split in splits}
        self._names = [feed.source.name for feed in feeds]
        self._fillers = [Filler(feed.fill, filled) for feed in feeds]
        self._splits, self._out, self._origins = splits, out, origins
        self._given = [0] * len(feeds)  # texts of each feed so far
        self._rows = [0] * len(feeds)  # of the current file of each feed
        self._held: tuple[int, ...] = ()
        self.counter = LedgerCounter(append.old.manifest.ledger if append else None)
        if append is not None:
            self._given, self._held = [append.num_given], append.held
            self.counter.take_back(NO_TOKENS, len(append.held))

    def add(self, feed: int, batch: EncodedBatch, *, start: int) -> None:
        """The next batch of a feed, of a unit that begins with chunk `start`."""
        if batch.starts_file:
            self._rows[feed] = 0
        if self._origins is not None:
            self._origins.note(feed, start + batch.chunk, self._rows[feed], self._out)
        drops = [drop.numbered(self._rows[feed]) for drop in batch.drops]
        for position in (*self._held, *batch.void):
            drops.append(void_drop(self._names[feed], self._given[feed] + position))
        self._held = ()
        self._rows[feed] += batch.num_rows
        self._given[feed] += batch.num_given
        write = self._write_documents if batch.examples is None else self._write_examples
        self.counter.add(batch, drops, write(feed, batch))
        self._out.record_drops(drops)

    def _write_documents(self, feed: int, batch: EncodedBatch) -> Mapping[str, int]:
        """To the splits that their feed fills; what was kept."""
        kept: Counter[str] = Counter()
        for placement in self._fillers[feed].place(batch.documents.lengths):
            if placement.split is not None:
                part = placement.take(batch.documents)
                self._out.append(placement.split, part, where=self._names[feed])
                kept.update(documents=len(part), tokens=len(part.values))
        return kept

    def _write_examples(self, feed: int, batch: EncodedBatch) -> Mapping[str, int]:
        """Whole, to the splits that were chosen for them; what was kept."""
        examples, chosen = batch.examples, batch.splits
        assert examples is not None, "a conversation comes with its mask and turns"
        assert chosen is not None, "and with its split"
        for number, split in enumerate(self._splits):
            part = examples.keep(np.equal(chosen, number))
            self._out.append_examples(split, part, where=self._names[feed])
        return {
            "documents": len(examples.ids),
            "tokens": len(examples.ids.values),
            "turns": len(examples.turn_starts),
            "trained_tokens": int(np.count_nonzero(examples.mask)),
        }

    def given(self, feed: int) -> int:
        """How many texts or conversations of a feed were added."""
        return self._given[feed]

    def is_full(self, feed: int) -> bool:
        """Whether nothing more of a feed would be kept."""
        return self._fillers[feed].full


def void_drop(source: str, number: int) -> Drop:
    """A text without a token, by its number among those that a source gave."""
    return Drop(id=f"{source}: document {number}", reason=NO_TOKENS)
