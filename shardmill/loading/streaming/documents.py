"""A source as a stream of blocks of documents, from any place on.

In: a source, an order, which of how many streams.  Out: `Block`s, each with its start and end.
Promise: `blocks(block.start)` gives that very block and all after it, `blocks(block.end)` what
follows; it opens only the unit where the place is, at its cursor. Over all streams every document
of an epoch comes once. A block never crosses an epoch; an epoch without a document is an error.
An epoch ends with a block, perhaps an empty one, whose end is the start of the next epoch.
Memory: the texts of one block, twice while they are shuffled, and one batch of the source.
Not here: threads (encode), tokens.

Texts become blocks; a place moves past what was taken.

In: texts of source batches, and which of them are the stream's.  Out: `Block`s, and `Place`s.
Promise: a shuffled block keeps both limits (one document always fits) and is a permutation that
its start decides; nothing in a block depends on what was read before its start.
Cost: a shuffled text is copied twice: behind its neighbours, and to its place in the order.
Not here: reading; which texts are whose (dealing).

Who takes what: the units of a source and its texts, dealt to streams.

In: a source, an order, which of how many streams.  Out: the units of an epoch; which texts of a
batch are this stream's.
Promise: over all streams every text of an epoch is taken once. How it is dealt follows from the
input and the number of streams alone, so a resumed stream deals as the first one did.
Not here: reading.

Many units, or a number of them that the streams share evenly: each stream reads its own, and
nobody reads the others'. Else, or when an epoch has a limit that all streams share, every stream
reads everything and takes each `num_streams`-th text.

What reading a source has to say: rows that gave no document, and limits that were reached.

In: the drops of source batches, as they are read.  Out: lines in the log.
Promise: the first drops by name, the rest as a number for each reason, so that a log never grows
with the input.
Not here: the counts that a state keeps; see `Tally`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event

import numpy as np
import pyarrow as pa

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, SourceError
from shardmill.loading.streaming.records import Block, StreamCursor, StreamOrder
from shardmill.protocols import DividedSource, Source
from shardmill.records import JSON, Drop, OffsetArray, TextBatch
from shardmill.sampling import Permutation
from shardmill.sources import byte_lengths, stamp_of

log = logging.getLogger(__name__)


class BlockCollector:
    """The block being made: texts in the order of reading until it is full."""

    def __init__(self, order: StreamOrder, stream: int, start: StreamCursor) -> None:
        self._order, self._stream, self.start = order, stream, start
        self._parts: list[pa.LargeStringArray] = []
        self._documents = self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits, whatever it is."""
        return (
            self._documents >= self._order.buffer_documents
            or self._bytes >= self._order.buffer_bytes
        )

    @property
    def is_cut_by_bytes(self) -> bool:
        """Whether a block that has no room for a next text still has room for its number."""
        return self._documents < self._order.buffer_documents

    def take(self, texts: pa.LargeStringArray, mine: range) -> int:
        """As many of `mine` as fit, from the first on; how many that were."""
        if self._order.shuffle:
            mine = mine[: self._order.buffer_documents - self._documents]
        sizes = _sizes(texts, mine)
        if self._order.shuffle:
            room = self._order.buffer_bytes - self._bytes
            count = int(np.searchsorted(np.cumsum(sizes), room, side="right"))
            if not self._documents:
                count = min(max(1, count), len(mine))  # a block holds at least one
            mine, sizes = mine[:count], sizes[:count]
        if mine:
            self._parts.append(_picked(texts, mine))
            self._documents += len(mine)
            self._bytes += int(sizes.sum())
        return len(mine)

    def block(self, end: StreamCursor) -> Block:
        """What was taken, in the order of its use; the next block starts at `end`."""
        parts, self._parts = self._parts, []
        self._documents = self._bytes = 0
        texts = parts[0] if len(parts) == 1 else pa.concat_arrays(parts or [_NOTHING])
        del parts  # the copy is enough
        if self._order.shuffle and len(texts) > 1:
            texts = texts.take(pa.array(self._drawn(len(texts))))
        block = Block(start=self.start, texts=texts, end=end)
        self.start = end
        return block

    def _drawn(self, count: int) -> OffsetArray:
        path = ("documents", self.start.epoch, self._stream, self.start.number)
        return Permutation(count, self._order.seed, *path).take(np.arange(count))


_NOTHING = pa.array([], pa.large_string())


def _picked(texts: pa.LargeStringArray, mine: range) -> pa.LargeStringArray:
    """These texts: without copying when they lie together."""
    if mine.step == 1:
        return texts.slice(mine.start, len(mine))
    return texts.take(pa.array(np.arange(mine.start, mine.stop, mine.step)))


def _sizes(texts: pa.LargeStringArray, mine: range) -> OffsetArray:
    """Bytes of each of these texts."""
    if not mine:
        return np.empty(0, np.int64)
    return byte_lengths(texts.slice(mine.start, mine[-1] + 1 - mine.start))[:: mine.step]


def after_texts(
    place: StreamCursor, batch: TextBatch, *, until: int, taken: int, keeps_account: bool
) -> StreamCursor:
    """The place moved to text `until` of the batch behind its cursor, `taken` of them its own.

    A batch's rows without text count when it is entered, in the stream that keeps their account.
    At its end the place is behind it.
    """
    passed, is_done = until - place.skip, until == len(batch.texts)
    tally = replace(
        place.tally,
        documents=place.tally.documents + taken,
        elsewhere=place.tally.elsewhere + passed - taken,
    )
    if keeps_account and place.skip == 0 and (passed or is_done):
        tally = replace(
            tally,
            empty=tally.empty + batch.counts.get("empty", 0),
            dropped=tally.dropped + len(batch.drops),
            repaired=tally.repaired + batch.counts.get("invalid_utf8", 0),
        )
    return replace(
        place,
        cursor=batch.cursor if is_done else place.cursor,
        skip=0 if is_done else until,
        number=place.number + passed,
        tally=tally,
    )


def after_unit(place: StreamCursor) -> StreamCursor:
    return replace(place, unit=place.unit + 1, cursor=None, skip=0)


def after_epoch(place: StreamCursor) -> StreamCursor:
    """The start of the next epoch, which is where the last one ends."""
    return StreamCursor(epoch=place.epoch + 1, tally=place.tally)


UNITS_PER_STREAM = 16
"""From here on streams that differ by one unit are even enough."""
UNITS_TO_SHUFFLE = 64
"""A drawn order of fewer units moves documents too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How one stream shares a source with the others."""

    num_units: int
    stream: int
    num_streams: int
    by_texts: bool  # each stream reads everything; else only its own units
    seed: int | None  # of the order of units; None: as they come

    @property
    def keeps_account(self) -> bool:
        """Whether rows without text count here: of streams that read the same rows, one does."""
        return not self.by_texts or self.stream == 0

    def units(self, epoch: int) -> OffsetArray:
        """The units that this stream reads in an epoch, in order."""
        step = 1 if self.by_texts else self.num_streams
        mine = np.arange(0 if self.by_texts else self.stream, self.num_units, step)
        if self.seed is None:
            return mine
        return Permutation(self.num_units, self.seed, "units", epoch).take(mine)

    def mine(self, number: int, start: int, stop: int) -> range:
        """Which of the texts `start..stop` of a batch are this stream's.

        `number` is that of the text at `start`, counted through the epoch.
        """
        if not self.by_texts:
            return range(start, stop)
        first = start + (self.stream - number) % self.num_streams
        return range(min(first, stop), stop, self.num_streams)

    def num_mine(self, number: int) -> int:
        """How many of the first `number` texts of an epoch are this stream's."""
        return len(self.mine(0, 0, number))


def divide_source(source: Source, order: StreamOrder, num_streams: int) -> Sequence[Source]:
    """The units; the whole source when nobody needs pieces of it. At least one."""
    at_least = max(
        UNITS_TO_SHUFFLE if order.shuffle else 1,
        UNITS_PER_STREAM * num_streams if num_streams > 1 else 1,
    )
    if at_least == 1 or not isinstance(source, DividedSource):
        return (source,)
    units = source.divide(at_least)
    if not units:
        raise SourceError(
            f"source {source.name!r} is divided into no pieces at all: it holds no document"
        )
    return units


def deal(num_units: int, order: StreamOrder, *, stream: int, num_streams: int) -> Dealing:
    is_even = num_units % num_streams == 0 or num_units >= UNITS_PER_STREAM * num_streams
    return Dealing(
        num_units=num_units,
        stream=stream,
        num_streams=num_streams,
        by_texts=num_streams > 1 and (not is_even or order.max_documents is not None),
        seed=order.seed if order.shuffle else None,
    )


NUM_NAMED = 10


class Journal:
    """Of one source. A silent one says nothing of drops: another stream reads the same rows."""

    def __init__(self, source: str, *, is_silent: bool = False) -> None:
        self._source, self._is_silent = source, is_silent
        self._num_named = 0
        self._unnamed: Counter[str] = Counter()
        self._is_limit_said = False

    def add_drops(self, drops: Sequence[Drop]) -> None:
        if self._is_silent:
            return
        named = drops[: NUM_NAMED - self._num_named]
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

    def limit_of_bytes(self, order: StreamOrder) -> None:
        """A shuffled block was full of bytes before it was full of documents; said once."""
        if not self._is_limit_said:
            log.info(
                "source %r: %d bytes of text fill a shuffled block before %d documents do",
                *(self._source, order.buffer_bytes, order.buffer_documents),
            )
        self._is_limit_said = True


class DocumentStream:
    """The documents of a source that belong to one of `num_streams` streams, in order.

    Opening reads nothing; the source is divided when the first block is asked for, once.
    """

    def __init__(
        self, source: Source, order: StreamOrder, *, stream: int = 0, num_streams: int = 1
    ) -> None:
        whole_number(num_streams, "num_streams")
        if whole_number(stream, "stream", least=0) >= num_streams:
            raise OptionError(f"stream={stream}: wanted less than num_streams={num_streams}")
        self._source, self._order = source, order
        self._stream, self._num_streams = stream, num_streams
        self._units: Sequence[Source] | None = None
        self._stamp: JSON = None
        self._journal: Journal | None = None

    def __repr__(self) -> str:
        return f"DocumentStream({self._source!r}, stream {self._stream} of {self._num_streams})"

    def blocks(
        self, start: StreamCursor | None = None, *, stop: Event | None = None
    ) -> Generator[Block, None, None]:
        """All that follows `start`; endless with repeat.

        When `stop` is set reading ends behind the batch of the source that is being read, as if
        the generator had been closed: for a reader in another thread.
        """
        if self._units is None:
            self._units = divide_source(self._source, self._order, self._num_streams)
            self._stamp = stamp_of(self._source)
        dealing = deal(
            len(self._units), self._order, stream=self._stream, num_streams=self._num_streams
        )
        if self._journal is None:
            self._journal = Journal(self._source.name, is_silent=not dealing.keeps_account)
        walk = _Walk(
            self._source.name, self._units, dealing, order=self._order, journal=self._journal
        )
        epoch = (start or StreamCursor()).epoch
        for block in walk.blocks(start or StreamCursor(), stop or Event()):
            if block.end.epoch != epoch:
                self._check_unchanged(epoch)
                epoch = block.end.epoch
            yield block

    def _check_unchanged(self, epoch: int) -> None:
        """Files are compared by size as they are read; a writer that keeps it is seen here."""
        if stamp_of(self._source) != self._stamp:
            raise SourceError(
                f"source {self._source.name!r}: its files were written to during epoch {epoch}, so "
                "old and new text may be mixed in it; go on with a state from before that, and "
                "with files that nobody changes"
            )


class _Walk:
    """One reading of the source, from a place on."""

    def __init__(
        self,
        name: str,
        units: Sequence[Source],
        dealing: Dealing,
        *,
        order: StreamOrder,
        journal: Journal,
    ) -> None:
        self._name, self._units, self._dealing = name, units, dealing
        self._order, self._journal = order, journal
        self._place = StreamCursor()

    def blocks(self, start: StreamCursor, stop: Event) -> Generator[Block, None, None]:
        self._place = start
        while (self._order.repeat or self._place.epoch == 0) and not stop.is_set():
            yield from self._epoch(stop)

    def _epoch(self, stop: Event) -> Iterator[Block]:
        collector = BlockCollector(self._order, self._dealing.stream, self._place)
        for batch in self._batches(stop):
            yield from self._deal(batch, collector)
        if stop.is_set():
            return
        self._refuse_empty()
        self._journal.end_epoch(self._place.epoch)
        self._place = after_epoch(self._place)
        yield collector.block(self._place)

    def _batches(self, stop: Event) -> Iterator[TextBatch]:
        """Batches of the epoch's units from the place on, which moves while they are dealt."""
        units = self._dealing.units(self._place.epoch).tolist()
        if self._place.unit > len(units):
            raise self._other_input(
                f"{self._place.unit} units are done, but there are {len(units)}"
            )
        for unit in units[self._place.unit :]:
            if self._is_enough:
                return
            for batch in self._units[unit].batches(self._place.cursor):
                if stop.is_set():
                    return
                yield batch
                if self._is_enough:
                    return
            if self._place.skip:
                raise self._other_input(f"the unit {unit} ends at a batch that had texts")
            self._place = after_unit(self._place)

    @property
    def _is_enough(self) -> bool:
        return self._place.number == self._order.max_documents

    def _deal(self, batch: TextBatch, collector: BlockCollector) -> Iterator[Block]:
        """The blocks that this batch fills. The place moves behind it, or to the limit."""
        place, num_texts = self._place, len(batch.texts)
        if place.skip and place.skip >= num_texts:
            raise self._other_input(f"{place.skip} texts of a batch with {num_texts} are done")
        if not place.skip:
            self._journal.add_drops(batch.drops)
        stop = num_texts
        if self._order.max_documents is not None:
            stop = min(stop, place.skip + self._order.max_documents - place.number)
        mine = self._dealing.mine(place.number, place.skip, stop)
        while True:
            taken = collector.take(batch.texts, mine)
            mine = mine[taken:]
            until = mine.start if mine else stop
            self._place = after_texts(
                self._place,
                batch,
                until=until,
                taken=taken,
                keeps_account=self._dealing.keeps_account,
            )
            if not mine:
                break
            if collector.is_cut_by_bytes:
                self._journal.limit_of_bytes(self._order)
            yield collector.block(self._place)
        if collector.is_full or not self._order.shuffle:
            yield collector.block(self._place)

    def _refuse_empty(self) -> None:
        place, dealing = self._place, self._dealing
        if dealing.num_mine(place.number):
            return
        rows = f"{place.tally.empty:,} empty and {place.tally.dropped:,} dropped rows so far"
        if dealing.num_streams == 1:
            raise SourceError(
                f"source {self._name!r} gave no document in epoch {place.epoch} ({rows}); "
                "check its files and the name of the text column"
            )
        if dealing.by_texts:
            found = f"there were only {place.number:,} texts for {dealing.num_streams:,} streams"
        else:
            found = f"its files or row groups hold no text ({rows})"
        raise SourceError(
            f"source {self._name!r}: stream {dealing.stream} of {dealing.num_streams} got no "
            f"document in epoch {place.epoch}: {found}; use fewer processes, workers or streams"
        )

    def _other_input(self, found: str) -> SourceError:
        return SourceError(
            f"source {self._name!r}: the place to go on from does not fit: {found}; resume with "
            "the input and the options that the state came from"
        )
