"""What a build is asked for, and how its input is cut into units of work.

`Feed` and `BuildSpec` hold everything that changes the bytes: equal ones over equal input give
equal stores. How the work is done (engine, workers, resume) is passed as plain arguments.

A chunk is a part of a source of about 8 MiB. A unit is a run of chunks: what one receipt is about,
the unit of work, of resuming and of deaths. Both are cut by the input alone, so that batches,
shards and receipts are the same however the work is divided.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, TypeAlias

from shardmill.building.splits import Fill, HashSplit
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import (
    ConversationSource,
    CuttableChats,
    CuttableSource,
    Source,
    Tokenizer,
)
from shardmill.records import JSON, ConversationBatch, Cursor, TextBatch
from shardmill.sources import stamp_of
from shardmill.sources.source import SourcePieces
from shardmill.store.layout import ITEMSIZE

CHUNK_BYTES = 8 * 2**20
"""Two batches. A ledger counts whole batches when a budget closes a feed, so this is a constant."""
MOST_UNIT_BYTES = 2**29
"""Of input; a unit that is killed is made again, so it takes seconds with a fast engine."""
_UNITS_OF_A_SIZE = 16
_BYTES_OF_A_TOKEN = 4
_MOST_BATCHES = 8
"""In a unit of a source that cannot be cut: it is held in memory until a worker has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """One source and the splits it fills, in this order."""

    source: Source
    fill: Fill
    # (split, most tokens); None: no limit, so only the last one can have it. A document that
    # reaches a limit is cut there; its rest is counted as over budget and goes nowhere.
    by_hash: HashSplit | None = None  # chooses among the splits of `fill`, which have no limits


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
    exact_shards: bool = False  # all but the last of a split have `shard_bytes`; costs a copy

    def to_json(self, *, dtype: str) -> dict[str, JSON]:
        """As a part of a plan, with the dtype that was chosen."""
        facts = {**asdict(self), "dtype": dtype, "options": dict(self.options)}
        del facts["exact_shards"]  # where shards end changes no token, and older plans lack it
        return facts


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
        if feed.by_hash is not None:
            assert feed.fill == tuple((split, None) for split in feed.by_hash.splits)
            continue
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
            {
                "source": feed.source.describe(),
                "fill": [list(part) for part in feed.fill],
                **({} if feed.by_hash is None else {"by_hash": feed.by_hash.words()}),
            }
            for feed in feeds
        ],
        "spec": spec.to_json(dtype=dtype),
        "tokenizer": tokenizer.fingerprint,
    }


def plan_sha256(plan: dict[str, JSON]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


AnySource: TypeAlias = Source | ConversationSource
AnyBatch: TypeAlias = TextBatch | ConversationBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedChunks:
    """The chunks of one feed."""

    source: AnySource
    chunks: Sequence[Any]  # of AnySource; of a source that cannot be cut: itself
    sizes: Sequence[int]  # approximate bytes of each chunk; 0 when unknown
    is_cut: bool  # whether other processes can read the chunks
    fill: Fill  # as in `Feed`

    @property
    def max_tokens(self) -> int | None:
        """Tokens that fill all splits; None when it never gets full."""
        limits = [limit for _, limit in self.fill]
        return None if None in limits else sum(limit for limit in limits if limit is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A run of chunks of one feed."""

    feed: int
    number: int  # in its feed
    plan: str  # sha256 of everything that determines the bytes
    inputs: str  # sha256 over names and times of its files
    source: str  # name of the whole source
    first_chunk: int
    chunks: Sequence[Any]  # of AnySource
    num_bytes: int  # of input, about; 0 when unknown
    cursor: Cursor | None = None  # of a source that cannot be cut: where it continues after this

    @property
    def key(self) -> tuple[int, int]:
        return self.feed, self.number

    @property
    def mark(self) -> str:
        """Identifies its chunks among those of the same input, on every machine; "" if these are
        not cut. Workers ask for it, so the coordinator need not."""
        return unit_mark(self.chunks) if self.inputs else ""

    @property
    def name(self) -> str:
        """What it reads, for messages."""
        first, last = self.chunks[0].name, self.chunks[-1].name
        return first if first == last else f"{first} ... {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadChunk:
    """Batches of a source that cannot be cut, as a chunk for a worker."""

    name: str
    held: tuple[AnyBatch, ...]

    def stamp(self) -> JSON:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[AnyBatch]:
        assert cursor is None, "units are read from their start"
        yield from self.held


def chunks_of(source: AnySource) -> Sequence[Any]:
    """The chunks of a source, in order; a source that cannot be cut is one chunk."""
    if not isinstance(source, CuttableSource | CuttableChats):
        return (source,)
    return source.cut(CHUNK_BYTES) or (source,)


def chunk_sizes(chunks: Sequence[AnySource]) -> list[int]:
    """Approximate bytes of each chunk, from the sizes of its files: asking a chunk may read a
    footer, and there are very many chunks."""
    if isinstance(chunks, SourcePieces):
        sizes = ([_stored_bytes(first) // count] * count for first, count in chunks.by_files())
        return list(chain.from_iterable(sizes))
    files: list[Sequence[Any]] = [getattr(chunk, "files", ()) for chunk in chunks]
    parts = Counter(found[0].name for found in files if len(found) == 1)
    return [
        _stored_bytes(chunk) // (parts[found[0].name] if len(found) == 1 else 1)
        for chunk, found in zip(chunks, files, strict=True)
    ]


def _stored_bytes(chunk: AnySource) -> int:
    files: Sequence[Any] = getattr(chunk, "files", ())
    return sum(file.num_bytes for file in files) if files else CHUNK_BYTES


def cut_source(source: AnySource, fill: Fill) -> FeedChunks:
    was_enabled = gc.isenabled()
    gc.disable()  # none of very many chunks is garbage; looking at all of them again is 40 % here
    try:
        chunks = chunks_of(source)
        sizes = chunk_sizes(chunks)
    finally:
        if was_enabled:
            gc.enable()
    # A piece with no files at all is a stream of the hub: this process reads it.
    is_cut = isinstance(source, CuttableSource | CuttableChats) and all(
        getattr(chunk, "files", None) != () for chunk in _one_of_each_file(chunks)
    )
    return FeedChunks(source=source, chunks=chunks, sizes=sizes, is_cut=is_cut, fill=fill)


def _one_of_each_file(chunks: Sequence[Any]) -> Iterable[Any]:
    """Of chunks that are ranges of files the first of each file, where that is known."""
    if isinstance(chunks, SourcePieces):
        return (first for first, _ in chunks.by_files())
    return chunks


def unit_ranges(sizes: Sequence[int], shard_bytes: int, dtype: str) -> Iterator[tuple[int, int]]:
    """Half-open runs of chunks: the units of a feed.

    The first 16 have 8 MiB, the next 16 twice that, and so on up to what fills a shard: small input
    is work for many cores, and large input makes few small shards. New files at the end change the
    last unit only.
    """
    most = max(_BYTES_OF_A_TOKEN * shard_bytes // ITEMSIZE[dtype], CHUNK_BYTES)
    start = number = 0
    while start < len(sizes):
        size = min(CHUNK_BYTES << min(number // _UNITS_OF_A_SIZE, 32), most, MOST_UNIT_BYTES)
        stop, total = start + 1, sizes[start]
        while stop < len(sizes) and total + sizes[stop] <= size:
            total += sizes[stop]
            stop += 1
        yield start, stop
        start, number = stop, number + 1


def cut_units(
    feed: FeedChunks, number: int, *, plan: str, shard_bytes: int, dtype: str, first: int = 0
) -> Iterator[Unit]:
    """The units of feed `number`, whose source can be cut, from unit `first` on. A unit is made
    when it is asked for: workers begin at once, and only units at work are in memory."""
    ranges = enumerate(unit_ranges(feed.sizes, shard_bytes, dtype))
    for place, (start, stop) in islice(ranges, first, None):
        chunks = feed.chunks[start:stop]
        yield Unit(
            feed=number,
            number=place,
            plan=plan,
            inputs=inputs_of(chunks),
            source=feed.source.name,
            first_chunk=start,
            chunks=chunks,
            num_bytes=sum(feed.sizes[start:stop]),
        )


def read_units(
    feed: FeedChunks, number: int, *, plan: str, first: int, cursor: Cursor | None
) -> Iterator[Unit]:
    """The units of feed `number`, whose source cannot be cut, from unit `first` on, which begins
    at `cursor`. Reads the source; a unit holds what was read."""
    source = feed.source
    batches = iter(source.batches(cursor))
    while held := _take(batches, min(2 << min(first // _UNITS_OF_A_SIZE, 16), _MOST_BATCHES)):
        yield Unit(
            feed=number,
            number=first,
            plan=plan,
            inputs="",
            source=source.name,
            first_chunk=0,
            chunks=(ReadChunk(name=source.name, held=held),),
            num_bytes=sum(batch.texts.nbytes for batch in held if isinstance(batch, TextBatch)),
            cursor=held[-1].cursor,
        )
        first += 1


def _take(batches: Iterator[Any], most: int) -> tuple[AnyBatch, ...]:
    held: list[AnyBatch] = []
    for batch in batches:
        held.append(batch)
        if len(held) == most:
            break
    return tuple(held)


def inputs_of(chunks: Sequence[AnySource]) -> str:
    """A hash over the files of some chunks as they are on this machine now."""
    known: dict[tuple[int, ...], JSON] = {}  # neighbours are ranges of one file: it is asked once
    stamps: list[tuple[str, JSON]] = []
    try:
        for chunk in _one_of_each_file(chunks):
            files = tuple(map(id, getattr(chunk, "files", (chunk,))))
            if files not in known:
                known[files] = stamp_of(chunk)
            stamps.append((chunk.name, known[files]))
    except OSError as error:
        raise SourceError(
            f"{error.filename}: {error.strerror}; a file must not be removed while a store is "
            "built from it"
        ) from error
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()


def mark_of(chunk: AnySource) -> int:
    """A number that identifies this chunk among those of the same input, on every machine."""
    files: Any = getattr(chunk, "files", ())
    if isinstance(files, tuple) and files:
        # JSON, written out here since there are 128 chunks in a gigabyte.
        first, last, part = (files[0].name, files[-1].name, getattr(chunk, "part", ""))
        named = f"[[{quoted(first)}, {quoted(last)}], {len(files)}, {quoted(part)}]"
    else:
        named = quoted(chunk.name)
    # 60 bits, so that a mark fits an int64
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") >> 4


def unit_mark(chunks: Sequence[AnySource]) -> str:
    """Identifies a unit among those of the same input: equal if its chunks are."""
    marks = json.dumps([mark_of(chunk) for chunk in chunks])
    return hashlib.sha256(marks.encode()).hexdigest()[:16]
