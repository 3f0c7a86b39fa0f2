"""Fill the journal: the documents of each feed, tokenised, in segments.

Promise: the documents in the journal are those of the sources from the start, in order, whatever
was killed and resumed; a feed stops being read when its splits are full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from shardmill.build.fill import Filler, append_to_each
from shardmill.build.segments import Receipt, SegmentWriter, load_lengths
from shardmill.build.spec import BuildSpec, Feed, Progress, choose_dtype, end_id
from shardmill.protocols import Encoder, Tokenizer
from shardmill.records import Drop, Ragged, TextBatch
from shardmill.shards import fit_tokens
from shardmill.tokenizer import vocab_size_of

OnProgress = Callable[[Progress], None]


class EncoderDesk(Protocol):
    """Gives the encoder, once the first texts to encode are known."""

    def encoder(self, first: TextBatch | None) -> Encoder: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What becomes of encoded documents before they are written."""

    dtype: str
    vocab_size: int | None
    end_id: int | None

    def fit(self, ids: Ragged, *, source: str, first: int) -> Ragged:
        """The same ids in the store's dtype; `first` is the number of documents before these."""
        return fit_tokens(ids, self.dtype, vocab_size=self.vocab_size, where=source, first=first)

    def apply(self, ids: Ragged, *, source: str, first: int) -> tuple[Ragged, list[Drop]]:
        """The documents as they are stored, and those that gave no token at all."""
        documents = self.fit(ids, source=source, first=first)
        void = np.flatnonzero(documents.lengths == 0)
        drops = [Drop(id=f"{source}: document {first + i}", reason="no_tokens") for i in void]
        if len(void):
            documents = Ragged(documents.values, np.delete(documents.offsets, void + 1))
        if self.end_id is not None:
            documents = append_to_each(documents, self.end_id)
        return documents, drops


def token_rules(spec: BuildSpec, tokenizer: Tokenizer) -> TokenRules:
    vocab_size = vocab_size_of(tokenizer)
    return TokenRules(
        dtype=choose_dtype(spec.dtype, vocab_size),
        vocab_size=vocab_size,
        end_id=end_id(spec, tokenizer),
    )


def fill_journal(
    feeds: Sequence[Feed],
    folder: Path,
    receipts: list[Receipt],
    *,
    desk: EncoderDesk,
    rules: TokenRules,
    on_progress: OnProgress,
) -> None:
    """Go on after `receipts` until every feed is done; each new receipt is appended to them."""
    for number, feed in enumerate(feeds):
        mine = [receipt for receipt in receipts if receipt.feed == number]
        if mine and mine[-1].last:
            continue
        filler = Filler(feed.fill)
        for receipt in mine:
            filler.advance(load_lengths(folder, receipt))
        batches = feed.source.batches(mine[-1].cursor if mine else None)
        first = next(batches, None)
        encoder = desk.encoder(first)
        batches = chain([first], batches) if first is not None else iter(())
        for receipt in _segments(
            _Tokenised(feed, batches, encoder, rules, filler, mine, on_progress),
            folder,
            number=len(receipts),
            feed=number,
        ):
            receipts.append(receipt)


class _Tokenised:
    """The rest of one feed as (batch, documents, drops), until it ends or its splits are full."""

    def __init__(
        self,
        feed: Feed,
        batches: Iterator[TextBatch],
        encoder: Encoder,
        rules: TokenRules,
        filler: Filler,
        done: Sequence[Receipt],
        on_progress: OnProgress,
    ) -> None:
        self.feed, self.batches, self.encoder = feed, batches, encoder
        self.rules, self.filler, self.on_progress = rules, filler, on_progress
        self.cursor = done[-1].cursor if done else {}
        self.given = sum(r.num_documents + r.dropped.get("no_tokens", 0) for r in done)
        self.tokens = sum(receipt.num_tokens for receipt in done)

    def __iter__(self) -> Iterator[tuple[TextBatch, Ragged, list[Drop]]]:
        limits = [limit for _, limit in self.feed.fill]
        most = None if None in limits else sum(limit for limit in limits if limit is not None)
        while not self.filler.full:
            batch = next(self.batches, None)
            if batch is None:
                return
            ids = self.encoder.encode_batch(batch.texts)
            assert len(ids) == len(batch.texts), "an encoder gives one sequence for each text"
            source = self.feed.source.name
            documents, void = self.rules.apply(ids, source=source, first=self.given)
            self.filler.advance(documents.lengths)
            self.cursor = batch.cursor
            self.given += len(ids)
            self.tokens += len(documents.values)
            self.on_progress(
                Progress(
                    phase="tokenise",
                    source=source,
                    documents=self.given,
                    tokens=self.tokens,
                    max_tokens=most,
                )
            )
            yield batch, documents, [*batch.drops, *void]


def _segments(stream: _Tokenised, folder: Path, *, number: int, feed: int) -> Iterator[Receipt]:
    """Write a feed's documents into segments; the last one is marked, and may be empty."""
    segment = SegmentWriter(folder, number=number, feed=feed)
    try:
        for batch, documents, drops in stream:
            segment.add(documents, drops, num_read=batch.num_read, counts=batch.counts)
            if segment.due and not stream.filler.full:
                yield segment.seal(batch.cursor, last=False)
                number += 1
                segment = SegmentWriter(folder, number=number, feed=feed)
        yield segment.seal(stream.cursor, last=True)
    finally:
        segment.abandon()
