"""What a stream has given so far, in numbers that survive a resume.

In: rows as they are taken.  Out: `Counts` of a batch and of the whole run.
Promise: `tokens + padding == rows * (seq_len + 1)`; over an epoch `tokens + truncated_tokens` is
every token of every document. The totals are part of the state, so a resumed run counts on.
Not here: time. Whoever wants tokens per second has a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from operator import add, attrgetter, sub

import numpy as np

from shardmill.records import JSON
from shardmill.streaming.records import Rows, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Rows given and what they hold; `input_...`: what was read to make them, in input rows.

    Reading is ahead of giving by what is buffered. What other streams take of the rows that this
    one reads is `input_elsewhere`; rows without text count in one stream alone, so that over all
    processes `input_documents + input_empty + input_dropped` is the input.
    """

    rows: int = 0  # those of padding alone, in the last batch, included
    tokens: int = 0  # padding not included
    padding: int = 0  # tokens
    documents: int = 0  # whose first token was given
    truncated_documents: int = 0  # those of them that max_doc_tokens cut
    truncated_tokens: int = 0  # and what it took off
    input_documents: int = 0
    input_elsewhere: int = 0
    input_empty: int = 0
    input_dropped: int = 0
    input_repaired: int = 0  # of the documents: bytes that were no UTF-8 were replaced

    @property
    def input_read(self) -> int:
        """Input rows: each is in exactly one of documents, elsewhere, empty, dropped."""
        return self.input_documents + self.input_elsewhere + self.input_empty + self.input_dropped

    @property
    def utilisation(self) -> float:
        """The share of tokens that is no padding; 1 when there are no rows."""
        return self.tokens / (self.tokens + self.padding) if self.rows else 1.0

    @property
    def padding_share(self) -> float:
        return 1.0 - self.utilisation

    def __add__(self, other: Counts) -> Counts:
        return Counts.of(map(add, self.values(), other.values()))

    def __sub__(self, other: Counts) -> Counts:
        return Counts.of(map(sub, self.values(), other.values()))

    def values(self) -> tuple[int, ...]:
        """In the order of `NAMES`."""
        found: tuple[int, ...] = _values_of(self)
        return found

    def items(self) -> list[tuple[str, int]]:
        return list(zip(NAMES, self.values(), strict=True))

    def to_dict(self) -> dict[str, JSON]:
        """The counts, and the shares that follow from them."""
        shares = {"utilisation": self.utilisation, "padding_share": self.padding_share}
        return {**dict(self.items()), "input_read": self.input_read, **shares}

    def with_input(self, read: Tally) -> Counts:
        return replace(
            self,
            input_documents=read.documents,
            input_elsewhere=read.elsewhere,
            input_empty=read.empty,
            input_dropped=read.dropped,
            input_repaired=read.repaired,
        )

    def after_rows(self, rows: Rows, start: int, stop: int) -> Counts:
        """These counts, once rows `start..stop` of `rows` are given too."""
        segments = rows.segments[start:stop]
        tokens = int(np.count_nonzero(segments))
        told = replace(
            self,
            rows=self.rows + stop - start,
            tokens=self.tokens + tokens,
            padding=self.padding + segments.size - tokens,
            documents=self.documents + int(rows.begun[start:stop].sum()),
            truncated_documents=self.truncated_documents
            + int(rows.cut_documents[start:stop].sum()),
            truncated_tokens=self.truncated_tokens + int(rows.cut_tokens[start:stop].sum()),
        )
        return told.with_input(rows.read)

    @classmethod
    def of(cls, values: Iterable[int]) -> Counts:
        """From `values()`."""
        return cls(**dict(zip(NAMES, values, strict=True)))

    @classmethod
    def of_filler(cls, rows: int, row_len: int) -> Counts:
        """Rows of padding alone."""
        return cls(rows=rows, padding=rows * row_len)


NAMES = tuple(field.name for field in fields(Counts))
"""The names of the counts, in the order in which a state holds them."""
_values_of = attrgetter(*NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """Of the last batch given, and of all since the beginning of the run."""

    batch: Counts
    total: Counts

    def to_dict(self) -> dict[str, JSON]:
        return {"batch": self.batch.to_dict(), "total": self.total.to_dict()}
