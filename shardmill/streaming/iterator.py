"""Batches of one process, with a position that can be saved and set.

In: a pipeline, and which of how many processes this is.  Out: `Batch`es of one shape.
Promise: behind a state come exactly the batches that followed it, on the same number of processes;
on another one that divides the number of streams, the same rows in all. Every token of every
document is in exactly one row of one process. An error is never taken for the end: the iterator
stays where it was behind the last batch given, and asking again tries again from there.
Not here: prefetching of batches (grain), tensors (pytorch).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from shardmill.ahead import StoppedError
from shardmill.arguments import check_memory, whole_number
from shardmill.closing import Closing
from shardmill.errors import OptionError, StateMismatchError
from shardmill.streaming.batch import make_batch
from shardmill.streaming.pipeline import Pipeline
from shardmill.streaming.positions import PlaceTexts, Position
from shardmill.streaming.records import Batch
from shardmill.streaming.state import (
    MOST_STREAMS,
    Saved,
    State,
    check_data,
    check_seal,
    read_state,
    write_state,
)
from shardmill.streaming.stats import Counts, StreamStats
from shardmill.streaming.streams import RowsInTurn, RowStream

log = logging.getLogger(__name__)


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
