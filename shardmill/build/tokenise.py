"""Texts of a source to documents in the dtype of the store.

In: grains of a source, the encoder, where to go on.  Out: portions for the journal.
Promise: a portion for each batch of the source, in order; an id that does not fit is refused by
name.
Not here: when a feed has enough (commit.py, task.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np

from shardmill.ahead import read_ahead
from shardmill.build.fill import append_to_each
from shardmill.build.grains import GrainBatch, read_grains
from shardmill.build.memory import check_documents
from shardmill.build.portion import Account, Portion
from shardmill.build.spec import BuildSpec, choose_dtype, end_id
from shardmill.protocols import Source, Texts, Tokenizer
from shardmill.records import Cursor, OffsetArray, Ragged
from shardmill.shards import check_tokens, fit_tokens
from shardmill.tokenizer import ChosenEncoder, vocab_size_of

_Item = TypeVar("_Item")


class EncoderDesk(Protocol):
    """Gives the encoder, once the first texts to encode are known."""

    @property
    def has_spare_cores(self) -> bool:
        """Whether threads of this process find cores that nobody else uses."""

    def encoder(self, first: Texts) -> ChosenEncoder: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What becomes of encoded documents before they are written."""

    dtype: str
    vocab_size: int | None
    end_id: int | None

    def fit(self, ids: Ragged, *, source: str, first: int) -> Ragged:
        """The same ids in the store's dtype; `first` is the number of documents before these."""
        return fit_tokens(ids, self.dtype, vocab_size=self.vocab_size, where=source, first=first)

    def apply(self, ids: Ragged, *, source: str, first: int) -> tuple[Ragged, tuple[int, ...]]:
        """The documents as they are stored, and the places of those that gave no token at all."""
        void = np.flatnonzero(ids.lengths == 0)
        places = tuple(void.tolist())
        if self.end_id is None:
            documents = self.fit(ids, source=source, first=first)
            return _without(documents, void), places
        # One pass for both: the cast is part of the copy that makes room for the end.
        check_tokens(ids, self.dtype, vocab_size=self.vocab_size, where=source, first=first)
        stored = np.dtype(self.dtype).newbyteorder("<")
        return append_to_each(_without(ids, void), self.end_id, stored), places


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


def unit_portions(
    grains: Sequence[Source],
    *,
    source: str,
    cursor: Cursor | None,
    given: int,
    desk: EncoderDesk,
    rules: TokenRules,
    most_document: int,
) -> Generator[tuple[Portion, Account], None, None]:
    """The documents of some grains, from `cursor` on; `given` texts of the source lie before them.
    None may be larger than `most_document` bytes.

    Where there are cores to spare, reading, encoding and what the caller does with portions go on
    at the same time, each in a thread of its own. Where there are none, one after the other takes a
    sixth less CPU time with a fast engine: a batch stays in the caches of its core. A reference
    engine makes an object for every token, and keeps a thread, which has its own memory for them.
    """
    reading = read_ahead if desk.has_spare_cores else _as_asked
    with closing(reading(read_grains(grains, cursor))) as batches:
        first = next(batches, None)
        encoder = desk.encoder(first.batch.texts if first is not None else [])
        rest = chain([first], batches) if first is not None else iter(())
        checked = _checked(rest, most_document)
        encoding = _as_asked if encoder.is_fast and not desk.has_spare_cores else read_ahead
        with closing(encoding(_encoded(checked, encoder))) as encoded:
            for found, ids in encoded:
                encoder.watch(found.batch.texts, ids)
                documents, void = rules.apply(ids, source=source, first=given)
                given += len(ids)
                drops = found.batch.drops
                yield Portion(documents=documents, drops=drops, void=void), _account(found)


def _as_asked(items: Iterator[_Item]) -> Generator[_Item, None, None]:
    yield from items


def _account(found: GrainBatch) -> Account:
    batch = found.batch
    return Account(
        num_read=batch.num_read,
        num_given=len(batch.texts),
        num_bytes=batch.texts.nbytes,
        counts=batch.counts,
        num_rows=batch.num_rows,
        begins=found.begins,
        cursor=batch.cursor,
        grain=found.number,
    )


def _checked(batches: Iterator[GrainBatch], most_document: int) -> Iterator[GrainBatch]:
    for found in batches:
        check_documents(found.batch.texts, most_document, where=found.grain)
        yield found


def _encoded(
    batches: Iterator[GrainBatch], encoder: ChosenEncoder
) -> Iterator[tuple[GrainBatch, Ragged]]:
    for found in batches:
        ids = encoder.encode_unwatched(found.batch.texts)
        assert len(ids) == len(found.batch.texts), "an encoder gives one sequence for each text"
        yield found, ids
