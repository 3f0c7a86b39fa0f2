"""One unit of a build as a piece of work that any process can do.

In: a unit, the encoder.  Out: sealed segments in the unit's folder, and their receipts; from a
process that does not see that folder, parcels of both.
Promise: a unit that was begun goes on behind its last sealed segment; nothing that it needs is
outside it, the encoder and the files it reads; it may be done again at any time, by one at a time.
Not here: who runs it (engines), what becomes of its segments (stage.py).

What a worker needs beside its unit: the tokenizer, and the engine that was proved for it.

In: a tokenizer and the record of the engine that the first process chose.  Out: an encoder.
Promise: the very engine that was proved, opened once a process and watched there as in one process.
Not here: proving (engine.py), how this travels (engines).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shardmill.building.encode import EncoderDesk, TokenRules, unit_portions
from shardmill.building.segments import (
    CarriedSegment,
    Parcel,
    Portion,
    Receipt,
    Segment,
    SegmentSize,
    SegmentWriter,
    Send,
    SourceCounts,
    keep_parcel,
    read_receipts,
)
from shardmill.building.units import Unit, inputs_of
from shardmill.errors import SourceError
from shardmill.protocols import Source, Texts, Tokenizer
from shardmill.records import JSON, Cursor
from shardmill.tokenizers import ChosenEncoder, EngineCheck, reopen_encoder, thread_limits

Portions = Iterator[tuple[Portion, SourceCounts]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTask:
    """A unit of texts, small when pickled. A `protocols.PortableTask`."""

    unit: Unit
    folder: Path  # of the unit, in the journal
    rules: TokenRules
    most: int | None  # tokens of which no more can ever be needed; None: all are
    most_document: int  # bytes of text that one document may have
    size: SegmentSize

    @property
    def name(self) -> str:
        return self.unit.name

    def run(self, tools: EncoderDesk, emit: Callable[[Any], None]) -> None:
        """Emit every receipt of the unit, those of an earlier attempt first."""
        done = self._done()
        for receipt in done:
            emit(receipt)
        self.go_on(tools, done, self.folder, sealed=emit)

    def elsewhere(self) -> CarriedTask:
        return CarriedTask(task=self, done=tuple(self._done()))

    def keep(self, parcel: Parcel) -> Receipt:
        return keep_parcel(self.folder, parcel)

    def go_on(
        self,
        tools: EncoderDesk,
        done: Sequence[Receipt],
        place: Path | Send,
        *,
        sealed: Callable[[Receipt], None] = lambda _: None,
    ) -> None:
        """Make the segments behind those that are done."""
        tokens = sum(receipt.num_tokens for receipt in done)

        def enough(portion: Portion, _account: SourceCounts) -> bool:
            nonlocal tokens
            tokens += len(portion.documents.values)
            return self.most is not None and tokens >= self.most

        with closing(self._portions(tools, done)) as portions:
            journal = UnitJournal(self.unit, place, done, self.size)
            journal.write(portions, add=enough, sealed=sealed)

    def _done(self) -> list[Receipt]:
        self.folder.mkdir(exist_ok=True)
        return read_receipts(self.folder, self.unit.key)

    def _portions(
        self, tools: EncoderDesk, done: Sequence[Receipt]
    ) -> Generator[tuple[Portion, SourceCounts], None, None]:
        return unit_portions(
            cast(Sequence[Source], self.unit.grains),
            source=self.unit.source,
            cursor=done[-1].cursor if done else None,
            given=sum(receipt.num_given for receipt in done),
            desk=tools,
            rules=self.rules,
            most_document=self.most_document,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedTask:
    """A unit of texts for a process without the journal: it writes nothing and emits parcels."""

    task: TextTask
    done: tuple[Receipt, ...]  # what lies in the journal of it

    @property
    def name(self) -> str:
        return self.task.name

    def run(self, tools: EncoderDesk, emit: Send) -> None:
        for receipt in self.done:
            emit(Parcel(receipt=receipt, parts=None))
        self.task.go_on(tools, self.done, emit)


class UnitJournal:
    """The segments of one unit, behind those that are done."""

    def __init__(
        self,
        unit: Unit,
        place: Path | Send,
        done: Sequence[Receipt],
        size: SegmentSize | None = None,
    ) -> None:
        """`place` is the folder of the unit, or takes parcels for it."""
        self._unit, self._place, self._size = unit, place, size
        self._after = done[-1] if done else None

    def write(
        self,
        portions: Portions,
        *,
        add: Callable[[Portion, SourceCounts], bool],
        sealed: Callable[[Receipt], None],
    ) -> None:
        """Write portions to segments; the last segment is marked, and may be empty.

        `add` is given each portion, and says whether that was enough.
        """
        after = self._after
        if after is not None and after.last:
            return
        cursor: Cursor = {} if after is None else after.cursor
        segment = self._open(after)
        try:
            for portion, account in portions:
                segment.add(portion, account)
                cursor = account.cursor
                if add(portion, account):
                    break
                if segment.due:
                    after = self._seal(segment, cursor, last=False)
                    sealed(after)
                    segment = self._open(after)
            sealed(self._seal(segment, cursor, last=True))
        finally:
            segment.abandon()

    def _open(self, after: Receipt | None) -> Segment:
        if isinstance(self._place, Path):
            return SegmentWriter(self._place, self._unit.key, after=after, size=self._size)
        return CarriedSegment(self._place, self._unit.key, after=after, size=self._size)

    def _seal(self, segment: Segment, cursor: Cursor, *, last: bool) -> Receipt:
        if inputs_of(self._unit.grains) != self._unit.key.inputs:
            raise SourceError(
                f"{self._unit.name}: changed while it was read; a file must not change while a "
                "store is built from it: wait for its writer, then start again with overwrite=True"
            )
        return segment.seal(cursor, last=last)


_ALLOCATION = {
    # Arrow's own allocators reserve a gigabyte at once, used or not, and a limit counts that.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    # A batch takes the memory of the one before it, instead of new pages: a tenth of all CPU time.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


class WorkerTools:
    """An `EncoderDesk` that travels by pickle, unopened."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        produced_by: Mapping[str, JSON],
        check: EngineCheck,
        has_spare_cores: bool = False,
    ) -> None:
        """`has_spare_cores`: there are more cores than workers."""
        self.has_spare_cores = has_spare_cores
        self._tokenizer, self._check = tokenizer, check
        self._produced_by = dict(produced_by)
        self._encoder: ChosenEncoder | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_encoder": None}

    def encoder(self, first: Texts) -> ChosenEncoder:  # noqa: ARG002 - it was chosen before
        if self._encoder is None:
            self._encoder = reopen_encoder(self._tokenizer, self._produced_by, check=self._check)
        return self._encoder


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_environ(workers: int) -> dict[str, str]:
    """Keeps the engines of so many workers together to the cores there are."""
    return environ_of_threads(max(1, num_cores() // workers))


def environ_of_threads(num_threads: int) -> dict[str, str]:
    """For a worker of so many threads. Arrow too: it reads and decodes in a pool of its own."""
    return {**thread_limits(num_threads), "OMP_NUM_THREADS": str(num_threads), **_ALLOCATION}
