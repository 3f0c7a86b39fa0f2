"""Build a store: sources to tokens to shards.

In: feeds (sources and the splits they fill), a tokenizer, a spec.  Out: a finished store.
Promise: same input, same bytes, killed and resumed or not; the store appears whole or not at all;
every document and token read is in one bucket of the ledger; memory does not grow with input.
Not here: reading formats (sources), ids (tokenizer), bytes of the store (shards), the run (run.py).

What a build would do: its plan and what it takes. Nothing is written.

In: the arguments of `build_store`.  Out: a `BuildPlan`.
Promise: reads a grain of each source and encodes some kilobytes of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from shardmill.building.append import GoingOn, find_more, nothing_new, old_store
from shardmill.building.assembly import DocumentPlaces
from shardmill.building.encode import EngineDesk, TokenRules, token_rules, unit_portions
from shardmill.building.progress import FeedEstimate, estimate_feed
from shardmill.building.run import BuildJob, run_build
from shardmill.building.scheduler import Manner, RunOn, open_manner
from shardmill.building.segments import Portion, SegmentSize, SourceCounts
from shardmill.building.spec import BuildReport, BuildSpec, Feed, Progress, check_feeds, plan_json
from shardmill.building.units import Unit, cut_feed, unit_ranges
from shardmill.building.worker import TextTask
from shardmill.building.workplace import target_of
from shardmill.protocols import Source, Tokenizer
from shardmill.records import Cursor
from shardmill.sources import limited
from shardmill.tokenizers import EngineCheck, EngineChoice


def build_store(
    feeds: Sequence[Feed],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    engine: EngineChoice = "auto",
    engine_check: EngineCheck = "sample",
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    unit_bytes: int | None = None,
    memory: int | None = None,
    run_on: RunOn = "local",
    ray_address: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    append: bool = False,
) -> BuildReport:
    """Tokenise the feeds into a store at `folder`.

    `resume` goes on where an equal build stopped (and returns at once when it had finished);
    without it a build starts from the beginning. `overwrite` replaces a finished store, in the
    moment the new one is whole. `workers` processes share the work in units of about `unit_bytes`
    of input (None: a process for each core, when there are units enough), and use `memory` bytes
    together (None: what is free). With `run_on="ray"` they are workers on the Ray at `ray_address`
    (None: one is started here), as many as it has CPUs. None of these changes a byte of the store.

    `append` goes on with a finished store of the same options: the one feed names its old files,
    unchanged, and new ones, which are written behind the old tokens. The store is that of a build
    of all files in this order; without new files it stays as it is. `overwrite` then means only
    that the work of an append that was stopped is discarded.
    """
    target, going_on = target_of(folder), None
    check_feeds(feeds)
    with open_manner(
        workers=workers,
        unit_bytes=unit_bytes,
        memory=memory,
        run_on=run_on,
        ray_address=ray_address,
    ) as manner:
        feeds = limited_feeds(feeds, manner.memory_plan().most_document(tokenizer))
        if append and (old := old_store(target)) is not None:
            more = find_more(old, feeds, spec=spec, tokenizer=tokenizer)
            if more.going_on is None:
                return nothing_new(old, more.plan)
            more.going_on.check_engine(engine)
            feeds, going_on = [more.feed], more.going_on
        job = _job(feeds, target, tokenizer, spec, manner, on_progress)
        return run_build(
            job if going_on is None else _behind(job, feeds, going_on),
            engine=engine,
            engine_check=engine_check,
            resume=resume,
            overwrite=overwrite,
            manner=manner,
        )


def _job(
    feeds: Sequence[Feed],
    target: Path,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    manner: Manner,
    on_progress: Callable[[Progress], None] | None,
) -> BuildJob:
    """A build of all that the feeds give."""
    splits, rules = check_feeds(feeds), token_rules(spec, tokenizer)
    most_document = manner.memory_plan().most_document(tokenizer)
    limits = [most_tokens(feed) for feed in feeds]

    def make_task(unit: Unit, place: Path) -> TextTask:
        most, size = limits[unit.key.feed], SegmentSize.usual()
        return TextTask(
            unit=unit,
            folder=place,
            rules=rules,
            most=most,
            most_document=most_document,
            size=size,
        )

    return BuildJob(
        target=target,
        sources=[feed.source for feed in feeds],
        splits=splits,
        rules=rules,
        tokenizer=tokenizer,
        spec=spec,
        plan=plan_json(feeds, spec, tokenizer, rules.dtype),
        limits=limits,
        cut=lambda: [cut_feed(feed.source) for feed in feeds],
        make_portions=_portions_by(rules, most_document),
        make_task=make_task,
        open_places=lambda out: DocumentPlaces(feeds, out),
        feeds=feeds,
        on_progress=on_progress,
    )


def _behind(job: BuildJob, feeds: Sequence[Feed], going_on: GoingOn) -> BuildJob:
    """The same build, of which a part stands already."""
    return replace(
        job,
        cut=lambda: [going_on.feed],
        open_places=lambda out: DocumentPlaces(feeds, out, going_on.filled),
        going_on=going_on,
    )


def limited_feeds(feeds: Sequence[Feed], most_document: int) -> list[Feed]:
    """The same feeds, whose sources do not read what would not fit."""
    return [replace(feed, source=limited(feed.source, most_document)) for feed in feeds]


def most_tokens(feed: Feed) -> int | None:
    """Tokens that fill all splits of a feed; None when it never gets full."""
    limits = [limit for _, limit in feed.fill]
    return None if None in limits else sum(limit for limit in limits if limit is not None)


def _portions_by(
    rules: TokenRules, most_document: int
) -> Callable[
    [Unit, Cursor | None, int, EngineDesk], Generator[tuple[Portion, SourceCounts], None, None]
]:
    def portions(
        unit: Unit, cursor: Cursor | None, given: int, desk: EngineDesk
    ) -> Generator[tuple[Portion, SourceCounts], None, None]:
        return unit_portions(
            cast(Sequence[Source], unit.grains),
            source=unit.source,
            cursor=cursor,
            given=given,
            desk=desk,
            rules=rules,
            most_document=most_document,
        )

    return portions


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """A build that has not been started."""

    feeds: tuple[FeedEstimate, ...]
    workers: int  # processes at most; 1: no other process
    memory_bytes: int  # of all processes together, when no document is large
    most_document: int  # bytes of text: a larger document is refused
    free_bytes: int  # on the disk of the store, now

    @property
    def disk_bytes(self) -> int | None:
        """Needed at the peak; None when a source does not tell its size."""
        known = [feed.disk_bytes for feed in self.feeds if feed.disk_bytes is not None]
        return sum(known) if len(known) == len(self.feeds) else None


def plan_store(
    feeds: Sequence[Feed],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    workers: int | None = None,
    unit_bytes: int | None = None,
    memory: int | None = None,
    ray_address: str | None = None,
) -> BuildPlan:
    """What `build_store` would do with these arguments; an address: on that Ray."""
    check_feeds(feeds)
    rules = token_rules(spec, tokenizer)
    with open_manner(
        workers=workers,
        unit_bytes=unit_bytes,
        memory=memory,
        run_on="local" if ray_address is None else "ray",
        ray_address=ray_address,
    ) as manner:
        fits, unit_bytes = manner.memory_plan(), manner.size_of_units()
    estimates = []
    most_document = fits.most_document(tokenizer)
    for feed in limited_feeds(feeds, most_document):
        grains = cut_feed(feed.source)
        ranges = list(unit_ranges(grains.sizes, unit_bytes, {}))
        most = most_tokens(feed)
        estimates.append(estimate_feed(grains, tokenizer, rules, num_units=len(ranges), most=most))
    return BuildPlan(
        feeds=tuple(estimates),
        workers=fits.workers,
        memory_bytes=fits.total_bytes,
        most_document=most_document,
        free_bytes=shutil.disk_usage(_standing(target_of(folder))).free,
    )


def _standing(folder: Path) -> Path:
    """The nearest folder above that exists."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())
