"""Join the journal's segments, in order, into the store, and balance the books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from shardmill.build.fill import Filler, take
from shardmill.build.segments import Receipt, load_segment
from shardmill.build.spec import Feed, Progress
from shardmill.shards import DocumentLedger, Ledger, StoreWriter, TokenLedger


def commit(
    feeds: Sequence[Feed],
    folder: Path,
    receipts: Sequence[Receipt],
    out: StoreWriter,
    *,
    dtype: str,
    on_progress: Callable[[Progress], None],
) -> Counter[str]:
    """Write every segment to the splits its feed fills. Returns what was kept, counted."""
    kept: Counter[str] = Counter()
    total = sum(receipt.num_tokens for receipt in receipts)
    done = 0
    for number, feed in enumerate(feeds):
        filler = Filler(feed.fill)
        for receipt in (receipt for receipt in receipts if receipt.feed == number):
            documents, drops = load_segment(folder, receipt, dtype)
            for placement in filler.place(documents.lengths):
                if placement.split is not None:
                    part = take(documents, placement)
                    out.append(placement.split, part, where=feed.source.name)
                    kept["documents"] += len(part)
                    kept["tokens"] += len(part.values)
            out.record_drops(drops)
            done += receipt.num_tokens
            on_progress(
                Progress(
                    phase="commit",
                    source=feed.source.name,
                    documents=kept["documents"],
                    tokens=done,
                    max_tokens=total,
                )
            )
    return kept


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
