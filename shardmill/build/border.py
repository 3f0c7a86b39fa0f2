"""The grains of a source whose first files are in a store already.

In: a source that begins with old files.  Out: the grains of all that follows.
Promise: grains and batches end where they would if all were read from the start, because a ledger
counts whole batches: of a grain that holds old files and new ones, the batches come as they are,
without the old documents. Old files of that one grain are read again, and nothing of them encoded.
Not here: which files are old (sources), where new documents go (commit.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardmill.build.grains import grain_sizes, grains_of
from shardmill.build.units import FeedGrains
from shardmill.errors import SourceError
from shardmill.protocols import Source
from shardmill.records import JSON, Cursor, TextBatch
from shardmill.sources import Appended, files_of, only_files, stamp_of


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
