"""Texts of a source to documents in the dtype of the store.

In: a feed, the encoder, what the journal has already.  Out: portions for the journal.
Promise: a portion for each batch of the source, in order; a feed stops being read when its splits
are full; an id that does not fit is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from shardmill.ahead import read_ahead
from shardmill.build.fill import Filler, append_to_each
from shardmill.build.portion import Account, Portion
from shardmill.build.segments import Receipt, load_lengths
from shardmill.build.spec import BuildSpec, Feed, Progress, choose_dtype, end_id
from shardmill.protocols import Tokenizer
from shardmill.records import Drop, OffsetArray, Ragged, TextBatch
from shardmill.shards import check_tokens, fit_tokens
from shardmill.tokenizer import ChosenEncoder, vocab_size_of

OnProgress = Callable[[Progress], None]


class EncoderDesk(Protocol):
    """Gives the encoder, once the first texts to encode are known."""

    def encoder(self, first: Sequence[str]) -> ChosenEncoder: ...


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
        void = np.flatnonzero(ids.lengths == 0)
        drops = [Drop(id=f"{source}: document {first + i}", reason="no_tokens") for i in void]
        if self.end_id is None:
            documents = self.fit(ids, source=source, first=first)
            return _without(documents, void), drops
        # One pass for both: the cast is part of the copy that makes room for the end.
        check_tokens(ids, self.dtype, vocab_size=self.vocab_size, where=source, first=first)
        stored = np.dtype(self.dtype).newbyteorder("<")
        return append_to_each(_without(ids, void), self.end_id, stored), drops


def _without(documents: Ragged, void: OffsetArray) -> Ragged:
    """Without the documents `void`, which hold no token."""
    if not len(void):
        return documents
    return Ragged(documents.values, np.delete(documents.offsets, void + 1))


def token_rules(spec: BuildSpec, tokenizer: Tokenizer) -> TokenRules:
    vocab_size = vocab_size_of(tokenizer)
    return TokenRules(
        dtype=choose_dtype(spec.dtype, vocab_size),
        vocab_size=vocab_size,
        end_id=end_id(spec, tokenizer),
    )


class TextFeeder:
    """One feed of documents on its way into the journal. Reading, encoding and what the caller
    does with portions go on at the same time, each in a thread of its own."""

    def __init__(
        self,
        feed: Feed,
        folder: Path,
        *,
        desk: EncoderDesk,
        rules: TokenRules,
        on_progress: OnProgress,
    ) -> None:
        self._feed, self._folder, self._desk = feed, folder, desk
        self._rules, self._on_progress = rules, on_progress

    def portions(self, done: Sequence[Receipt]) -> Generator[tuple[Portion, Account], None, None]:
        """What follows the segments that are `done`; not read further when the splits are full."""
        start = done[-1].cursor if done else None
        with closing(read_ahead(self._feed.source.batches(start))) as batches:
            first = next(batches, None)
            encoder = self._desk.encoder(first.texts.to_pylist() if first is not None else [])
            rest = chain([first], batches) if first is not None else iter(())
            stream = _Stream(self._feed, self._rules, encoder, self._on_progress)
            for receipt in done:
                stream.skip(receipt, load_lengths(self._folder, receipt))
            with closing(read_ahead(_encoded(rest, encoder))) as encoded:
                yield from stream.portions(encoded)


def _encoded(
    batches: Iterator[TextBatch], encoder: ChosenEncoder
) -> Iterator[tuple[TextBatch, Ragged]]:
    for batch in batches:
        ids = encoder.encode_unwatched(batch.texts)
        assert len(ids) == len(batch.texts), "an encoder gives one sequence for each text"
        yield batch, ids


class _Stream:
    """One feed on its way from ids to documents."""

    def __init__(
        self, feed: Feed, rules: TokenRules, encoder: ChosenEncoder, on_progress: OnProgress
    ) -> None:
        self._source, self._filler = feed.source.name, Filler(feed.fill)
        self._rules, self._encoder, self._on_progress = rules, encoder, on_progress
        self._given = self._tokens = self._bytes = 0  # documents, tokens and bytes so far
        limits = [limit for _, limit in feed.fill]
        self._most = None if None in limits else sum(limit for limit in limits if limit)
        self._size = feed.source.size_hint()

    def skip(self, receipt: Receipt, lengths: OffsetArray) -> None:
        """Documents that are in the journal already."""
        self._filler.advance(lengths)
        self._given += receipt.num_documents + receipt.dropped.get("no_tokens", 0)
        self._tokens += receipt.num_tokens
        self._bytes += 4 * receipt.num_tokens  # nobody counted; about four bytes a token

    def portions(
        self, encoded: Iterator[tuple[TextBatch, Ragged]]
    ) -> Iterator[tuple[Portion, Account]]:
        """Until the feed ends or its splits are full."""
        while not self._filler.full and (item := next(encoded, None)) is not None:
            batch, ids = item
            self._encoder.watch(batch.texts, ids)
            documents, void = self._rules.apply(ids, source=self._source, first=self._given)
            self._filler.advance(documents.lengths)
            self._given += len(ids)
            self._tokens += len(documents.values)
            self._bytes += batch.texts.nbytes
            self._tell()
            account = Account(num_read=batch.num_read, counts=batch.counts, cursor=batch.cursor)
            yield Portion(documents=documents, drops=(*batch.drops, *void)), account

    def _tell(self) -> None:
        parts = [self._tokens / self._most] if self._most else []
        if self._size and self._bytes < self._size:
            parts.append(self._bytes / self._size)
        self._on_progress(
            Progress(
                source=self._source,
                documents=self._given,
                tokens=self._tokens,
                share=min(1.0, max(parts)) if parts else None,
            )
        )
