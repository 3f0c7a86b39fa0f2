"""What flows inside this room: documents with their place, rows with a mark behind each.

Promise: a `Mark` is all that is needed to make every later row again, from the source itself; no
text and no token is in it. So a state stays small whatever is buffered.
Not here: behaviour. `Place` and `Mark` as JSON: see state.

In which order a stream reads its source, as the user chose it.

In: numbers of a config.  Out: one checked record.
Promise: together with the source this decides every document of every epoch.
Not here: reading.

What a stream has given so far, in numbers that survive a resume.

In: rows as they are taken.  Out: `Counts` of a batch and of the whole run.
Promise: `tokens + padding == rows * (seq_len + 1)`; over an epoch `tokens + truncated_tokens` is
every token of every document. The totals are part of the state, so a resumed run counts on.
Not here: time. Whoever wants tokens per second has a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from operator import add, attrgetter, sub
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.records import JSON, Cursor, OffsetArray, Ragged
from shardmill.sampling.seeds import checked_seed

if TYPE_CHECKING:
    import pyarrow as pa


Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a stream has read since its beginning, all epochs together, in input rows.

    A batch of the source is counted when its first document is, so the buckets always sum up. Of
    streams that read the same rows the first alone counts those without text: over all streams
    `documents + empty + dropped` is the input.
    """

    documents: int = 0  # texts that belong to this stream
    elsewhere: int = 0  # texts that other streams take
    empty: int = 0  # rows without text
    dropped: int = 0  # rows that gave no text, for a reason that was logged
    repaired: int = 0  # texts with bytes that were no UTF-8 and were replaced

    @property
    def read(self) -> int:
        return self.documents + self.elsewhere + self.empty + self.dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCursor:
    """Where a stream of documents goes on: before a batch of a unit, or inside one."""

    epoch: int = 0
    unit: int = 0  # how many units of this epoch's order are done
    cursor: Cursor | None = None  # in the unit that follows; None: its start
    skip: int = 0  # texts of the batch behind the cursor that are done, whoever took them
    number: int = 0  # texts of this epoch that are done, whoever took them
    tally: Tally = field(default_factory=Tally)  # of all that is done


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Documents in the order of their use. The same `start` gives the same block."""

    start: StreamCursor
    texts: pa.LargeStringArray  # may be empty: only rows without text came
    end: StreamCursor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """Some documents of one block as ids, BOS and EOS included."""

    block: StreamCursor  # where the block starts
    first: int  # documents of the block before these
    ids: Ragged  # int32
    cut: OffsetArray  # (n,) ids taken off the end of each document by max_doc_tokens; mostly 0
    read: Tally  # what was read up to the end of the block


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where the next row of a stream comes from."""

    place: StreamCursor  # of the block that holds its oldest document
    document: int = 0  # of that block; its length: nothing of it is left
    part: int = 0  # sequential: ids of that document in earlier rows; bins: rows that the buffer
    # which begins with that document has given already


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamRows:
    """`n` rows that belong together, and the mark behind each of them."""

    tokens: Tokens  # (n, seq_len + 1), padded behind the documents
    segments: Tokens  # (n, seq_len + 1): 1, 2, ... in each row; 0: padding
    places: tuple[StreamCursor, ...]  # those that the marks speak of
    place: OffsetArray  # (n,) which of `places`
    document: OffsetArray  # (n,) Mark.document
    part: OffsetArray  # (n,) Mark.part
    begun: OffsetArray  # (n,) documents whose first token is in the row
    cut_documents: OffsetArray  # (n,) how many of those had ids cut off
    cut_tokens: OffsetArray  # (n,) and how many ids
    read: Tally  # what was read for these rows

    def __len__(self) -> int:
        return len(self.tokens)

    def mark_after(self, row: int) -> Mark:
        return Mark(
            place=self.places[self.place[row]],
            document=int(self.document[row]),
            part=int(self.part[row]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """Equal orders over equal sources give equal streams."""

    seed: int = 0
    shuffle: bool = False  # units in a drawn order, and documents within blocks
    buffer_documents: int = 10_000  # of a shuffled block, at most
    buffer_bytes: int = 256 * 2**20  # of its text, at most; one document always fits
    repeat: bool = False  # epochs without end, each in its own order
    max_documents: int | None = None  # of each epoch, all streams together; None: all

    def __post_init__(self) -> None:
        checked_seed(self.seed)
        whole_number(self.buffer_documents, "shuffle_buffer_size")
        whole_number(self.buffer_bytes, "shuffle_buffer_bytes")
        if self.max_documents is not None:
            whole_number(self.max_documents, "max_documents")


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

    def after_rows(self, rows: StreamRows, start: int, stop: int) -> Counts:
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
