"""`TextStream`: batches made straight from text, with a position that can be saved and restored.

A run is divided into `num_streams` streams of documents, and each rank has its share of them. From
a state come exactly the batches that followed it on the same number of ranks; on another number
that divides `num_streams`, the same rows overall. An error is never taken for the end of the data:
the stream stays after the last batch that it gave, and `next` tries again from there.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import msgspec
import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.fim import FimCounts, FimRules, fim_facts
from shardmill.loading.state import (
    MAX_STREAMS,
    Counts,
    Position,
    Saved,
    State,
    StreamStats,
    read_stream_state,
    stream_state,
)
from shardmill.loading.streaming.documents import DocumentStream, StreamOrder, encoded_ahead
from shardmill.loading.streaming.rows import (
    BinRules,
    StreamRows,
    Tokens,
    bin_rows,
    rearranged_rows,
    sequential_rows,
)
from shardmill.loading.streaming.tokenizer import StreamTokenizer
from shardmill.machine import check_memory
from shardmill.protocols import Closing, Encoder, Source, Texts
from shardmill.records import JSON, Batch, Ragged, next_token_pairs
from shardmill.threads import OneThread, StoppedError

log = logging.getLogger(__name__)

BATCH_DOCUMENTS = 2000
"""Most documents between two cursors of a source: what a resume reads again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRules:
    """Which labels are not trained, besides padding."""

    mask_boundary_loss: bool = True  # not the first token of a document, as a label of the last one
    train_on_eos: bool = True  # False: labels that are `eos_id` are not trained
    eos_id: int | None = None

    def __post_init__(self) -> None:
        if not self.train_on_eos and self.eos_id is None:
            raise OptionError(
                "{train_on_eos} needs the id of EOS, but there is none: give a tokenizer with an "
                "EOS, or keep train_on_eos=True",
                train_on_eos=False,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """[batch_size, seq_len], or [grad_accum, batch_size, seq_len] if grad_accum is given."""

    grad_accum: int | None = None
    batch_size: int
    seq_len: int

    @property
    def rows(self) -> int:
        return (self.grad_accum or 1) * self.batch_size

    @property
    def dimensions(self) -> tuple[int, ...]:
        accumulated = () if self.grad_accum is None else (self.grad_accum,)
        return (*accumulated, self.batch_size, self.seq_len)


def make_batch(
    tokens: Tokens, segments: Tokens, shape: BatchShape, loss: LossRules
) -> Batch[np.int32]:
    """Rows of `seq_len + 1` tokens as a batch. With grad_accum, the first rows are microbatch 0."""
    trained = segments != 0  # not padding
    if loss.mask_boundary_loss:
        trained[:, 1:] &= segments[:, :-1] == segments[:, 1:]
    if not loss.train_on_eos:
        trained &= tokens != loss.eos_id
    input_ids, labels = next_token_pairs(tokens, trained, dtype=np.int32)
    segment_ids = np.array(segments[:, :-1], dtype=np.int32, order="C")
    return Batch(
        input_ids=input_ids.reshape(shape.dimensions),
        labels=labels.reshape(shape.dimensions),
        attention_mask=(segment_ids > 0).reshape(shape.dimensions),
        segment_ids=segment_ids.reshape(shape.dimensions),
    )


class SharedEncoder:
    """One encoder for the threads of all streams: made at first use, one call at a time.

    The engines use all cores within a call, and one that checks itself counts its calls.
    """

    def __init__(self, tokenizer: StreamTokenizer, source: Source) -> None:
        self._tokenizer, self._source = tokenizer, source
        self._encoder: Encoder | None = None
        self._lock = threading.Lock()

    def encode_batch(self, texts: Texts) -> Ragged:
        with self._lock:
            if self._encoder is None:  # an engine is proved on the first texts
                corpus = texts if isinstance(texts, Sequence) else texts.to_pylist()
                size_hint = self._source.size_hint()
                self._encoder = self._tokenizer.encoder(corpus=corpus, size_hint=size_hint)
            return self._encoder.encode_batch(texts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """All parts of a stream, ready to be opened.

    Batch size, accumulation, retries and the engine may change between runs; everything in `data`
    may not.
    """

    source: Source
    tokenizer: StreamTokenizer
    order: StreamOrder
    bins: BinRules | None = None  # None: documents end to end, cut every seq_len + 1
    loss: LossRules
    shape: BatchShape
    purpose: str = "train"
    batch_documents: int = BATCH_DOCUMENTS  # the limit with which the source was opened
    num_streams: int | None = None  # None: one for each rank
    fim: FimRules | None = None  # None: no document is rearranged
    remake: Callable[[], Pipeline] | None = None  # what a pickle holds instead of the parts

    @cached_property
    def encoder(self) -> SharedEncoder:
        return SharedEncoder(self.tokenizer, self.source)

    @cached_property
    def data(self) -> dict[str, JSON]:
        """Ints and strings that a state must match, by the names of stored states."""
        described, order, bins = self.source.describe(), self.order, self.bins
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        values: dict[str, object] = {
            "purpose": self.purpose,
            "dataset": self.source.name,
            "revision": described.get("revision"),
            "dataset_sha256": digest,
            "tokenizer": self.tokenizer.fingerprint,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "shuffle_buffer_size": order.buffer_documents if order.shuffle else None,
            "shuffle_buffer_bytes": order.buffer_bytes if order.shuffle else None,
            "repeat": order.repeat,
            "max_eval_samples": order.max_documents,
            "state_update_interval": self.batch_documents,
            "packing_mode": "sequential" if bins is None else "bin",
            "seq_len": self.shape.seq_len,
            "mask_boundary_loss": self.loss.mask_boundary_loss,
            "train_on_eos": self.loss.train_on_eos,
            "packing_algorithm": bins and bins.algorithm,
            "packing_buffer_docs": bins and bins.buffer_documents,
            "packing_buffer_tokens": bins and bins.buffer_tokens,
            "packing_max_docs_per_bin": bins and bins.max_per_row,
        }
        if self.fim is not None:
            values |= {f"fim_{key}": value for key, value in fim_facts(self.fim.options).items()}
        # some checkpoint savers take nothing but ints and strings
        return {name: v if isinstance(v, int) else str(v) for name, v in values.items()}

    def rows(
        self,
        stream: int,
        num_streams: int,
        start: Position,
        interrupt: threading.Event | None = None,
    ) -> Generator[StreamRows, None, None]:
        """The rows of one stream from `start` on. Nothing is opened before the first row.

        Closing ends every thread; setting `interrupt` from any thread gives up.
        """
        documents = DocumentStream(self.source, self.order, stream=stream, num_streams=num_streams)
        ahead = encoded_ahead(
            documents,
            self.encoder,
            self.tokenizer,
            start=start.block,
            skip=start.document,
            interrupt=interrupt,
        )
        seq_len, pad_id = self.shape.seq_len, self.tokenizer.ids.pad_id
        with closing(ahead) as encoded:
            if self.bins is None:
                rows = sequential_rows(encoded, seq_len=seq_len, pad_id=pad_id, start=start)
            else:
                rows = bin_rows(encoded, self.bins, seq_len=seq_len, pad_id=pad_id, start=start)
            with closing(rows):
                if self.fim is None:
                    yield from rows
                    return
                first = start.counts.rows
                for some in rows:
                    yield rearranged_rows(
                        some, self.fim, first=first, stream=stream, num_streams=num_streams
                    )
                    first += len(some)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return super().__reduce__() if self.remake is None else (self.remake, ())


class TextStream(Closing, Iterator[Batch[np.int32]]):
    """The batches of one rank of `world`, from any position on.

    Nothing is opened before the first `next`. Use it from one thread, except for `interrupt`. A
    copy made by pickling or forking continues by itself from the same position.
    """

    def __init__(self, pipeline: Pipeline, *, rank: int = 0, world: int = 1) -> None:
        self.pipeline = pipeline
        self.world = whole_number(world, "world")
        self.rank = whole_number(rank, "rank", least=0)
        if self.rank >= self.world:
            raise OptionError(
                f"{{rank}}: wanted 0 to {self.world - 1}, since {{world}}",
                rank=self.rank,
                world=self.world,
            )
        num_streams = self.world if pipeline.num_streams is None else pipeline.num_streams
        if num_streams > MAX_STREAMS:
            raise OptionError(
                f"{{num_streams}}: wanted at most {MAX_STREAMS:,}", num_streams=num_streams
            )
        if num_streams % self.world:
            raise OptionError(
                f"{{num_streams}} cannot be shared by {self.world} processes (DataLoader workers "
                f"count as processes); {_divisors(num_streams)}",
                num_streams=num_streams,
            )
        shape = pipeline.shape
        check_memory(
            16 * shape.rows * (shape.seq_len + 1),
            f"a batch of [{', '.join(f'{size:,}' for size in shape.dimensions)}]",
            "lower batch_size, seq_len or grad_accum",
        )
        self._at = Saved(
            num_streams=num_streams,
            positions={stream: Position() for stream in range(self.rank, num_streams, self.world)},
        )
        self._batch = Counts()  # of the last batch
        self._ended = self._closed = self._is_repeat_logged = False
        self._reset()

    @property
    def num_streams(self) -> int:
        """Of all ranks together."""
        return self._at.num_streams

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch[np.int32]:
        with self._one_thread:
            try:
                return self._next()
            except StoppedError:
                raise OptionError("this stream was closed while it made a batch") from None

    def _next(self) -> Batch[np.int32]:
        if self._closed:
            raise OptionError("this stream was closed; open a new one and load its state")
        if self._ended:
            raise StopIteration
        shape = self.pipeline.shape
        pad_id = self.pipeline.tokenizer.ids.pad_id
        tokens = np.full((shape.rows, shape.seq_len + 1), pad_id, np.int32)
        segments = np.zeros_like(tokens)
        streams = self._opened()
        try:
            filled = _fill_in_turn(streams, tokens, segments)
            at = replace(self._at, positions={one.number: one.position() for one in streams})
            batch = make_batch(tokens, segments, shape, self.pipeline.loss) if filled else None
        except BaseException:
            self._end_threads()
            raise
        before, self._at = self._at, at
        if batch is None:
            self._ended = True
            self._end_threads()
            raise StopIteration
        self._log_repeats(before)
        self._batch = at.totals - before.totals
        return batch

    def state_dict(self) -> State:
        """The position after the last batch given: about 2 KB of JSON."""
        return stream_state(replace(self._at, data=self.pipeline.data))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that `state` followed. A refused state changes nothing."""
        saved = read_stream_state(state, self.pipeline.data)
        own = self._checked_streams(saved)
        self._end_threads()
        self._at = replace(saved, positions={stream: saved.positions[stream] for stream in own})
        self._batch = Counts()
        self._ended = False

    get_state = state_dict  # the names that Grain uses
    set_state = load_state_dict

    def stats(self) -> StreamStats:
        """Counts of the last batch given and of the run so far, for this rank."""
        return StreamStats(batch=self._batch, total=self._at.totals, fim=self._at.fim)

    def interrupt(self) -> None:
        """From any thread: give up the batch that another thread waits for, and be closed."""
        self._closed = True
        self._interrupted.set()

    def close(self) -> None:
        """End all threads. The state can still be read."""
        self.interrupt()
        with self._one_thread.waiting():
            self._end_threads()

    def __repr__(self) -> str:
        return (
            f"TextStream({self.pipeline.source!r}, shape={self.pipeline.shape.dimensions}, rank "
            f"{self.rank} of {self.world}, rows={self._at.totals.rows:,})"
        )

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_streams", "_process", "_interrupted", "_one_thread")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        """What belongs to this process and object alone."""
        self._streams: list[_RowStream] = []  # opened with the first batch
        self._process = 0  # whose threads they have: none follows into a fork
        self._interrupted, self._one_thread = threading.Event(), OneThread("stream")

    def _opened(self) -> list[_RowStream]:
        if not self._streams or self._process != os.getpid():
            self._process, self._streams = os.getpid(), []
            for stream, start in self._at.positions.items():
                rows = self.pipeline.rows(stream, self.num_streams, start, self._interrupted)
                self._streams.append(_RowStream(stream, rows, start))
        return self._streams

    def _log_repeats(self, before: Saved) -> None:
        """A batch that passes over the data more than once is rarely intended; logged once."""
        passed = max(
            position.block.epoch - before.positions[stream].block.epoch
            for stream, position in self._at.positions.items()
        )
        if passed > 1 and not self._is_repeat_logged:
            self._is_repeat_logged = True
            log.warning(
                "%r: one batch passed over the data %d times; is it larger than the data?",
                *(self, passed),
            )

    def _end_threads(self) -> None:
        streams, self._streams = self._streams, []
        if self._process == os.getpid():
            for one in streams:
                one.close()

    def _checked_streams(self, saved: Saved) -> range:
        """The streams of this rank, all of which the state must hold."""
        fixed = self.pipeline.num_streams
        if fixed is not None and saved.num_streams != fixed:
            raise StateMismatchError(
                f"num_streams: the state has {saved.num_streams}, this stream {fixed}; leave it "
                f"out to take the state's, or set it to {saved.num_streams}"
            )
        if saved.num_streams % self.world:
            raise StateMismatchError(
                f"the state has {saved.num_streams} streams, which {self.world} processes "
                "(DataLoader workers count as processes) cannot share; "
                f"{_divisors(saved.num_streams)}"
            )
        own = range(self.rank, saved.num_streams, self.world)
        missing = sorted(set(own) - saved.positions.keys())
        if missing:
            raise StateMismatchError(
                f"process {self.rank} of {self.world} needs streams {missing} of "
                f"{saved.num_streams}, but the state holds {sorted(saved.positions)}; pass the "
                "state that this process saved, or join_states() of those of all processes"
            )
        return own


class _RowStream:
    """The rows of one stream from a position on."""

    def __init__(
        self, number: int, rows: Generator[StreamRows, None, None], start: Position
    ) -> None:
        self.number = number
        self.given = start.counts.rows  # rows since the start of the run
        self._rows = rows
        self._position = start  # before the rows `_counted.._taken` of the chunk
        self._chunk: StreamRows | None = None
        self._counted = self._taken = 0

    def position(self) -> Position:
        """After the last row taken."""
        if self._chunk is not None and self._counted < self._taken:
            counts = self._position.counts + self._chunk.counts(self._counted, self._taken)
            fim = self._chunk.fim_counts(self._counted, self._taken)
            if fim is not None:
                fim += self._position.fim or FimCounts()
            self._position = self._chunk.position_after(
                self._taken - 1, counts.with_input(self._chunk.read), fim
            )
            self._counted = self._taken
        return self._position

    def has_rows(self) -> bool:
        """Whether another row comes; waits for it."""
        while self._chunk is None or self._taken == len(self._chunk):
            position, chunk = self.position(), next(self._rows, None)
            if chunk is None:
                return False
            self._chunk, self._counted, self._taken = chunk, 0, 0
            if not len(chunk):  # input at the end that gave no row
                self._recount(position.counts.with_input(chunk.read))
        return True

    def take(self, most: int) -> tuple[Tokens, Tokens]:
        """Tokens and segments of the next rows, at least one, as views. After `has_rows`."""
        assert self._chunk is not None
        start = self._taken
        stop = self._taken = min(start + most, len(self._chunk))
        self.given += stop - start
        return self._chunk.tokens[start:stop], self._chunk.segments[start:stop]

    def count_padding_rows(self, rows: int, row_len: int) -> None:
        self._recount(self.position().counts + Counts(rows=rows, padding=rows * row_len))
        self.given += rows

    def close(self) -> None:
        self._rows.close()

    def _recount(self, counts: Counts) -> None:
        self._position = msgspec.structs.replace(self._position, counts=counts)


def _fill_in_turn(streams: Sequence[_RowStream], tokens: Tokens, segments: Tokens) -> int:
    """Write one row of each stream in turn; returns how many, fewer than fit at the end of the
    data.

    The next row comes from the stream that has given the fewest, so the order is a function of the
    positions alone. A stream that has ended is skipped. What stays free is padding. It counts for
    the first stream, if there were rows at all.
    """
    filled = 0
    waiting = [(one.given, one.number, one) for one in streams]
    heapq.heapify(waiting)
    while waiting and filled < len(tokens):
        _, _, stream = heapq.heappop(waiting)
        if not stream.has_rows():
            stream.close()
            continue
        most = len(tokens) - filled
        if waiting:  # until it is another's turn
            rows, number, _ = waiting[0]
            most = min(most, rows - stream.given + (stream.number < number))
        some_tokens, some_segments = stream.take(most)
        tokens[filled : filled + len(some_tokens)] = some_tokens
        segments[filled : filled + len(some_tokens)] = some_segments
        filled += len(some_tokens)
        heapq.heappush(waiting, (stream.given, stream.number, stream))
    if 0 < filled < len(tokens):
        streams[0].count_padding_rows(len(tokens) - filled, tokens.shape[1])
    return filled


def _divisors(num_streams: int) -> str:
    counts = [count for count in range(1, num_streams + 1) if num_streams % count == 0]
    return f"these numbers of processes can: {', '.join(map(str, counts))}"
