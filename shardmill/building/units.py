"""Which grains are one piece of work.

In: the grains of each feed, how large a unit should be, units that an earlier run began.
Out: units in order.
Promise: the units of a feed are a partition of its grains, in order; what was begun stays as it is.
Unit borders are a matter of speed and never show in the store.
Not here: what becomes of a unit (task.py), in which order units are done (stage.py).

Sources cut at places that depend on the input alone, and read piece by piece.

In: a source.  Out: its grains; the batches of some of them, one grain behind the other.
Promise: grains are a function of the input, so batches, which never cross them, are the same
however the work is divided later; a cursor names the grain and the place in it.
Not here: which grains a worker gets (units.py).

The grains of a source whose first files are in a store already.

In: a source that begins with old files.  Out: the grains of all that follows.
Promise: grains and batches end where they would if all were read from the start, because a ledger
counts whole batches: of a grain that holds old files and new ones, the batches come as they are,
without the old documents. Old files of that one grain are read again, and nothing of them encoded.
Not here: which files are old (sources), where new documents go (commit.py).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardmill.building.segments import UnitKey
from shardmill.errors import BuildError, OptionError, SourceError
from shardmill.protocols import ConversationSource, CuttableSource, Source, continues
from shardmill.records import JSON, Cursor, TextBatch
from shardmill.sources import Appended, files_of, only_files, stamp_of

GRAIN_BYTES = 8 * 2**20
"""Two batches. A ledger counts whole batches when a budget closes a feed, so this is a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrainBatch:
    """A batch and its place in the rows of its file. Its drops count rows from its own first."""

    batch: TextBatch  # the cursor is one of the grains
    begins: bool  # its rows are the first of a file, or it has none
    grain: str  # the name of its grain: a file, or which part of it
    number: int  # of its grain among those that are read


def grains_of(source: Source) -> Sequence[Source]:
    """The grains of a source, in order; a source that cannot be cut is one."""
    if not isinstance(source, CuttableSource):
        return (source,)
    return source.cut(GRAIN_BYTES) or (source,)


def grain_sizes(grains: Sequence[Source]) -> list[int]:
    """Bytes of each grain, about. From what is known of its files: asking a grain may read a
    footer, and there are very many grains."""
    files: list[Sequence[Any]] = [getattr(grain, "files", ()) for grain in grains]
    parts = Counter(mine[0].name for mine in files if len(mine) == 1)
    return [
        sum(file.num_bytes for file in mine) // (parts[mine[0].name] if len(mine) == 1 else 1)
        if mine
        else GRAIN_BYTES
        for mine in files
    ]


def read_grains(
    grains: Sequence[Source], cursor: Cursor | None
) -> Generator[GrainBatch, None, None]:
    """The batches of the grains, from the start or from a cursor of theirs on."""
    first, inner, rows = _place(grains, cursor)
    for number in range(first, len(grains)):
        begins = not rows and not continues(grains[number])
        for batch in grains[number].batches(inner):
            drops = tuple(
                drop if drop.row is None else replace(drop, row=drop.row - rows)
                for drop in batch.drops
            )
            rows += batch.num_rows
            place: Cursor = {"grain": number, "cursor": batch.cursor, "rows": rows}
            yield GrainBatch(
                batch=replace(batch, drops=drops, cursor=place),
                begins=begins,
                grain=grains[number].name,
                number=number,
            )
            begins = False
        inner, rows = None, 0


def _place(grains: Sequence[Source], cursor: Cursor | None) -> tuple[int, Cursor | None, int]:
    """(grain, place in it, rows of it that were read)."""
    if cursor is None:
        return 0, None, 0
    number, inner, rows = (cursor.get(key) for key in ("grain", "cursor", "rows"))
    if not (
        isinstance(number, int)
        and 0 <= number < len(grains)
        and isinstance(inner, dict)
        and isinstance(rows, int)
    ):
        raise BuildError(
            f"a receipt holds the cursor {cursor!r:.200}, which is no place among "
            f"{len(grains):,} grains: start again with overwrite=True"
        )
    return number, inner, rows


UNIT_BYTES = 64 * 2**20
ALONE_BYTES = 2**30
"""What a worker gets at a time, and what one process alone makes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedGrains:
    """One feed, cut."""

    source: Source | ConversationSource
    grains: Sequence[Source | ConversationSource]
    sizes: Sequence[int]  # bytes of each grain, about; 0 when nobody knows

    @property
    def can_travel(self) -> bool:
        """Whether its grains were made to be read in another process."""
        return isinstance(self.source, CuttableSource)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A run of grains of one feed."""

    key: UnitKey
    grains: tuple[Source | ConversationSource, ...]
    source: str  # the name of the whole source
    num_bytes: int  # about
    can_travel: bool

    @property
    def name(self) -> str:
        """What it reads, for messages."""
        first, last = self.grains[0].name, self.grains[-1].name
        return first if first == last else f"{first} ... {last}"


def cut_feed(source: Source) -> FeedGrains:
    """The grains of a source of texts."""
    grains = grains_of(source)
    return FeedGrains(source=source, grains=grains, sizes=grain_sizes(grains))


def make_unit(feed: FeedGrains, number: int, start: int, stop: int, *, plan: str) -> Unit:
    """Grains `start..stop` of feed `number`."""
    grains = tuple(feed.grains[start:stop])
    key = UnitKey(feed=number, start=start, stop=stop, plan=plan, inputs=inputs_of(grains))
    return Unit(
        key=key,
        grains=grains,
        source=feed.source.name,
        num_bytes=sum(feed.sizes[start:stop]),
        can_travel=feed.can_travel,
    )


def inputs_of(grains: Sequence[Source | ConversationSource]) -> str:
    """A hash over the files of some grains as they are on this machine now."""
    try:
        stamps = [(grain.name, stamp_of(grain)) for grain in grains]
    except OSError as error:
        raise SourceError(
            f"{error.filename}: {error.strerror}; a file must not go while a store is built from it"
        ) from error
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()


def unit_ranges(
    sizes: Sequence[int], unit_bytes: int, begun: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Half-open runs of grains of about `unit_bytes`. `begun` tells the stop of runs that an
    earlier call made, by their start: these are kept, and the rest is cut around them."""
    if unit_bytes < 1:
        raise OptionError(f"unit_bytes={unit_bytes}: wanted how large a unit should be, 1 or more")
    start = 0
    while start < len(sizes):
        stop, total = start + 1, sizes[start]
        if start in begun:
            stop = begun[start]
        else:
            while stop < len(sizes) and stop not in begun and total + sizes[stop] <= unit_bytes:
                total += sizes[stop]
                stop += 1
        yield start, stop
        start = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What lies in front of the first new document of a grain, or is left of that."""

    num_read: int = 0
    num_texts: int = 0
    num_drops: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)

    def without(self, batch: TextBatch) -> Passed:
        """What is left behind a batch that is old as a whole."""
        return Passed(
            num_read=self.num_read - batch.num_read,
            num_texts=self.num_texts - len(batch.texts),
            num_drops=self.num_drops - len(batch.drops),
            counts=_less(self.counts, batch.counts),
        )


class Rest:
    """A grain without the documents of its first files. A `Source`; it travels by pickle."""

    def __init__(self, grain: Source, passed: Passed, num_bytes: int | None) -> None:
        """`num_bytes` of input are new, about."""
        self._grain, self._passed, self._num_bytes = grain, passed, num_bytes

    @property
    def grain(self) -> Source:
        """The whole grain."""
        return self._grain

    @property
    def name(self) -> str:
        return self._grain.name

    def describe(self) -> dict[str, JSON]:
        return {"kind": "rest", "of": self._grain.describe(), "behind": self._passed.num_read}

    def stamp(self) -> JSON:
        return stamp_of(self._grain)

    def size_hint(self) -> int | None:
        return self._num_bytes

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        """Every cursor is one of the grain: the first that is given lies behind all old files."""
        if cursor is not None:
            return self._grain.batches(cursor)
        return (_trimmed(batch, left) for batch, left in _behind(self._grain, self._passed))


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshGrains:
    """What is still to be read."""

    feed: FeedGrains
    seen: tuple[Source, ...]  # the grains that hold old files, the last perhaps new ones too
    num_old: int  # of them hold no new one
    num_shared: int  # old texts in the batch in which the first new document comes; 0: it begins it


def fresh_grains(files: Appended) -> FreshGrains:
    """The grains behind the old files; there are new ones."""
    assert files.fresh is not None, "nothing new, nothing to read"
    grains: list[Source] = []
    sizes: list[int] = []
    seen: list[Source] = []
    all_grains, num_old, num_shared = grains_of(files.source), 0, 0
    for grain, size in zip(all_grains, grain_sizes(all_grains), strict=True):
        places = {file.place for file in files_of(grain)}
        if places & files.old:
            seen.append(grain)
        if places <= files.old:
            num_old += 1
            continue
        if places & files.old:
            passed = _count(only_files(grain, files.old))
            num_shared = _num_shared(grain, passed)
            fresh = only_files(grain, places - files.old)
            grain = Rest(grain, passed, fresh.size_hint() if fresh is not None else None)
        grains.append(grain)
        sizes.append(size)
    feed = FeedGrains(source=files.fresh, grains=tuple(grains), sizes=tuple(sizes))
    return FreshGrains(feed=feed, seen=tuple(seen), num_old=num_old, num_shared=num_shared)


def _count(source: Source | None) -> Passed:
    """All of a source."""
    assert source is not None, "a grain with old files has some"
    read = texts = drops = 0
    counts: Counter[str] = Counter()
    for batch in source.batches():
        read, texts = read + batch.num_read, texts + len(batch.texts)
        drops += len(batch.drops)
        counts.update(batch.counts)
    return Passed(num_read=read, num_texts=texts, num_drops=drops, counts=counts)


def _num_shared(grain: Source, passed: Passed) -> int:
    """Old texts in the first batch that has something new."""
    return next((left.num_texts for _, left in _behind(grain, passed)), 0)


def _behind(grain: Source, passed: Passed) -> Iterator[tuple[TextBatch, Passed]]:
    """The batches of a grain that are not old as a whole, and what of each is old."""
    left = passed
    for batch in grain.batches():
        if left.num_read and left.num_read >= batch.num_read:
            left = left.without(batch)
            continue
        yield batch, left
        left = Passed()
    if left.num_read:
        raise SourceError(f"{grain.name}: changed while it was read: wait for its writer")


def _trimmed(batch: TextBatch, left: Passed) -> TextBatch:
    if not left.num_read:
        return batch
    return replace(
        batch,
        texts=batch.texts[left.num_texts :],
        num_read=batch.num_read - left.num_read,
        counts=_less(batch.counts, left.counts),
        drops=batch.drops[left.num_drops :],
    )


def _less(counts: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: count - other.get(name, 0) for name, count in counts.items()}
