"""A source as a stream of blocks of documents, from any place on.

In: a source, an order, which of how many streams.  Out: `Block`s, each with its start and end.
Promise: `blocks(block.start)` gives that very block and all after it, `blocks(block.end)` what
follows; it opens only the unit where the place is, at its cursor. Over all streams every document
of an epoch comes once. A block never crosses an epoch; an epoch without a document is an error.
An epoch ends with a block, perhaps an empty one, whose end is the start of the next epoch.
Memory: the texts of one block, twice while they are shuffled, and one batch of the source.
Not here: threads (encode), tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from threading import Event

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source
from shardmill.records import JSON, TextBatch
from shardmill.sources import stamp_of
from shardmill.streaming.blocks import Collector, after_epoch, after_texts, after_unit
from shardmill.streaming.dealing import Dealing, deal, divide_source
from shardmill.streaming.journal import Journal
from shardmill.streaming.order import StreamOrder
from shardmill.streaming.records import Block, Place


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
        self, start: Place | None = None, *, stop: Event | None = None
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
        epoch = (start or Place()).epoch
        for block in walk.blocks(start or Place(), stop or Event()):
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
        self._place = Place()

    def blocks(self, start: Place, stop: Event) -> Generator[Block, None, None]:
        self._place = start
        while (self._order.repeat or self._place.epoch == 0) and not stop.is_set():
            yield from self._epoch(stop)

    def _epoch(self, stop: Event) -> Iterator[Block]:
        collector = Collector(self._order, self._dealing.stream, self._place)
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

    def _deal(self, batch: TextBatch, collector: Collector) -> Iterator[Block]:
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
