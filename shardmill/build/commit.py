"""Put the journal's documents, in order, into the store, and balance the books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shardmill.build.fill import Filler, take
from shardmill.build.segments import Receipt
from shardmill.build.spec import Feed
from shardmill.records import Drop, Ragged
from shardmill.shards import DocumentLedger, Ledger, StoreWriter, TokenLedger


class Committer:
    """Writes documents, as they come, to the splits their feeds fill.

    The store is staged beside the journal and made anew by a resume, so a document may be here
    before its segment is sealed.
    """

    def __init__(self, feeds: Sequence[Feed], out: StoreWriter) -> None:
        self._names = [feed.source.name for feed in feeds]
        self._fillers = [Filler(feed.fill) for feed in feeds]
        self._out = out
        self._kept: Counter[str] = Counter()
        self._receipts: list[Receipt] = []

    def add(self, feed: int, documents: Ragged, drops: Iterable[Drop]) -> None:
        """The next documents of a feed."""
        for placement in self._fillers[feed].place(documents.lengths):
            if placement.split is not None:
                part = take(documents, placement)
                self._out.append(placement.split, part, where=self._names[feed])
                self._kept["documents"] += len(part)
                self._kept["tokens"] += len(part.values)
        self._out.record_drops(drops)

    def seal(self, receipt: Receipt) -> None:
        """What was added since the last receipt is this segment."""
        assert receipt.number == len(self._receipts), "segments come in order"
        self._receipts.append(receipt)

    def ledger(self, *, separators: bool) -> Ledger:
        """The books, when every segment was added: each feed has its last, and none is missing."""
        ended = [receipt.feed for receipt in self._receipts if receipt.last]
        assert ended == list(range(len(self._names))), "every feed ended once, in order"
        return balance(self._receipts, self._kept, separators=separators)


def balance(receipts: Sequence[Receipt], kept: Counter[str], *, separators: bool) -> Ledger:
    """Every row read and every token made, each in one bucket."""
    counts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for receipt in receipts:
        counts.update(receipt.counts)
        dropped.update(receipt.dropped)
    documents = sum(receipt.num_documents for receipt in receipts)
    tokens = sum(receipt.num_tokens for receipt in receipts)
    num_separators = documents if separators else 0
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
    )
