"""Put the journal's documents, in order, into the store, and balance the books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from shardmill.build.fill import Filler, take
from shardmill.build.portion import Portion
from shardmill.build.segments import Receipt
from shardmill.build.spec import Feed
from shardmill.shards import ChatLedger, DocumentLedger, Ledger, StoreWriter, TokenLedger

Place: TypeAlias = Callable[[int, Portion], Mapping[str, int]]
"""(feed, portion) -> what of it was kept: it is in the store when the call returns."""


class DocumentPlaces:
    """Documents go to the splits that their feeds fill."""

    def __init__(self, feeds: Sequence[Feed], out: StoreWriter) -> None:
        self._names = [feed.source.name for feed in feeds]
        self._fillers = [Filler(feed.fill) for feed in feeds]
        self._out = out

    def __call__(self, feed: int, portion: Portion) -> Mapping[str, int]:
        kept: Counter[str] = Counter()
        for placement in self._fillers[feed].place(portion.documents.lengths):
            if placement.split is not None:
                part = take(portion.documents, placement)
                self._out.append(placement.split, part, where=self._names[feed])
                kept.update(documents=len(part), tokens=len(part.values))
        return kept


class ExamplePlaces:
    """Conversations go to the split that is written with them, whole."""

    def __init__(self, name: str, splits: Sequence[str], out: StoreWriter) -> None:
        self._name, self._splits, self._out = name, splits, out

    def __call__(self, _feed: int, portion: Portion) -> Mapping[str, int]:
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


class Committer:
    """Writes portions to the store as they come.

    The store is staged beside the journal and made anew by a resume, so a document may be here
    before its segment is sealed.
    """

    def __init__(self, num_feeds: int, out: StoreWriter, place: Place) -> None:
        self._num_feeds, self._out, self._place = num_feeds, out, place
        self._kept: Counter[str] = Counter()
        self._receipts: list[Receipt] = []

    def add(self, feed: int, portion: Portion) -> None:
        """The next portion of a feed."""
        self._kept.update(self._place(feed, portion))
        self._out.record_drops(portion.drops)

    def seal(self, receipt: Receipt) -> None:
        """What was added since the last receipt is this segment."""
        assert receipt.number == len(self._receipts), "segments come in order"
        self._receipts.append(receipt)

    def ledger(self, *, separators: bool = False, chat: bool = False) -> Ledger:
        """The books, when every segment was added: each feed has its last, and none is missing."""
        ended = [receipt.feed for receipt in self._receipts if receipt.last]
        assert ended == list(range(self._num_feeds)), "every feed ended once, in order"
        return balance(self._receipts, self._kept, separators=separators, chat=chat)


def balance(
    receipts: Sequence[Receipt], kept: Counter[str], *, separators: bool = False, chat: bool = False
) -> Ledger:
    """Every row read and every token made, each in one bucket."""
    counts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for receipt in receipts:
        counts.update(receipt.counts)
        dropped.update(receipt.dropped)
    documents = sum(receipt.num_documents for receipt in receipts)
    tokens = sum(receipt.num_tokens for receipt in receipts)
    num_separators = documents if separators else 0
    books = ChatLedger(turns=kept["turns"], trained_tokens=kept["trained_tokens"])
    return Ledger(
        documents=DocumentLedger(
            read=sum(receipt.num_read for receipt in receipts),
            kept=kept["documents"],
            empty=counts["empty"],
            over_budget=documents - kept["documents"],
            dropped=dict(sorted(dropped.items())),
        ),
        tokens=TokenLedger(
            encoded=tokens - num_separators,
            separators=num_separators,
            kept=kept["tokens"],
            over_budget=tokens - kept["tokens"],
        ),
        repaired={"invalid_utf8": counts["invalid_utf8"]} if counts["invalid_utf8"] else {},
        chat=books if chat else None,
    )
