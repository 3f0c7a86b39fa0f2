"""Read a source as blocks of documents, from any cursor on, and encode them.

`DocumentStream.blocks(block.start)` gives that block and all after it, `blocks(block.end)` what
follows it; only the unit at the cursor is opened. Over all streams every document of an epoch comes
once. An epoch ends with a block, perhaps an empty one, whose end is the start of the next epoch. In
memory are the texts of one block (twice while they are shuffled) and one batch of the source.

A document keeps its first `max_doc_tokens` ids; one that is cut gets no EOS, and the cut is
counted. A text that gives no id stays an empty document, without BOS and EOS. `encode_blocks` works
in the caller's thread; `encoded_ahead` reads and shuffles in one thread and encodes in another.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Event

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from shardmill.errors import (
    LossError,
    SourceError,
    StateMismatchError,
    TokenizerError,
    TokenRangeError,
)
from shardmill.loading.state import ReadCounts, StreamCursor
from shardmill.loading.streaming.tokenizer import DocumentIds, StreamTokenizer
from shardmill.protocols import DividedSource, Encoder, Source
from shardmill.records import Drop, OffsetArray, Ragged, TextBatch
from shardmill.sampling import Permutation
from shardmill.sources import BatchLimits, stamp_of
from shardmill.sources.batches import byte_lengths, cut
from shardmill.sources.rows import row_inputs, row_snippets
from shardmill.threads import read_ahead

log = logging.getLogger(__name__)

MIN_UNITS_PER_STREAM = 16
"""With this many units each, streams that differ by one unit are balanced."""
MIN_UNITS_TO_SHUFFLE = 64
"""Fewer units move documents too little when their order is shuffled."""
MAX_LOGGED_DROPS = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Documents in the order of their use. The same `start` gives the same block."""

    start: StreamCursor
    texts: pa.LargeStringArray  # may be empty: only rows without text were read
    end: StreamCursor


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """In which order a source is read. Equal orders over equal sources give equal streams."""

    seed: int = 0
    shuffle: bool = False  # the order of units, and of documents within blocks
    buffer_documents: int = 10_000  # most documents of a shuffled block
    buffer_bytes: int = 256 * 2**20  # most bytes of its text; one document always fits
    repeat: bool = False  # epochs without end, each in its own order
    max_documents: int | None = None  # of each epoch, over all streams; None: all


class _Share:
    """Which units and texts one stream takes.

    With many units, or a number that the streams share evenly, each stream reads its own units.
    Otherwise, or when all streams share a limit on documents, every stream reads everything and
    takes each `num_streams`-th text. This follows from the input and the number of streams alone,
    so a resumed stream takes what the first one took.
    """

    def __init__(self, num_units: int, order: StreamOrder, stream: int, num_streams: int) -> None:
        self.num_units, self.stream, self.num_streams = num_units, stream, num_streams
        is_even = num_units % num_streams == 0 or num_units >= MIN_UNITS_PER_STREAM * num_streams
        self.by_texts = num_streams > 1 and (not is_even or order.max_documents is not None)
        self.seed = order.seed if order.shuffle else None  # None: units as they come

    @property
    def counts_rejects(self) -> bool:
        """Whether rows without text count here: of streams that read the same rows, in one."""
        return not self.by_texts or self.stream == 0

    def units(self, epoch: int) -> OffsetArray:
        """The units that this stream reads in an epoch, in order."""
        step = 1 if self.by_texts else self.num_streams
        own = np.arange(0 if self.by_texts else self.stream, self.num_units, step)
        if self.seed is None:
            return own
        return Permutation(self.num_units, self.seed, "units", epoch).take(own)

    def texts(self, number: int, start: int, stop: int) -> range:
        """Which of the texts `start..stop` of a batch are this stream's.

        `number` is the number of the text at `start`, counted through the epoch.
        """
        if not self.by_texts:
            return range(start, stop)
        first = start + (self.stream - number) % self.num_streams
        return range(min(first, stop), stop, self.num_streams)


def _divide(source: Source, order: StreamOrder, num_streams: int) -> Sequence[Source]:
    """The units of a source: at least one, the whole source if no more are needed."""
    at_least = max(
        MIN_UNITS_TO_SHUFFLE if order.shuffle else 1,
        MIN_UNITS_PER_STREAM * num_streams if num_streams > 1 else 1,
    )
    if at_least == 1 or not isinstance(source, DividedSource):
        return (source,)
    units = source.divide(at_least)
    if not units:
        raise SourceError(f"source {source.name!r} holds no document: it has no files or rows")
    return units


class _DropLog:
    """Logs rows of a source that gave no document: the first by name, the rest as counts.

    A silent one logs nothing, since another stream reads the same rows.
    """

    def __init__(self, source: str, *, is_silent: bool) -> None:
        self._source, self._is_silent = source, is_silent
        self._num_named = 0
        self._unnamed: Counter[str] = Counter()
        self._is_limit_logged = False
        self.reasons: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # by reason the id of a row

    def add(self, drops: Sequence[Drop]) -> None:
        for drop in drops:
            self.reasons[drop.reason] += 1
            self.first.setdefault(drop.reason, drop.id)
        if self._is_silent:
            return
        named = drops[: MAX_LOGGED_DROPS - self._num_named]
        for drop in named:
            log.warning("source %r: %s gave no document: %s", self._source, drop.id, drop.reason)
        self._num_named += len(named)
        self._unnamed.update(drop.reason for drop in drops[len(named) :])

    def end_epoch(self, epoch: int) -> None:
        if self._unnamed:
            reasons = (f"{reason}: {count:,}" for reason, count in sorted(self._unnamed.items()))
            log.warning(
                "source %r, epoch %d: %d more rows gave no document (%s)",
                *(self._source, epoch, self._unnamed.total(), ", ".join(reasons)),
            )
        self._unnamed.clear()

    def log_byte_limit(self, order: StreamOrder) -> None:
        """Once: a shuffled block had its bytes before it had its documents."""
        if not self._is_limit_logged:
            log.info(
                "source %r: %d bytes of text fill a shuffled block before %d documents do",
                *(self._source, order.buffer_bytes, order.buffer_documents),
            )
        self._is_limit_logged = True


# reading


class _BlockBuilder:
    """The block being collected: texts in the order of reading, until it is full."""

    def __init__(self, order: StreamOrder, stream: int, start: StreamCursor) -> None:
        self._order, self._stream, self._start = order, stream, start
        self._parts: list[pa.LargeStringArray] = []
        self._documents = self._bytes = 0

    @property
    def is_full(self) -> bool:
        return (
            self._documents >= self._order.buffer_documents
            or self._bytes >= self._order.buffer_bytes
        )

    @property
    def has_room_for_documents(self) -> bool:
        return self._documents < self._order.buffer_documents

    def take(self, texts: pa.LargeStringArray, own: range) -> int:
        """Take as many of the texts `own` as fit, from the first on; returns how many."""
        if self._order.shuffle:
            own = own[: self._order.buffer_documents - self._documents]
        sizes = np.empty(0, np.int64)
        if own:
            sizes = byte_lengths(texts.slice(own.start, own[-1] + 1 - own.start))[:: own.step]
        if self._order.shuffle:
            free = self._order.buffer_bytes - self._bytes
            count = int(np.searchsorted(np.cumsum(sizes), free, side="right"))
            if not self._documents:
                count = min(max(1, count), len(own))  # a block holds at least one
            own, sizes = own[:count], sizes[:count]
        if own:
            if own.step == 1:  # contiguous: no copy
                self._parts.append(texts.slice(own.start, len(own)))
            else:
                self._parts.append(texts.take(pa.array(np.arange(own.start, own.stop, own.step))))
            self._documents += len(own)
            self._bytes += int(sizes.sum())
        return len(own)

    def build(self, end: StreamCursor) -> Block:
        """The texts so far, in the order of their use. The next block starts at `end`."""
        parts, self._parts = self._parts, []
        self._documents = self._bytes = 0
        empty = pa.array([], pa.large_string())
        texts = parts[0] if len(parts) == 1 else pa.concat_arrays(parts or [empty])
        del parts  # free the originals before the shuffled copy is made
        if self._order.shuffle and len(texts) > 1:
            path = ("documents", self._start.epoch, self._stream, self._start.number)
            permutation = Permutation(len(texts), self._order.seed, *path)
            texts = texts.take(pa.array(permutation.take(np.arange(len(texts)))))
        block = Block(start=self._start, texts=texts, end=end)
        self._start = end
        return block


class DocumentStream:
    """The documents of a source that belong to one of `num_streams` streams, in order.

    Opening reads nothing; the source is divided once, with the first block. One iteration at a
    time.
    """

    def __init__(
        self, source: Source, order: StreamOrder, *, stream: int = 0, num_streams: int = 1
    ) -> None:
        self._source, self._order = source, order
        self._stream, self._num_streams = stream, num_streams
        self._at = StreamCursor()
        self._units: Sequence[Source] = ()  # divided with the first block

    def __repr__(self) -> str:
        return f"DocumentStream({self._source!r}, stream {self._stream} of {self._num_streams})"

    def blocks(
        self, start: StreamCursor | None = None, *, stop: Event | None = None
    ) -> Generator[Block, None, None]:
        """All blocks from `start` on; endless with repeat.

        Once `stop` is set, reading ends after the current batch of the source, as if the generator
        had been closed: for a reader in another thread.
        """
        if not self._units:
            self._units = _divide(self._source, self._order, self._num_streams)
            self._stamp = stamp_of(self._source)
            self._share = _Share(len(self._units), self._order, self._stream, self._num_streams)
            self._drops = _DropLog(self._source.name, is_silent=not self._share.counts_rejects)
        self._at = start or StreamCursor()
        stop = stop or Event()
        while (self._order.repeat or self._at.epoch == 0) and not stop.is_set():
            builder = _BlockBuilder(self._order, self._stream, self._at)
            for batch in self._batches(stop):
                yield from self._take(batch, builder)
            if stop.is_set():
                return
            self._refuse_empty_epoch()
            self._drops.end_epoch(self._at.epoch)
            self._refuse_changed_files()
            self._at = StreamCursor(epoch=self._at.epoch + 1, read=self._at.read)
            yield builder.build(self._at)

    def _batches(self, stop: Event) -> Iterator[TextBatch]:
        """The batches of the epoch's units from the cursor on; `_take` moves the cursor."""
        units = self._share.units(self._at.epoch).tolist()
        if self._at.unit > len(units):
            raise self._mismatch(f"{self._at.unit} units are done, but there are {len(units)}")
        for unit in units[self._at.unit :]:
            if self._is_limit_reached:
                return
            for batch in self._units[unit].batches(self._at.cursor):
                if stop.is_set():
                    return
                yield batch
                if self._is_limit_reached:
                    return
            if self._at.skip:
                raise self._mismatch(f"the unit {unit} ends at a batch that had texts")
            self._at = replace(self._at, unit=self._at.unit + 1, cursor=None, skip=0)

    @property
    def _is_limit_reached(self) -> bool:
        return self._at.number == self._order.max_documents

    def _take(self, batch: TextBatch, builder: _BlockBuilder) -> Iterator[Block]:
        """The blocks that this batch fills. Moves the cursor after it, or to the limit."""
        at, num_texts = self._at, len(batch.texts)
        if at.skip and at.skip >= num_texts:
            raise self._mismatch(f"{at.skip} texts of a batch with {num_texts} are done")
        if not at.skip:
            self._drops.add(batch.drops)
        stop = num_texts
        if self._order.max_documents is not None:
            stop = min(stop, at.skip + self._order.max_documents - at.number)
        own = self._share.texts(at.number, at.skip, stop)
        while True:
            taken = builder.take(batch.texts, own)
            own = own[taken:]
            self._advance(batch, until=own.start if own else stop, taken=taken)
            if not own:
                break
            if builder.has_room_for_documents:
                self._drops.log_byte_limit(self._order)
            yield builder.build(self._at)
        if builder.is_full or not self._order.shuffle:
            yield builder.build(self._at)

    def _advance(self, batch: TextBatch, *, until: int, taken: int) -> None:
        """Move the cursor to text `until` of this batch, after its end if that is the last.

        `taken` of the texts that are passed are this stream's. The batch's rows without text count
        when it is entered.
        """
        at, is_done = self._at, until == len(batch.texts)
        passed = until - at.skip
        read = replace(
            at.read,
            documents=at.read.documents + taken,
            elsewhere=at.read.elsewhere + passed - taken,
        )
        if self._share.counts_rejects and at.skip == 0 and (passed or is_done):
            read = replace(
                read,
                empty=read.empty + batch.counts.get("empty", 0),
                dropped=read.dropped + len(batch.drops) + batch.counts.get("filtered", 0),
                repaired=read.repaired + batch.counts.get("invalid_utf8", 0),
            )
        self._at = replace(
            at,
            cursor=batch.cursor if is_done else at.cursor,
            skip=0 if is_done else until,
            number=at.number + passed,
            read=read,
        )

    def _refuse_changed_files(self) -> None:
        """Reading compares the size of files; this finds a writer that keeps it."""
        if stamp_of(self._source) != self._stamp:
            raise SourceError(
                f"source {self._source.name!r}: its files were written to during epoch "
                f"{self._at.epoch}, so old and new text may be mixed in it; resume from a state "
                "before that, with files that do not change"
            )

    def _refuse_empty_epoch(self) -> None:
        at, share = self._at, self._share
        if share.texts(0, 0, at.number):
            return
        rows = f"{at.read.empty:,} empty and {at.read.dropped:,} dropped rows so far"
        if share.num_streams == 1:
            raise self._nothing_given(rows)
        if share.by_texts:
            found = f"there were only {at.number:,} texts for {share.num_streams:,} streams"
        else:
            found = f"its files or row groups hold no text ({rows})"
        raise SourceError(
            f"source {self._source.name!r}: stream {share.stream} of {share.num_streams} got no "
            f"document in epoch {at.epoch}: {found}; use fewer processes, workers or streams"
        )

    def _nothing_given(self, rows: str) -> LossError:
        """With a row of each reason."""
        first, reasons = self._drops.first, self._drops.reasons
        snippets = row_snippets(row_inputs(self._source), first.values())
        lines = [
            f"{count:,} {why}, as {first[why]}"
            + (f": {snippets[first[why]]}" if first[why] in snippets else "")
            for why, count in reasons.most_common()
        ]
        empty = self._at.read.empty
        head = (
            f"source {self._source.name!r} gave no document in epoch {self._at.epoch} ({rows}); "
            "check its files and the name of the text column"
        )
        return LossError(
            "\n  ".join([head, *lines]),
            reasons={**reasons, **({"empty": empty} if empty else {})},
            num_read=empty + self._at.read.dropped,
            examples={why: (id, snippets.get(id)) for why, id in first.items()},
        )

    def _mismatch(self, found: str) -> SourceError:
        return SourceError(
            f"source {self._source.name!r}: the saved cursor does not fit: {found}; resume with "
            "the input and the options that the state came from"
        )


# encoding

SLICE = BatchLimits(num_bytes=2 * 2**20, num_documents=2**15)
"""What one call of the encoder gets: large enough to be fast, small enough to keep flowing."""
PATIENCE = 2.0
"""Seconds that closing waits for a source, for instance one that pauses between retries."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """Some documents of one block as ids, with BOS and EOS."""

    block: StreamCursor  # where the block starts
    first: int  # documents of the block before these
    ids: Ragged  # int32
    cut: OffsetArray  # (n,) ids that max_doc_tokens took off the end of each document
    read: ReadCounts  # up to the end of the block


def encoded_ahead(
    documents: DocumentStream,
    encoder: Encoder,
    tokenizer: StreamTokenizer,
    *,
    start: StreamCursor | None = None,
    skip: int = 0,
    interrupt: Event | None = None,
) -> Generator[Encoded, None, None]:
    """`encode_blocks` over `documents.blocks(start)`, with the next block and two slices ahead.

    Threads start with the first `next` and end when this is closed, which waits at most `PATIENCE`
    seconds. Setting `interrupt` from any thread ends them too, and this with a StoppedError.
    """
    stop = Event()

    def encode() -> Generator[Encoded, None, None]:
        blocks = read_ahead(documents.blocks(start, stop=stop), depth=1, stop=stop)
        with closing(blocks):
            yield from encode_blocks(blocks, encoder, tokenizer, skip=skip)

    ahead = read_ahead(encode(), depth=2, stop=stop, interrupt=interrupt, patience=PATIENCE)
    with closing(ahead) as encoded:
        yield from encoded


def encode_blocks(
    blocks: Iterator[Block], encoder: Encoder, tokenizer: StreamTokenizer, *, skip: int = 0
) -> Generator[Encoded, None, None]:
    """The documents of the blocks, without the first `skip` of the first block.

    A block without documents gives one `Encoded` without documents.
    """
    for block in blocks:
        if skip > len(block.texts):
            raise StateMismatchError(
                f"{_location(block.start)}: {skip:,} documents of the block are done, but it holds "
                f"{len(block.texts):,}; resume with the input that the state came from"
            )
        sizes = byte_lengths(block.texts)[skip:]
        for start, stop in cut(sizes, SLICE) or [(0, 0)]:
            yield _encode(block, skip + start, skip + stop, encoder, tokenizer)
        skip = 0


def _encode(
    block: Block, start: int, stop: int, encoder: Encoder, tokenizer: StreamTokenizer
) -> Encoded:
    ids = Ragged(np.empty(0, np.int32), np.zeros(1, np.int64))
    if start < stop:
        ids = encoder.encode_batch(block.texts.slice(start, stop - start))
    if len(ids) != stop - start:
        raise TokenizerError(
            f"{_location(block.start)}: the encoder {encoder!r} gave {len(ids):,} sequences for "
            f"{stop - start:,} texts; wanted one for each"
        )
    values, num_ids = ids.values, min(tokenizer.vocab_size, 2**31)  # documents are int32
    if len(values) and (values.min() < 0 or values.max() >= num_ids):
        index = int(np.flatnonzero((values < 0) | (values >= num_ids))[0])
        document = int(np.searchsorted(ids.offsets, index, side="right")) - 1
        raise TokenRangeError(
            f"{_location(block.start)}, document {start + document:,} of the block: id "
            f"{values[index]:,} at {index - ids.offsets[document]:,}, wanted 0 to "
            f"{num_ids - 1:,}; the encoder does not belong to this vocabulary"
        )
    documents, lost = frame(ids, tokenizer.ids)
    return Encoded(block=block.start, first=start, ids=documents, cut=lost, read=block.end.read)


def frame(ids: Ragged, rules: DocumentIds) -> tuple[Ragged, OffsetArray]:
    """The ids of texts as int32 documents, and how many ids each lost at its end.

    BOS 1, EOS 2, at most 2 ids:  [4 5 | 6 7 8 | ] -> [1 4 5 2 | 1 6 7 | ] and [0 1 0].
    """
    lengths, most = ids.lengths, rules.max_doc_tokens
    lost = np.zeros_like(lengths) if most is None else np.maximum(lengths - most, 0)
    kept, filled = lengths - lost, lengths > 0
    has_bos = filled & rules.add_bos
    has_eos = filled & (lost == 0) & rules.add_eos
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(kept + has_bos + has_eos, out=offsets[1:])
    text = ids.values
    if lost.any():  # the first `kept` ids of each document
        inside = np.arange(len(text)) - np.repeat(ids.offsets[:-1], lengths)
        text = text[inside < np.repeat(kept, lengths)]
    if offsets[-1] == len(text):
        return Ragged(text.astype(np.int32, copy=False), offsets), lost
    values = np.empty(offsets[-1], np.int32)
    is_text = np.ones(len(values), bool)
    for token, at in (
        (rules.bos_id, offsets[:-1][has_bos]),
        (rules.eos_id, offsets[1:][has_eos] - 1),
    ):
        if len(at):
            values[at] = token
            is_text[at] = False
    values[is_text] = text
    return Ragged(values, offsets), lost


def _location(cursor: StreamCursor) -> str:
    return (
        f"the block at epoch {cursor.epoch}, unit {cursor.unit}, {cursor.cursor or 'its start'}, "
        f"text {cursor.skip:,}"
    )
