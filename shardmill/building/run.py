"""Run a build: workplace, journal, staged store, publication. The same for documents and chats.

Same job and same input give the same bytes, with any number of workers, killed and resumed or not.
The store appears whole or not at all. A fast engine that makes an error is replaced by the
reference, and its work is done again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, cast

from shardmill.building import units
from shardmill.building.append import AppendPlan
from shardmill.building.assembly import Assembly, BatchWriter, OriginLog
from shardmill.building.pool import WorkerOptions, WorkerPool
from shardmill.building.resources import check_space, estimate_feed, is_surely_enough
from shardmill.building.scheduler import OnProgress, ProgressMeter, Scheduler
from shardmill.building.segments import EncodedBatch
from shardmill.building.spec import (
    BuildReport,
    BuildSpec,
    Feed,
    describe_difference,
    plan_sha256,
    store_facts,
)
from shardmill.building.units import FeedChunks, Unit, plan_work
from shardmill.building.worker import EncoderProvider, TokenRules, UnitTask
from shardmill.building.workplace import (
    Workplace,
    has_unfinished_build,
    open_workplace,
    remove_workplace,
)
from shardmill.errors import (
    BuildError,
    EngineMismatchError,
    SourceError,
    StoreExistsError,
    TokenizerError,
)
from shardmill.protocols import ConversationSource, Source, Texts, Tokenizer
from shardmill.records import JSON, Cursor
from shardmill.sources import knows_rows, stamp_of
from shardmill.store import (
    Manifest,
    StoreWriter,
    check_target,
    is_finished,
    publish_folder,
    read_manifest,
)
from shardmill.store.layout import check_shape
from shardmill.store.origins import write_origins
from shardmill.tokenizers import (
    ChosenEncoder,
    EngineCheck,
    EngineChoice,
    choose_encoder,
    reopen_encoder,
)
from shardmill.tokenizers.base import as_list

log = logging.getLogger(__name__)

_JOURNAL = 2
"""Version of the journal: raised when segments are written differently, so that older ones are
not read."""


class EncoderChoice:
    """The coordinator's `EncoderProvider`: chooses at the first batch, and remembers the choice
    and its proof in the workplace, so that a resumed build uses the same encoder."""

    has_spare_cores = True  # the coordinator encodes only when no worker does

    def __init__(
        self,
        work: Workplace,
        tokenizer: Tokenizer,
        *,
        engine: EngineChoice,
        check: EngineCheck,
        size_hint: int | None,
        required: Mapping[str, JSON] | None = None,
    ) -> None:
        """`required`: the record of the engine that made the store that is appended to; no other
        is allowed."""
        self._required = required
        self._work, self._tokenizer = work, tokenizer
        self._engine, self._check, self._size_hint = engine, check, size_hint
        self._chosen: ChosenEncoder | None = None

    def encoder(self, first: Texts) -> ChosenEncoder:
        """The encoder of this build; `first` are the first texts of the first call."""
        if self._chosen is None:
            self._chosen = self._proved(first) if self._required is None else self._reopened()
            self._remember(self._chosen.produced_by)
        return self._chosen

    def ensure_chosen(self) -> None:
        """Choose now, if nothing had to be encoded."""
        if self._work.read_note("produced_by") is None:
            self.encoder([])

    def drop(self, mismatch: EngineMismatchError) -> None:
        """The fast engine made an error: from now on, also after a resume, use the reference."""
        if self._required is not None:
            raise BuildError(
                f"{mismatch}\nThat engine made the existing tokens too: build the whole store "
                "again with {overwrite} and {engine}.",
                overwrite=True,
                engine="reference",
            ) from mismatch
        log.warning("%s\nstarting again with the reference engine", mismatch)
        self._work.remove_note("produced_by")
        note: dict[str, JSON] = {"asked_for": self._engine, "mismatch": str(mismatch)}
        self._work.write_note("dropped_engine", note)
        self._chosen = None

    def produced_by(self) -> dict[str, JSON]:
        """For the manifest: engine, versions and proof, as the first run of this build had them."""
        noted = self._work.read_note("produced_by")
        assert noted is not None, "an encoder was chosen before the journal was full"
        dropped = self._work.read_note("dropped_engine")
        return {**noted, "dropped_engine": dropped} if dropped else noted

    def _proved(self, first: Texts) -> ChosenEncoder:
        dropped = self._work.read_note("dropped_engine")
        try:
            return choose_encoder(
                self._tokenizer,
                engine="reference" if dropped else self._engine,
                check=self._check,
                corpus=as_list(first),
                size_hint=self._size_hint,
            )
        except EngineMismatchError as failed:  # no engine yet, so nothing to fall back from
            raise TokenizerError(str(failed)) from failed

    def _reopened(self) -> ChosenEncoder:
        assert self._required is not None
        try:
            return reopen_encoder(self._tokenizer, self._required, check=self._check)
        except TokenizerError as error:
            raise BuildError(
                f"the existing tokens were made by an engine that is missing now ({error}): "
                "install it, or build the whole store again with {overwrite}",
                overwrite=True,
            ) from error

    def _remember(self, produced_by: dict[str, JSON]) -> None:
        earlier = self._work.read_note("produced_by")
        if earlier is None:
            self._work.write_note("produced_by", produced_by)
            return
        for key in ("engine", "versions"):
            if earlier.get(key) != produced_by.get(key):
                raise BuildError(
                    f"the unfinished build used {key} {earlier.get(key)!r}, now it would be "
                    f"{produced_by.get(key)!r}: restore that, or start again with {{overwrite}}",
                    overwrite=True,
                )


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """One build. Subclasses say how documents and conversations differ."""

    target: Path
    sources: Sequence[Source | ConversationSource]
    splits: tuple[str, ...]
    rules: TokenRules
    tokenizer: Tokenizer
    spec: BuildSpec
    plan: dict[str, JSON]  # everything that determines the bytes
    on_progress: OnProgress | None = None
    is_chat: bool = False
    options: Mapping[str, JSON] = field(default_factory=dict)  # for the manifest
    produced_by: Mapping[str, JSON] = field(default_factory=dict)  # for the manifest
    limits: Sequence[int | None]  # most tokens of each feed; None: all
    feeds: Sequence[Feed] = ()  # of documents, whose origins are kept; none of conversations
    append: AppendPlan | None = None  # the store at the target is kept and extended

    @abstractmethod
    def cut(self) -> Sequence[FeedChunks]:
        """The chunks of each feed."""

    @abstractmethod
    def encode(
        self, unit: Unit, cursor: Cursor | None, given: int, provider: EncoderProvider
    ) -> Generator[EncodedBatch, None, None]:
        """The batches of a unit after a cursor; `given` texts of the feed come before them."""

    @abstractmethod
    def make_task(self, unit: Unit, folder: Path) -> UnitTask:
        """A unit as a task for a worker. Not called for units that are not portable."""

    @abstractmethod
    def open_writer(self, out: StoreWriter) -> BatchWriter: ...


class RunKeywords(TypedDict, total=False):
    """How a build is run. No byte of the store depends on it."""

    engine: EngineChoice  # "auto" unless given: a fast engine if it is proved equal
    engine_check: EngineCheck  # how much a fast engine is compared: "sample" unless given
    resume: bool  # continue where an equal build stopped; returns at once if it had finished
    overwrite: bool  # replace a finished store, in the moment the new one is whole


def run_build(
    job: BuildJob,
    workers: WorkerOptions | None = None,
    *,
    engine: EngineChoice = "auto",
    engine_check: EngineCheck = "sample",
    resume: bool = False,
    overwrite: bool = False,
) -> BuildReport:
    """Build the store of a job; see `RunKeywords`."""
    started = time.monotonic()
    target, append = job.target, job.append
    check_shape(job.splits, job.rules.dtype, job.spec.shard_bytes)
    if resume and is_finished(target) and not overwrite and append is None:
        manifest = _same_store(target, job)
        remove_workplace(target, job.plan)
        return BuildReport(folder=target, manifest=manifest, seconds=0.0, resumed=True)
    overwrite = overwrite or append is not None
    check_target(target, overwrite=overwrite)
    stamps = _stamps(job)
    plan = job.plan if append is None else {**job.plan, "continues": append.old.sha256}
    with open_workplace(target, plan, stamps=stamps, resume=resume) as work:
        _check_base(job)
        sizes = [source.size_hint() for source in job.sources]
        choice = EncoderChoice(
            work,
            job.tokenizer,
            engine=engine,
            check=engine_check,
            size_hint=None if None in sizes else sum(size or 0 for size in sizes),
            required=None if append is None else append.old.manifest.produced_by,
        )
        pool = WorkerPool(
            job.tokenizer, choice, engine_check, workers or WorkerOptions(), keep_open=work.lock
        )
        with pool:
            build = _Build(job, work, choice, pool, feeds=job.cut(), stamps=stamps)
            build.check_space()
            try:
                staged = build.assemble()
            except EngineMismatchError as mismatch:
                choice.drop(mismatch)
                work.discard_segments()
                staged = build.assemble()
        _check_unchanged(job, stamps)
        _check_base(job)
        publish_folder(staged, target, overwrite=overwrite)
        resumed = work.resumed
    return BuildReport(
        folder=target,
        manifest=read_manifest(target),
        seconds=time.monotonic() - started,
        resumed=resumed,
        cost=pool.cost(),
    )


@dataclass(frozen=True, slots=True)
class _Build:
    """A build whose workplace is open."""

    job: BuildJob
    work: Workplace
    choice: EncoderChoice
    pool: WorkerPool
    feeds: Sequence[FeedChunks]
    stamps: list[JSON]

    def check_space(self) -> None:
        """Refuse what the disk cannot hold, before the first segment."""
        job, folder = self.job, self.work.folder
        if job.is_chat or is_surely_enough(folder, self.feeds):
            return
        estimates = [
            estimate_feed(feed, job.tokenizer, job.rules, max_tokens=limit)
            for feed, limit in zip(self.feeds, job.limits, strict=True)
        ]
        used = sum(path.stat().st_size for path in self.work.segments.rglob("*"))
        check_space(folder, estimates, used=used)

    def assemble(self) -> Path:
        """A finished store in the workplace, from the segments in the journal and new ones."""
        job, append, staged = self.job, self.job.append, self.work.staging()
        plan = plan_work(
            self.work.segments,
            self.feeds,
            plan=_journal_plan(self.work, self.stamps),
            unit_bytes=self.pool.options.size_of_units(),
        )
        with StoreWriter(
            staged,
            splits=job.splits,
            dtype=job.rules.dtype,
            shard_bytes=job.spec.shard_bytes,
            chat=job.is_chat,
        ) as out:
            if append is not None:
                out.take_over(append.old, hold_drops=len(append.point.held))
            names, origins = [source.name for source in job.sources], self._origins()
            point = None if append is None else append.point
            assembly = Assembly(names, out, job.open_writer(out), point, origins)
            Scheduler(
                plan=plan,
                pool=self.pool,
                assembly=assembly,
                meter=ProgressMeter(self.feeds, job.limits, job.on_progress),
                journal=self.work.segments,
                dtype=job.rules.dtype,
                encode=lambda unit, cursor, given: job.encode(unit, cursor, given, self.choice),
            ).run(self.feeds, job.limits, job.make_task)
            self.choice.ensure_chosen()
            separators = job.rules.end_id is not None
            facts = store_facts(
                job.spec,
                job.tokenizer,
                sources=[source.describe() for source in job.sources],
                ledger=assembly.counter.ledger(separators=separators, chat=job.is_chat),
                produced_by={**self.choice.produced_by(), **job.produced_by},
                options={"plan_sha256": plan_sha256(job.plan), **job.options},
                unit="example" if job.is_chat else "document",
            )
            manifest = out.finish(facts)
            _check_dropped(staged, manifest)
            if origins is not None:
                write_origins(staged, origins.finish(job.feeds), manifest)
        return staged

    def _origins(self) -> OriginLog | None:
        """None where no row has a number: for conversations, and sources that are not files."""
        job = self.job
        if not any(knows_rows(feed.source) for feed in job.feeds):
            return None
        if job.append is None:
            return OriginLog(self.feeds, job.splits)
        before = job.append.origins
        return None if before is None else OriginLog(self.feeds, job.splits, before)


def _stamps(job: BuildJob) -> list[JSON]:
    return [stamp_of(source) for source in job.sources]


def _journal_plan(work: Workplace, stamps: list[JSON]) -> str:
    """What every receipt of this build must have been made for."""
    kind = {"grain_bytes": units.CHUNK_BYTES, "journal": _JOURNAL}
    return plan_sha256({"plan": work.plan, "stamps": stamps, **kind})


def _check_base(job: BuildJob) -> None:
    """The store that is appended to must still be the same."""
    if job.append is not None and not job.append.old.is_still_there():
        raise BuildError(
            f"{job.target}: holds another store than when this build began; start again"
        )


def _check_unchanged(job: BuildJob, stamps: list[JSON]) -> None:
    """The last look at the input before the store appears."""
    for source, before, now in zip(job.sources, stamps, _stamps(job), strict=True):
        if before != now:
            raise SourceError(
                f"source {source.name!r} changed while the store was built from it: wait for its "
                "writer, then start again with {overwrite}",
                overwrite=True,
            )


def _check_dropped(staged: Path, manifest: Manifest) -> None:
    """The one file of a store whose size its manifest does not have."""
    if manifest.dropped is None:
        return
    path = staged / manifest.dropped.file
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != manifest.dropped.sha256:
        raise BuildError(
            f"{path}: the disk holds something else than was written; nothing was published: check "
            "the disk, and continue with {resume}",
            resume=True,
        )


def _same_store(target: Path, job: BuildJob) -> Manifest:
    """The manifest of the finished store, which must be of this job."""
    manifest = read_manifest(target)
    if manifest.options.get("plan_sha256") == plan_sha256(job.plan):
        return manifest
    now = json.loads(json.dumps([source.describe() for source in job.sources]))
    changes = describe_difference(cast(JSON, manifest.sources), now)
    shown = f" (before -> now: {'; '.join(changes[:4])})" if changes else ""
    what = f"{target}: holds a finished store of other input or options{shown}"
    if has_unfinished_build(target):
        raise StoreExistsError(
            f"{what}, and an unfinished build beside it: if that was to replace the store, "
            "continue with {resume} and {overwrite}",
            resume=True,
            overwrite=True,
        )
    raise StoreExistsError(
        f"{what}, so there is nothing to resume: build elsewhere, or replace it with {{overwrite}}",
        overwrite=True,
    )
