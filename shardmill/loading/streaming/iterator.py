"""Batches of one process, with a position that can be saved and set.

In: a pipeline, and which of how many processes this is.  Out: `Batch`es of one shape.
Promise: behind a state come exactly the batches that followed it, on the same number of processes;
on another one that divides the number of streams, the same rows in all. Every token of every
document is in exactly one row of one process. An error is never taken for the end: the iterator
stays where it was behind the last batch given, and asking again tries again from there.
Not here: prefetching of batches (grain), tensors (pytorch).

Several streams of rows become one, a row of each in turn.

In: streams of `Rows`, each at a position.  Out: rows, copied into the arrays of a batch.
Promise: the next row comes from the living stream that has given the fewest (the first of those),
so the order is a function of the positions alone; a stream that has ended is passed over.
Not here: threads, batches, states.

All parts of a stream from text to rows, ready to be opened.

In: a source, an encoder, and the rules of each part.  Out: rows of a stream from any mark on.
Promise: `rows` opens nothing before its first row is wanted, and closing it ends every thread. The
same mark gives the same rows.
Not here: what each part does; batches, processes and states (iterator).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.streaming.batch import LossRules, make_batch
from shardmill.loading.streaming.bin_rows import BinRules, bin_rows
from shardmill.loading.streaming.documents import DocumentStream
from shardmill.loading.streaming.encode import DocumentRules, encoded_ahead
from shardmill.loading.streaming.records import (
    Counts,
    Encoded,
    Mark,
    StreamOrder,
    StreamRows,
    StreamStats,
    Tokens,
)
from shardmill.loading.streaming.sequential_rows import sequential_rows
from shardmill.loading.streaming.state import (
    MOST_STREAMS,
    PlaceTexts,
    Position,
    Saved,
    State,
    check_data,
    check_seal,
    read_state,
    write_state,
)
from shardmill.machine import check_memory
from shardmill.protocols import Closing, Encoder, Source, Texts
from shardmill.records import JSON, Batch, Ragged
from shardmill.threads import StoppedError

log = logging.getLogger(__name__)


class RowStream:
    """The rows of one stream from a position on. Nothing is opened before the first is wanted."""

    def __init__(
        self, number: int, rows: Generator[StreamRows, None, None], position: Position
    ) -> None:
        self.number = number
        self._rows = rows
        self._position = position  # before the rows `_counted.._taken` of the chunk
        self._chunk: StreamRows | None = None
        self._counted = self._taken = 0
        self._num_given = position.counts.rows

    @property
    def turn(self) -> tuple[int, int]:
        """The stream with the smallest is next."""
        return self._num_given, self.number

    def position(self) -> Position:
        """Behind the last row taken."""
        if self._chunk is not None and self._counted < self._taken:
            counts = self._position.counts.after_rows(self._chunk, self._counted, self._taken)
            self._position = Position(mark=self._chunk.mark_after(self._taken - 1), counts=counts)
            self._counted = self._taken
        return self._position

    def has_rows(self) -> bool:
        """Whether another row comes; waits for it."""
        while self._chunk is None or self._taken == len(self._chunk):
            position, chunk = self.position(), next(self._rows, None)
            if chunk is None:
                return False
            self._chunk, self._counted, self._taken = chunk, 0, 0
            if not len(chunk):  # what was read at the end and gave no row
                counts = position.counts.with_input(chunk.read)
                self._position = Position(mark=position.mark, counts=counts)
        return True

    def take(self, most: int) -> tuple[Tokens, Tokens]:
        """Tokens and segments of the next rows, at least one, as views. After `has_rows`."""
        assert self._chunk is not None
        start = self._taken
        stop = self._taken = min(start + most, len(self._chunk))
        self._num_given += stop - start
        return self._chunk.tokens[start:stop], self._chunk.segments[start:stop]

    def count_filler(self, rows: int, row_len: int) -> None:
        """Rows of padding alone, which this stream answers for."""
        before = self.position()
        counts = before.counts + Counts.of_filler(rows, row_len)
        self._position = Position(mark=before.mark, counts=counts)
        self._num_given += rows

    def close(self) -> None:
        self._rows.close()


class RowsInTurn:
    """The rows of all streams."""

    def __init__(self, streams: Sequence[RowStream]) -> None:
        self._streams = tuple(streams)
        self._living = list(streams)

    def fill(self, tokens: Tokens, segments: Tokens) -> int:
        """Write rows into both arrays; gives how many, fewer than there is room for at the end.

        What stays free is padding: it counts for the first stream, if there were rows at all.
        """
        filled = 0
        while self._living and filled < len(tokens):
            stream = min(self._living, key=lambda one: one.turn)
            if not stream.has_rows():
                self._living.remove(stream)
                stream.close()
                continue
            most = min(len(tokens) - filled, self._rows_until_another(stream))
            some_tokens, some_segments = stream.take(most)
            tokens[filled : filled + len(some_tokens)] = some_tokens
            segments[filled : filled + len(some_tokens)] = some_segments
            filled += len(some_tokens)
        if 0 < filled < len(tokens):
            self._streams[0].count_filler(len(tokens) - filled, tokens.shape[1])
        return filled

    def positions(self) -> dict[int, Position]:
        return {stream.number: stream.position() for stream in self._streams}

    def close(self) -> None:
        """End all threads."""
        for stream in self._streams:
            stream.close()

    def _rows_until_another(self, stream: RowStream) -> int:
        """How many rows this stream may give before it is another's turn."""
        others = [one.turn for one in self._living if one is not stream]
        if not others:
            return 2**63 - 1
        rows, number = min(others)
        return rows - stream.turn[0] + (stream.number < number)


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

    def rows(
        self, encoded: Iterator[Encoded], start: Mark | None
    ) -> Generator[StreamRows, None, None]:
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
    ) -> Generator[StreamRows, None, None]:
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


class BatchIterator(Closing, Iterator[Batch]):
    """Consumer `process_index` of `process_count`: it runs every process_count-th stream.

    Nothing is opened before the first `next`. Not for several threads at once, but for `interrupt`.
    A copy made by pickling or forking goes on by itself from the same position.
    """

    def __init__(
        self, pipeline: Pipeline, *, process_index: int = 0, process_count: int = 1
    ) -> None:
        self._pipeline = pipeline
        self.process_count = whole_number(process_count, "process_count")
        self.process_index = whole_number(process_index, "process_index", least=0)
        if self.process_index >= self.process_count:
            raise OptionError(
                f"process_index={self.process_index}: wanted 0 to {self.process_count - 1}, since "
                f"process_count={self.process_count}"
            )
        wanted = pipeline.num_streams
        self._num_streams = self.process_count if wanted is None else wanted
        if self._num_streams > MOST_STREAMS:
            raise OptionError(f"num_streams={self._num_streams:,}: wanted at most {MOST_STREAMS:,}")
        if self._num_streams % self.process_count:
            raise OptionError(
                f"num_streams={self._num_streams} cannot be shared by {self.process_count} "
                f"processes (DataLoader workers count as processes); {_divisors(self._num_streams)}"
            )
        shape = pipeline.shape
        check_memory(
            16 * shape.rows * (shape.seq_len + 1),
            f"a batch of [{shape.grad_accum:,}, {shape.batch_size:,}, {shape.seq_len:,}]",
            "lower grad_accum, batch_size or seq_len",
        )
        self._positions = {stream: Position() for stream in self._own_streams(self._num_streams)}
        self._batch = Counts()
        self._texts = PlaceTexts()
        self._open: RowsInTurn | None = None
        self._opened_by = 0  # process id: threads do not follow into a fork
        self._given_up = threading.Event()  # of what is open
        self._busy = threading.Lock()
        self._ended = self._closed = self._told = False

    @property
    def num_streams(self) -> int:
        """Of all processes together."""
        return self._num_streams

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if not self._busy.acquire(blocking=False):
            raise OptionError(
                "another thread is making a batch of this iterator; let one thread ask, or give "
                "each its own with process_index and process_count"
            )
        try:
            return self._next()
        except StoppedError:
            raise OptionError("this iterator was closed while it made a batch") from None
        finally:
            self._busy.release()

    def _next(self) -> Batch:
        if self._closed:
            raise OptionError("this iterator was closed; make a new one and set its state")
        if self._ended:
            raise StopIteration
        shape, packing = self._pipeline.shape, self._pipeline.packing
        tokens = np.full((shape.rows, shape.seq_len + 1), packing.pad_id, np.int32)
        segments = np.zeros_like(tokens)
        opened = self._opened()
        try:
            filled = opened.fill(tokens, segments)
            positions = opened.positions()
            batch = self._batch_of(tokens, segments) if filled else None
        except BaseException:
            self._end_threads()
            raise
        before = self._totals
        self._tell_epochs(positions)
        self._positions = positions
        if batch is None:
            self._ended = True
            self._end_threads()
            raise StopIteration
        self._batch = self._totals - before
        return batch

    def get_state(self) -> State:
        """Where the run is behind the last batch given: JSON, about 2 KB."""
        return write_state(self._saved(), self._texts)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that `state` followed. A refused state changes nothing."""
        saved = read_state(state)
        check_data(saved.data, self._pipeline.data)
        check_seal(saved)
        own = self._checked_streams(saved)
        self._end_threads()
        self._num_streams = saved.num_streams
        self._positions = {stream: saved.positions[stream] for stream in own}
        self._batch = Counts()
        self._ended = False

    def stats(self) -> StreamStats:
        """Of the last batch given and of the run so far, this process alone."""
        return StreamStats(batch=self._batch, total=self._totals)

    def interrupt(self) -> None:
        """Give up the batch that another thread waits for, and be closed: from any thread."""
        self._closed = True
        self._given_up.set()

    def close(self) -> None:
        """End all threads. The state can still be asked for."""
        self.interrupt()
        with self._busy:
            self._end_threads()

    def __repr__(self) -> str:
        shape = self._pipeline.shape
        return (
            f"BatchIterator({self._pipeline.source!r}, shape=({shape.grad_accum}, "
            f"{shape.batch_size}, {shape.seq_len}), process {self.process_index} of "
            f"{self.process_count}, rows={self._totals.rows:,})"
        )

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_open", "_texts", "_given_up", "_busy")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open, self._texts = None, PlaceTexts()
        self._given_up, self._busy = threading.Event(), threading.Lock()

    @property
    def _totals(self) -> Counts:
        return self._saved().totals

    def _saved(self) -> Saved:
        return Saved(
            num_streams=self._num_streams,
            positions=self._positions,
            data=self._pipeline.data,
        )

    def _own_streams(self, num_streams: int) -> range:
        return range(self.process_index, num_streams, self.process_count)

    def _batch_of(self, tokens: Any, segments: Any) -> Batch:
        pipeline = self._pipeline
        return make_batch(
            tokens, segments, grad_accum=pipeline.shape.grad_accum, loss=pipeline.loss
        )

    def _opened(self) -> RowsInTurn:
        if self._open is None or self._opened_by != os.getpid():
            self._opened_by = os.getpid()
            rows = self._pipeline.rows
            self._open = RowsInTurn(
                [
                    RowStream(
                        stream, rows(stream, self._num_streams, one.mark, self._given_up), one
                    )
                    for stream, one in self._positions.items()
                ]
            )
        return self._open

    def _tell_epochs(self, positions: Mapping[int, Position]) -> None:
        """A batch that runs through the data more than once is rarely meant; said once."""
        passed = [
            position.mark.place.epoch - self._positions[stream].mark.place.epoch
            for stream, position in positions.items()
        ]
        if not self._told and max(passed) > 1:
            self._told = True
            log.warning(
                "%r: one batch took the data %d times over; is it larger than the data?",
                *(self, max(passed)),
            )

    def _end_threads(self) -> None:
        opened, self._open = self._open, None
        if opened is not None and self._opened_by == os.getpid():
            opened.close()

    def _checked_streams(self, saved: Saved) -> range:
        """The streams of this process, all of which the state holds."""
        fixed = self._pipeline.num_streams
        if fixed is not None and saved.num_streams != fixed:
            raise StateMismatchError(
                f"num_streams: the state has {saved.num_streams}, this stream {fixed}; leave it "
                f"out to take the state's, or set it to {saved.num_streams}"
            )
        if saved.num_streams % self.process_count:
            raise StateMismatchError(
                f"the state has {saved.num_streams} streams, which {self.process_count} processes "
                f"(DataLoader workers count as processes) cannot share; "
                f"{_divisors(saved.num_streams)}"
            )
        own = self._own_streams(saved.num_streams)
        missing = sorted(set(own) - saved.positions.keys())
        if missing:
            raise StateMismatchError(
                f"process {self.process_index} of {self.process_count} needs streams {missing} of "
                f"{saved.num_streams}, but the state holds {sorted(saved.positions)}; pass the "
                f"state that this process saved, or join_states() of those of all processes"
            )
        return own


def _divisors(num_streams: int) -> str:
    counts = [count for count in range(1, num_streams + 1) if num_streams % count == 0]
    return f"these numbers of processes can: {', '.join(map(str, counts))}"
