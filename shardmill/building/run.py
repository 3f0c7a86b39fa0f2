"""Run a build: workplace, journal, staged store, publication. The same for texts and chats.

In: a job.  Out: a finished store at its target.
Promise: same job and same input, same bytes, with any number of workers, killed and resumed or not;
the store appears whole or not at all; a fast engine that is caught out is replaced and its work
done again.
Not here: what differs between kinds of builds (store.py, chats.py), how units get there (stage.py).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from shardmill.building import units as grains
from shardmill.building.append import GoingOn
from shardmill.building.assembly import Committer, Destination, Stage, in_groups
from shardmill.building.encode import EngineDesk, TokenRules
from shardmill.building.origins import OriginLog
from shardmill.building.progress import (
    Goal,
    OnProgress,
    ProgressMeter,
    check_space,
    estimate_feed,
    is_surely_enough,
)
from shardmill.building.scheduler import Hands, Manner, WorkPlan, plan_work
from shardmill.building.segments import Portion, SourceCounts
from shardmill.building.spec import (
    BuildReport,
    BuildSpec,
    Feed,
    describe_difference,
    plan_sha256,
    store_facts,
)
from shardmill.building.units import FeedGrains, Unit
from shardmill.building.worker import TextTask
from shardmill.building.workplace import (
    Workplace,
    has_unfinished_build,
    open_workplace,
    remove_workplace,
)
from shardmill.errors import BuildError, EngineMismatchError, SourceError, StoreExistsError
from shardmill.protocols import ConversationSource, Source, Tokenizer
from shardmill.records import JSON, Cursor
from shardmill.sources import knows_rows, stamp_of
from shardmill.store import (
    Manifest,
    StoreFacts,
    StoreWriter,
    check_shape,
    check_target,
    is_finished,
    publish_folder,
    read_manifest,
    write_origins,
)
from shardmill.tokenizers import EngineCheck, EngineChoice

_JOURNAL = 2
"""Counts up when segments are written otherwise, so that none of before is read."""

UnitPortions = Callable[
    [Unit, "Cursor | None", int, EngineDesk], Generator[tuple[Portion, SourceCounts], None, None]
]
"""(unit, where to go on, texts of the feed before that, engines) -> its portions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildJob:
    """One build, and the functions in which texts and chats differ."""

    target: Path
    sources: Sequence[Source | ConversationSource]
    splits: tuple[str, ...]
    rules: TokenRules
    tokenizer: Tokenizer
    spec: BuildSpec
    plan: dict[str, JSON]  # everything that determines the bytes
    chat: bool = False
    options: Mapping[str, JSON] = field(default_factory=dict)  # for the manifest
    produced_by: Mapping[str, JSON] = field(default_factory=dict)
    limits: Sequence[int | None]  # most tokens of each feed; None: all
    cut: Callable[[], Sequence[FeedGrains]]
    make_portions: UnitPortions
    make_task: Callable[[Unit, Path], TextTask] | None = None  # None: all in this process
    open_places: Callable[[StoreWriter], Destination]
    feeds: Sequence[Feed] = ()  # of documents, whose origins are kept; none of conversations
    on_progress: OnProgress | None = None
    going_on: GoingOn | None = None  # the store at the target is kept, and this written behind it

    @property
    def work_plan(self) -> dict[str, JSON]:
        """What a resume must find unchanged: the plan, and what it goes on from."""
        if self.going_on is None:
            return self.plan
        return {**self.plan, "continues": self.going_on.old.sha256}


def run_build(
    job: BuildJob,
    *,
    engine: EngineChoice,
    engine_check: EngineCheck,
    resume: bool,
    overwrite: bool,
    manner: Manner | None = None,
) -> BuildReport:
    """`resume` and `overwrite` as in `build_store`."""
    started = time.monotonic()
    target = job.target
    check_shape(job.splits, job.rules.dtype, job.spec.shard_bytes)
    going_on = job.going_on
    if resume and is_finished(target) and not overwrite and going_on is None:
        manifest = _same_store(target, job)
        remove_workplace(target, job.plan)
        return BuildReport(folder=target, manifest=manifest, seconds=0.0, resumed=True)
    overwrite = overwrite or going_on is not None
    check_target(target, overwrite=overwrite)
    stamps = _stamps(job)
    with open_workplace(target, job.work_plan, stamps=stamps, resume=resume) as work:
        _check_base(job)
        desk = EngineDesk(
            work,
            job.tokenizer,
            engine=engine,
            check=engine_check,
            size_hint=_size_hint(job),
            goes_on=None if going_on is None else going_on.old.manifest.produced_by,
        )
        manner = manner or Manner()
        with Hands(job.tokenizer, engine_check, manner, keep_open=work.lock) as hands:
            site = _Site(job, work, desk, hands, feeds=job.cut(), stamps=stamps)
            site.check_space()
            try:
                staged = site.stage()
            except EngineMismatchError as mismatch:
                desk.drop(mismatch)
                work.discard_segments()
                staged = site.stage()
        _check_unchanged(job, stamps)
        _check_base(job)
        publish_folder(staged, target, overwrite=overwrite)
        resumed = work.resumed
    return BuildReport(
        folder=target,
        manifest=read_manifest(target),
        seconds=time.monotonic() - started,
        resumed=resumed,
        cost=hands.cost(),
    )


@dataclass(frozen=True, slots=True)
class _Site:
    """All that a build has at hand once its workplace is open."""

    job: BuildJob
    work: Workplace
    desk: EngineDesk
    hands: Hands
    feeds: Sequence[FeedGrains]
    stamps: list[JSON]

    def check_space(self) -> None:
        """Refuse what the disk cannot hold, before the first segment."""
        job, folder = self.job, self.work.folder
        if job.make_task is None or is_surely_enough(folder, self.feeds):
            return
        estimates = [
            estimate_feed(feed, job.tokenizer, job.rules, num_units=0, most=most)
            for feed, most in zip(self.feeds, job.limits, strict=True)
        ]
        there = sum(path.stat().st_size for path in self.work.segments.rglob("*"))
        check_space(folder, self.feeds, estimates, there=there)

    def stage(self) -> Path:
        """A finished store in the workplace: from the segments that are there, then new ones."""
        job, work = self.job, self.work
        staged = work.staging()
        plan = plan_work(
            work.segments,
            self.feeds,
            plan=_journal_plan(work, self.stamps),
            unit_bytes=self.hands.manner.size_of_units(),
        )
        with StoreWriter(
            staged,
            splits=job.splits,
            dtype=job.rules.dtype,
            shard_bytes=job.spec.shard_bytes,
            chat=job.chat,
        ) as out:
            names = [source.name for source in job.sources]
            standing = None
            if job.going_on is not None:
                standing = job.going_on.standing
                out.take_over(job.going_on.old, hold_drops=len(standing.held))
            origins = self._origins()
            committer = Committer(names, out, job.open_places(out), standing, origins)
            self._fill(plan, committer)
            manifest = out.finish(self._facts(committer))
            _check_dropped(staged, manifest)
            if origins is not None:
                write_origins(staged, origins.finish(job.feeds), manifest)
        return staged

    def _origins(self) -> OriginLog | None:
        """None where no row could be told: of conversations, and of sources that are no files."""
        job = self.job
        if not any(knows_rows(feed.source) for feed in job.feeds):
            return None
        if job.going_on is None:
            return OriginLog(self.feeds, job.splits)
        before = job.going_on.origins
        return None if before is None else OriginLog(self.feeds, job.splits, before)

    def _fill(self, plan: WorkPlan, committer: Committer) -> None:
        job, meter = self.job, _meter(self.job, self.feeds, plan)
        stage = Stage(
            self.work.segments,
            committer,
            meter,
            dtype=job.rules.dtype,
            make_portions=self._portions,
        )
        alone = [
            limit is not None or not feed.can_travel
            for limit, feed in zip(job.limits, self.feeds, strict=True)
        ]
        for units in in_groups(plan.units, alone):
            tasks = _tasks(job, self.work, plan, units)
            with self.hands.crew(tasks, self.desk, plan, meter) as crew:
                stage.fill(units, plan.begun, crew)
        self.desk.settle()

    def _portions(
        self, unit: Unit, cursor: Cursor | None, given: int
    ) -> Generator[tuple[Portion, SourceCounts], None, None]:
        return self.job.make_portions(unit, cursor, given, self.desk)

    def _facts(self, committer: Committer) -> StoreFacts:
        job = self.job
        separators = job.rules.end_id is not None
        return store_facts(
            job.spec,
            job.tokenizer,
            sources=[source.describe() for source in job.sources],
            ledger=committer.books.ledger(separators=separators, chat=job.chat),
            produced_by={**self.desk.produced_by(), **job.produced_by},
            options={"plan_sha256": plan_sha256(job.plan), **job.options},
            unit="example" if job.chat else "document",
        )


def _tasks(job: BuildJob, work: Workplace, plan: WorkPlan, units: Sequence[Unit]) -> list[TextTask]:
    """The units that other processes can do, and that are not done."""
    if job.make_task is None:
        return []
    return [
        job.make_task(unit, work.segments / unit.key.folder)
        for unit in units
        if unit.can_travel and not plan.is_done(unit) and job.limits[unit.key.feed] != 0
    ]


def _meter(job: BuildJob, feeds: Sequence[FeedGrains], plan: WorkPlan) -> ProgressMeter:
    """A meter that stands where the journal ends."""
    goals = [
        Goal(
            source=feed.source.name,
            num_bytes=feed.source.size_hint(),
            most=most,
            sizes=feed.sizes,
        )
        for feed, most in zip(feeds, job.limits, strict=True)
    ]
    meter = ProgressMeter(goals, job.on_progress)
    for receipts in plan.begun.values():
        for receipt in receipts:
            meter.count_receipt(receipt)
    return meter


def _stamps(job: BuildJob) -> list[JSON]:
    return [stamp_of(source) for source in job.sources]


def _check_base(job: BuildJob) -> None:
    """Nobody replaced the store that this build goes on from."""
    if job.going_on is not None and not job.going_on.old.is_still_there():
        raise BuildError(
            f"{job.target}: another store than when this build began stands here; start again"
        )


def _check_unchanged(job: BuildJob, stamps: list[JSON]) -> None:
    """The last look at the input before the store appears."""
    for source, before, now in zip(job.sources, stamps, _stamps(job), strict=True):
        if before != now:
            raise SourceError(
                f"source {source.name!r} changed while the store was built from it: wait for its "
                "writer, then start again with overwrite=True"
            )


def _check_dropped(staged: Path, manifest: Manifest) -> None:
    """The one file of a store whose size its manifest does not tell to whoever opens it."""
    if manifest.dropped is None:
        return
    path = staged / manifest.dropped.file
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != manifest.dropped.sha256:
        raise BuildError(
            f"{path}: the disk keeps something else than was written; nothing was published: look "
            "at the disk, and go on with resume=True"
        )


def _journal_plan(work: Workplace, stamps: list[JSON]) -> str:
    """What every receipt of this build must have been made for."""
    kind = {"grain_bytes": grains.GRAIN_BYTES, "journal": _JOURNAL}
    return plan_sha256({"plan": work.plan, "stamps": stamps, **kind})


def _size_hint(job: BuildJob) -> int | None:
    hints = [source.size_hint() for source in job.sources]
    return None if None in hints else sum(hint for hint in hints if hint is not None)


def _same_store(target: Path, job: BuildJob) -> Manifest:
    manifest = read_manifest(target)
    if manifest.options.get("plan_sha256") != plan_sha256(job.plan):
        now = json.loads(json.dumps([source.describe() for source in job.sources]))
        changes = describe_difference(cast(JSON, manifest.sources), now)
        told = f" (before -> now: {'; '.join(changes[:4])})" if changes else ""
        if has_unfinished_build(target):
            raise StoreExistsError(
                f"{target}: a finished store of other input or options stands here{told}, and "
                "beside it lies an unfinished build: if that was to replace it, go on with "
                "resume=True and overwrite=True"
            )
        raise StoreExistsError(
            f"{target}: a finished store of other input or options stands here{told}, so there "
            "is nothing to resume: build elsewhere, or replace it with overwrite=True"
        )
    return manifest
