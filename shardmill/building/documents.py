"""Build a store of documents, or plan one: sources to tokens to shards."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack, cast

from shardmill.building.append import plan_append
from shardmill.building.journal import target_of
from shardmill.building.plan import (
    BuildSpec,
    Feed,
    check_feeds,
    cut_feed,
    plan_json,
    unit_ranges,
)
from shardmill.building.resources import (
    FeedEstimate,
    WorkerKeywords,
    estimate_feed,
    open_workers,
)
from shardmill.building.run import BuildJob, BuildReport, RunKeywords, run_build
from shardmill.building.scheduler import OnProgress
from shardmill.building.worker import ChunkEncoder, TokenRules
from shardmill.protocols import Tokenizer
from shardmill.sources import limited
from shardmill.store import is_finished
from shardmill.store.writer import open_old

log = logging.getLogger(__name__)


class StoreKeywords(RunKeywords, WorkerKeywords, total=False):
    """The options of `build_store`."""


def build_store(
    feeds: Sequence[Feed],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    append: bool = False,
    on_progress: OnProgress | None = None,
    **options: Unpack[StoreKeywords],
) -> BuildReport:
    """Tokenise the feeds into a store at `folder`.

    `append` keeps a finished store of the same options: the one feed names its old files,
    unchanged, and new ones, which are appended. The result is the store of a build of all files in
    this order; without new files it stays as it is. `overwrite` then only discards the work of an
    append that was stopped. For the other options see `RunKeywords` and `WorkerKeywords`.
    """
    target, appending = target_of(folder), None
    splits = check_feeds(feeds)
    run: dict[str, Any] = {**options}
    dividing = {key: run.pop(key) for key in WorkerKeywords.__annotations__ if key in run}
    with open_workers(cast(WorkerKeywords, dividing)) as workers:
        max_document = workers.memory_plan().max_document(tokenizer)
        feeds = _limited(feeds, max_document)
        if append and not is_finished(target):
            log.info("%s: no store here yet: all of it is built", target)
        elif append:
            engine = run.get("engine", "auto")
            appending = plan_append(
                open_old(target), feeds, spec=spec, tokenizer=tokenizer, engine=engine
            )
            feeds = [appending.feed]
        rules = TokenRules.of(spec, tokenizer)
        job = BuildJob(
            target=target,
            sources=[feed.source for feed in feeds],
            feeds=feeds,
            splits=splits,
            encoder=ChunkEncoder(rules=rules, max_document=max_document),
            tokenizer=tokenizer,
            spec=spec,
            plan=plan_json(feeds, spec, tokenizer, rules.dtype),
            append=appending,
            on_progress=on_progress,
        )
        return run_build(job, workers, **run)


def _limited(feeds: Sequence[Feed], max_document: int) -> list[Feed]:
    """The same feeds, whose sources do not read documents that would not fit."""
    return [replace(feed, source=limited(feed.source, max_document)) for feed in feeds]


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
    workers["run_on"] = "local" if workers.get("ray_address") is None else "ray"
    with open_workers(workers) as options:
        memory, unit_bytes = options.memory_plan(), options.size_of_units()
    max_document = memory.max_document(tokenizer)
    estimates = []
    for feed in _limited(feeds, max_document):
        chunks = cut_feed(feed)
        num_units = sum(1 for _ in unit_ranges(chunks.sizes, unit_bytes, {}))
        estimates.append(estimate_feed(chunks, tokenizer, rules, num_units=num_units))
    target = target_of(folder)
    existing = next(path for path in (target, *target.parents) if path.is_dir())
    return BuildPlan(
        feeds=tuple(estimates),
        workers=memory.workers,
        memory_bytes=memory.total_bytes,
        most_document=max_document,
        free_bytes=shutil.disk_usage(existing).free,
    )
