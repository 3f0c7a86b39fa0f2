"""All parts of a stream from text to rows, ready to be opened.

In: a source, an encoder, and the rules of each part.  Out: rows of a stream from any mark on.
Promise: `rows` opens nothing before its first row is wanted, and closing it ends every thread. The
same mark gives the same rows.
Not here: what each part does; batches, processes and states (iterator).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from shardmill.protocols import Encoder, Source, Texts
from shardmill.records import JSON, Ragged
from shardmill.streaming.batch import LossRules
from shardmill.streaming.bins import BinRules, bin_rows
from shardmill.streaming.documents import DocumentStream
from shardmill.streaming.encode import DocumentRules, encoded_ahead
from shardmill.streaming.order import StreamOrder
from shardmill.streaming.records import Encoded, Mark, Rows
from shardmill.streaming.sequential import sequential_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """[A, B, T] of every batch."""

    grad_accum: int = 1
    batch_size: int
    seq_len: int

    @property
    def rows(self) -> int:
        return self.grad_accum * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How documents become rows."""

    seq_len: int
    pad_id: int
    bins: BinRules | None = None  # None: documents end to end, cut every seq_len + 1

    def rows(self, encoded: Iterator[Encoded], start: Mark | None) -> Generator[Rows, None, None]:
        seq_len, pad_id = self.seq_len, self.pad_id
        if self.bins is None:
            return sequential_rows(encoded, seq_len=seq_len, pad_id=pad_id, start=start)
        return bin_rows(encoded, self.bins, seq_len=seq_len, pad_id=pad_id, start=start)


class SharedEncoder:
    """One encoder for the threads of all streams: made when first used, one call at a time.

    The engines use all cores within a call, and one that watches itself counts its calls.
    """

    def __init__(self, make: Callable[[Texts], Encoder]) -> None:
        """`make` gets the first texts, on which an engine can be proved."""
        self._make = make
        self._encoder: Encoder | None = None
        self._lock = threading.Lock()

    def encode_batch(self, texts: Texts) -> Ragged:
        with self._lock:
            if self._encoder is None:
                self._encoder = self._make(texts)
            return self._encoder.encode_batch(texts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """Text to rows."""

    source: Source
    encoder: Encoder  # used from several threads: see SharedEncoder
    order: StreamOrder
    documents: DocumentRules
    packing: Packing
    loss: LossRules
    shape: BatchShape
    data: Mapping[str, JSON]  # ints and texts that a state must match, by name
    num_streams: int | None = None  # None: one for each consumer
    remake: Callable[[], Pipeline] | None = None  # what a pickle holds in place of the parts

    def rows(
        self, stream: int, num_streams: int, start: Mark, interrupt: threading.Event | None = None
    ) -> Generator[Rows, None, None]:
        """The rows of one stream from `start` on; `interrupt`, set from any thread, gives up."""
        documents = DocumentStream(self.source, self.order, stream=stream, num_streams=num_streams)
        ahead = encoded_ahead(
            documents,
            self.encoder,
            self.documents,
            start=start.place,
            skip=start.document,
            interrupt=interrupt,
        )
        with closing(ahead) as encoded, closing(self.packing.rows(encoded, start)) as rows:
            yield from rows

    def __reduce__(self) -> str | tuple[Any, ...]:
        return super().__reduce__() if self.remake is None else (self.remake, ())
