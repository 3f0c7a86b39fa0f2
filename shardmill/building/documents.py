"""Build a store of documents, or plan one: sources to tokens to shards."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from shardmill.building.append import nothing_new, plan_append
from shardmill.building.assembly import DocumentWriter
from shardmill.building.pool import RunOn, open_workers
from shardmill.building.resources import FeedEstimate, estimate_feed
from shardmill.building.run import BuildJob, RunKeywords, run_build
from shardmill.building.segments import EncodedBatch, SegmentSize
from shardmill.building.spec import BuildReport, BuildSpec, Feed, Progress, check_feeds, plan_json
from shardmill.building.units import FeedChunks, Unit, cut_feed, unit_ranges
from shardmill.building.worker import ChunkEncoder, EncoderProvider, TokenRules, UnitTask
from shardmill.building.workplace import target_of
from shardmill.protocols import Tokenizer
from shardmill.records import Cursor
from shardmill.sources import limited
from shardmill.store import StoreWriter, is_finished
from shardmill.store.writer import open_old

log = logging.getLogger(__name__)


class WorkerKeywords(TypedDict, total=False):
    """How the work is divided. No byte of the store depends on it."""

    workers: int | None  # processes; None: one for each core, if there is enough work
    unit_bytes: int | None  # of input for a worker at a time; None: 64 MiB
    memory: int | None  # bytes for all processes together; None: what is free
    run_on: RunOn  # "local" unless given
    ray_address: str | None  # for run_on="ray"; None: a Ray is started on this machine


class StoreKeywords(RunKeywords, WorkerKeywords, total=False):
    """The options of `build_store`."""


def build_store(
    feeds: Sequence[Feed],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    append: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Unpack[StoreKeywords],
) -> BuildReport:
    """Tokenise the feeds into a store at `folder`.

    `append` keeps a finished store of the same options: the one feed names its old files,
    unchanged, and new ones, which are appended. The result is the store of a build of all files in
    this order; without new files it stays as it is. `overwrite` then only discards the work of an
    append that was stopped. For the other options see `RunKeywords` and `WorkerKeywords`.
    """
    target, appending = target_of(folder), None
    check_feeds(feeds)
    run: dict[str, Any] = {**options}
    dividing = {key: run.pop(key) for key in WorkerKeywords.__annotations__ if key in run}
    with open_workers(**dividing) as workers:
        max_document = workers.memory_plan().max_document(tokenizer)
        feeds = _limited(feeds, max_document)
        if append and not is_finished(target):
            log.info("%s: no store here yet: all of it is built", target)
        elif append:
            engine = run.get("engine", "auto")
            appending = plan_append(
                open_old(target), feeds, spec=spec, tokenizer=tokenizer, engine=engine
            )
            if appending.chunks is None:
                return nothing_new(appending)
            feeds = [appending.feed]
        rules = TokenRules.of(spec, tokenizer)
        job = DocumentJob(
            target=target,
            sources=[feed.source for feed in feeds],
            splits=check_feeds(feeds),
            rules=rules,
            tokenizer=tokenizer,
            spec=spec,
            plan=plan_json(feeds, spec, tokenizer, rules.dtype),
            on_progress=on_progress,
            limits=[_max_tokens(feed) for feed in feeds],
            feeds=feeds,
            append=appending,
            encoder=ChunkEncoder(rules=rules, max_document=max_document),
        )
        return run_build(job, workers, **run)


@dataclass(frozen=True, kw_only=True)
class DocumentJob(BuildJob):
    """A build of documents."""

    encoder: ChunkEncoder

    def cut(self) -> Sequence[FeedChunks]:
        if self.append is not None and self.append.chunks is not None:
            return [self.append.chunks]
        return [cut_feed(feed.source) for feed in self.feeds]

    def encode(
        self, unit: Unit, cursor: Cursor | None, given: int, provider: EncoderProvider
    ) -> Generator[EncodedBatch, None, None]:
        return self.encoder.batches(
            unit.chunks, source=unit.source, cursor=cursor, given=given, provider=provider
        )

    def make_task(self, unit: Unit, folder: Path) -> UnitTask:
        return UnitTask(
            unit=unit,
            folder=folder,
            encoder=self.encoder,
            max_tokens=self.limits[unit.key.feed],
            size=SegmentSize.default(),
        )

    def open_writer(self, out: StoreWriter) -> DocumentWriter:
        return DocumentWriter(self.feeds, out, self.append.filled if self.append else {})


def _limited(feeds: Sequence[Feed], max_document: int) -> list[Feed]:
    """The same feeds, whose sources do not read documents that would not fit."""
    return [replace(feed, source=limited(feed.source, max_document)) for feed in feeds]


def _max_tokens(feed: Feed) -> int | None:
    """Tokens that fill all splits of a feed; None when it never gets full."""
    limits = [limit for _, limit in feed.fill]
    return None if None in limits else sum(limit for limit in limits if limit is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build would take."""

    feeds: tuple[FeedEstimate, ...]
    workers: int  # processes at most; 1: no other process
    memory_bytes: int  # of all processes together, when no document is large
    most_document: int  # bytes of text: a larger document is refused
    free_bytes: int  # on the disk of the store, now

    @property
    def disk_bytes(self) -> int | None:
        """Needed at the peak; None when the size of a source is unknown."""
        known = [feed.disk_bytes for feed in self.feeds if feed.disk_bytes is not None]
        return sum(known) if len(known) == len(self.feeds) else None


def plan_store(
    feeds: Sequence[Feed],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    **workers: Unpack[WorkerKeywords],
) -> BuildPlan:
    """What `build_store` would take with these arguments. Nothing is written: a chunk of each
    source is read, and some kilobytes of it are encoded. Ray is asked only if its address is given.
    """
    check_feeds(feeds)
    rules = TokenRules.of(spec, tokenizer)
    address = workers.get("ray_address")
    workers["run_on"] = "local" if address is None else "ray"
    with open_workers(**workers) as options:
        memory, unit_bytes = options.memory_plan(), options.size_of_units()
    max_document = memory.max_document(tokenizer)
    estimates = []
    for feed in _limited(feeds, max_document):
        chunks = cut_feed(feed.source)
        num_units = sum(1 for _ in unit_ranges(chunks.sizes, unit_bytes, {}))
        limit = _max_tokens(feed)
        estimates.append(
            estimate_feed(chunks, tokenizer, rules, num_units=num_units, max_tokens=limit)
        )
    target = target_of(folder)
    existing = next(path for path in (target, *target.parents) if path.is_dir())
    return BuildPlan(
        feeds=tuple(estimates),
        workers=memory.workers,
        memory_bytes=memory.total_bytes,
        most_document=max_document,
        free_bytes=shutil.disk_usage(existing).free,
    )
