"""What a build is asked for, and how its input is cut into units of work.

`Feed` and `BuildSpec` hold everything that changes the bytes: equal ones over equal input give
equal stores. How the work is done (engine, workers, resume) is passed as plain arguments.

A chunk is a part of a source whose borders depend on the input alone. Batches never cross a chunk,
so they are the same however the work is divided. A unit is a run of chunks that one worker reads;
its borders are a matter of speed and never show in a store. Units from an earlier run keep their
borders; their receipts count only for the same plan and unchanged input.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from shardmill.building.journal import Receipt, UnitKey, read_receipts
from shardmill.building.workplace import Workplace
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import ConversationSource, CuttableSource, Source, Tokenizer
from shardmill.records import JSON, Cursor, TextBatch
from shardmill.sources import stamp_of

CHUNK_BYTES = 8 * 2**20
"""Two batches. A ledger counts whole batches when a budget closes a feed, so this is a constant."""
UNIT_BYTES = 64 * 2**20
SINGLE_PROCESS_UNIT_BYTES = 2**30
_JOURNAL = 3
"""Version of the journal: raised when segments are written differently, so that older ones are
not read."""


Fill: TypeAlias = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """One source and the splits it fills, in this order."""

    source: Source
    fill: Fill
    # (split, most tokens); None: no limit, so only the last one can have it. A document that
    # reaches a limit is cut there; its rest is counted as over budget and goes nowhere.


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """Everything about a store that is not the input. Recorded in its manifest."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_revision: str | None = None
    streaming: bool | None = None
    split_rule: str = ""
    seed: int = 0
    shuffle_buffer: int | None = None  # as the source was shuffled; recorded, not applied here
    shard_bytes: int = 128 * 2**20
    dtype: str | None = None  # "uint16" or "uint32"; None: by vocabulary
    append_eot: bool = False  # the tokenizer's "eot" after each document
    options: Mapping[str, JSON] = field(default_factory=dict)

    def to_json(self, *, dtype: str) -> dict[str, JSON]:
        """As a part of a plan, with the dtype that was chosen."""
        return {**asdict(self), "dtype": dtype, "options": dict(self.options)}


RECORDED = (
    *("dataset_name", "dataset_config", "dataset_revision", "streaming", "split_rule", "seed"),
    *("shuffle_buffer", "append_eot"),
)
"""Fields of a spec that a manifest has under the same name."""


def check_feeds(feeds: Sequence[Feed]) -> tuple[str, ...]:
    """The splits of a build, in order of first mention; refuses fills that make no sense."""
    if not feeds:
        raise OptionError("nothing to build: no source was given")
    for feed in feeds:
        if not feed.fill:
            raise OptionError(f"source {feed.source.name!r} fills no split")
        for position, (split, limit) in enumerate(feed.fill):
            if not split.isidentifier():
                raise OptionError(f"split {split!r}: wanted a name such as 'train'")
            if limit is None and position < len(feed.fill) - 1:
                raise OptionError(
                    f"split {split!r} has no token limit, so those after it stay empty"
                )
            if limit is not None and (not isinstance(limit, int) or limit < 0):
                raise OptionError(f"split {split!r}: token limit {limit!r}, wanted 0 or more")
        if len({split for split, _ in feed.fill}) < len(feed.fill):
            raise OptionError(f"source {feed.source.name!r} names a split twice: {feed.fill}")
    return tuple(dict.fromkeys(split for feed in feeds for split, _ in feed.fill))


def plan_json(
    feeds: Sequence[Feed], spec: BuildSpec, tokenizer: Tokenizer, dtype: str
) -> dict[str, JSON]:
    """Everything that determines the bytes: what a resume must find unchanged."""
    return {
        "feeds": [
            {"source": feed.source.describe(), "fill": [list(part) for part in feed.fill]}
            for feed in feeds
        ],
        "spec": spec.to_json(dtype=dtype),
        "tokenizer": tokenizer.fingerprint,
    }


def plan_sha256(plan: dict[str, JSON]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedChunks:
    """The chunks of one feed."""

    source: Source | ConversationSource
    chunks: Sequence[Source | ConversationSource]
    sizes: Sequence[int]  # approximate bytes of each chunk; 0 when unknown
    is_portable: bool  # whether other processes can read the chunks
    fill: Fill  # as in `Feed`; conversations choose among these splits

    @property
    def max_tokens(self) -> int | None:
        """Tokens that fill all splits; None when it never gets full."""
        limits = [limit for _, limit in self.fill]
        return None if None in limits else sum(limit for limit in limits if limit is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A run of chunks of one feed."""

    key: UnitKey
    chunks: tuple[Any, ...]  # of Source, or the one ConversationSource
    source: str  # name of the whole source
    is_portable: bool
    max_tokens: int | None  # of its feed

    @property
    def name(self) -> str:
        """What it reads, for messages."""
        first, last = self.chunks[0].name, self.chunks[-1].name
        return first if first == last else f"{first} ... {last}"


def chunks_of(source: Source) -> Sequence[Source]:
    """The chunks of a source, in order; a source that cannot be cut is one chunk."""
    if not isinstance(source, CuttableSource):
        return (source,)
    return source.cut(CHUNK_BYTES) or (source,)


def chunk_sizes(chunks: Sequence[Source]) -> list[int]:
    """Approximate bytes of each chunk, from the sizes of its files: asking a chunk may read a
    footer, and there are very many chunks."""
    files: list[Sequence[Any]] = [getattr(chunk, "files", ()) for chunk in chunks]
    parts = Counter(found[0].name for found in files if len(found) == 1)
    return [
        sum(file.num_bytes for file in found) // (parts[found[0].name] if len(found) == 1 else 1)
        if found
        else CHUNK_BYTES
        for found in files
    ]


def cut_feed(feed: Feed) -> FeedChunks:
    return feed_of_chunks(feed.source, chunks_of(feed.source), feed.fill)


def feed_of_chunks(source: Source, chunks: Sequence[Source], fill: Fill) -> FeedChunks:
    return FeedChunks(
        source=source,
        chunks=chunks,
        sizes=chunk_sizes(chunks),
        is_portable=isinstance(source, CuttableSource),
        fill=fill,
    )


def read_chunks(
    chunks: Sequence[Source], cursor: Cursor | None
) -> Generator[TextBatch, None, None]:
    """The batches of the chunks, from the start or after a cursor of an earlier batch.

    Their cursors hold the number of the chunk ("grain"), the cursor in it, and the rows of its file
    so far. Their drops count rows from their own first.
    """
    position: Any = cursor or {"grain": 0, "cursor": None, "rows": 0}
    inner, rows = position["cursor"], position["rows"]
    for number in range(position["grain"], len(chunks)):
        for batch in chunks[number].batches(inner):
            drops = tuple(
                drop if drop.row is None else replace(drop, row=drop.row - rows)
                for drop in batch.drops
            )
            rows += batch.num_rows
            after: Cursor = {"grain": number, "cursor": batch.cursor, "rows": rows}
            yield replace(batch, drops=drops, cursor=after)
        inner, rows = None, 0


def make_unit(feed: FeedChunks, number: int, start: int, stop: int, *, plan: str) -> Unit:
    """Chunks `start..stop` of feed `number`."""
    chunks = tuple(feed.chunks[start:stop])
    return Unit(
        key=UnitKey(feed=number, start=start, stop=stop, plan=plan, inputs=inputs_of(chunks)),
        chunks=chunks,
        source=feed.source.name,
        is_portable=feed.is_portable,
        max_tokens=feed.max_tokens,
    )


def inputs_of(chunks: Sequence[Source | ConversationSource]) -> str:
    """A hash over the files of some chunks as they are on this machine now."""
    try:
        stamps = [(chunk.name, stamp_of(chunk)) for chunk in chunks]
    except OSError as error:
        raise SourceError(
            f"{error.filename}: {error.strerror}; a file must not be removed while a store is "
            "built from it"
        ) from error
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()


def unit_ranges(
    sizes: Sequence[int], unit_bytes: int, begun: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Half-open runs of chunks of about `unit_bytes`.

    `begun` maps start to stop of runs from an earlier call: these are kept, and the rest is cut
    around them.
    """
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
class WorkPlan:
    """All units of a build, and what is done already."""

    units: tuple[tuple[Unit, ...], ...]  # of each feed, in order
    done: dict[str, list[Receipt]]  # receipts from the journal, by the folder of the unit

    def is_finished(self, unit: Unit) -> bool:
        receipts = self.done.get(unit.key.folder)
        return bool(receipts and receipts[-1].last)


def plan_work(
    work: Workplace, feeds: Sequence[FeedChunks], *, stamps: list[JSON], unit_bytes: int
) -> WorkPlan:
    """The units of a build. What is in the journal and does not belong there is removed.

    `stamps` identify the input as it is on this machine.
    """
    # What every receipt of this build must have been made for.
    versions = {"grain_bytes": CHUNK_BYTES, "journal": _JOURNAL}
    plan = plan_sha256({"plan": work.plan, "stamps": stamps, **versions})
    done: dict[str, list[Receipt]] = {}
    begun: list[dict[int, int]] = [{} for _ in feeds]  # start -> stop of units from the journal
    for path in sorted(work.segments.iterdir()):  # in the order of starts
        receipts = _usable_receipts(path, feeds, plan)
        if receipts:
            first = receipts[0]
            known = begun[first.feed]
            if not any(start <= first.start < stop for start, stop in known.items()):
                known[first.start] = first.stop
                done[path.name] = receipts
                continue
        shutil.rmtree(path)
    units = tuple(
        tuple(
            make_unit(feed, number, start, stop, plan=plan)
            for start, stop in unit_ranges(feed.sizes, unit_bytes, begun[number])
        )
        for number, feed in enumerate(feeds)
    )
    for mine, feed in zip(units, feeds, strict=True):
        edges = [0, *(unit.key.stop for unit in mine)]
        assert [unit.key.start for unit in mine] == edges[:-1], "units follow one another"
        assert edges[-1] == len(feed.chunks), "units cover every chunk once"
    return WorkPlan(units=units, done=done)


def _usable_receipts(path: Path, feeds: Sequence[FeedChunks], plan: str) -> list[Receipt]:
    """The receipts of a unit's folder, if they are of this plan and this input."""
    receipts = read_receipts(path)
    if not receipts:
        return []
    key = receipts[0].key
    known = 0 <= key.feed < len(feeds) and 0 <= key.start < key.stop
    if not known or key.stop > len(feeds[key.feed].chunks) or key.plan != plan:
        return []
    unit = make_unit(feeds[key.feed], key.feed, key.start, key.stop, plan=plan)
    return receipts if unit.key == key and path.name == key.folder else []
