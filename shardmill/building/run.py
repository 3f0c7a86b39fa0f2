"""Run a build: workplace, journal, staged store, publication.

`build_store` builds documents; `run_build` builds whatever a `BuildJob` describes.

Same job and same input give the same bytes, with any number of workers, killed and resumed or not.
The store appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

import msgspec

from shardmill.building.append import plan_append
from shardmill.building.assembly import AppendPlan, Assembly, OriginLog
from shardmill.building.plan import (
    RECORDED,
    BuildSpec,
    Feed,
    FeedChunks,
    check_feeds,
    cut_feed,
    plan_json,
    plan_sha256,
    plan_work,
)
from shardmill.building.resources import (
    Resources,
    WorkerKeywords,
    check_space,
    limited_feeds,
    open_resources,
)
from shardmill.building.scheduler import BuildCost, FeedProgress, OnProgress, Scheduler, WorkerPool
from shardmill.building.worker import ChunkEncoder, EncoderChoice, TokenRules, UnitEncoder
from shardmill.building.workplace import (
    Workplace,
    has_unfinished_build,
    open_workplace,
    remove_workplace,
    target_of,
)
from shardmill.errors import BuildError, EngineMismatchError, SourceError, StoreExistsError
from shardmill.protocols import ConversationSource, Source, Tokenizer
from shardmill.records import JSON
from shardmill.sources import stamp_of
from shardmill.sources.source import knows_rows
from shardmill.storage.files import describe_difference
from shardmill.store import (
    Ledger,
    Manifest,
    StoreFacts,
    StoreWriter,
    check_target,
    is_finished,
    publish_folder,
    read_manifest,
)
from shardmill.store.layout import check_shape
from shardmill.store.plans import write_origins
from shardmill.store.writer import meta_sha256
from shardmill.tokenizers import EngineCheck, EngineChoice, model_sha256_of, vocab_size_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """One build of documents or of conversations."""

    target: Path
    sources: Sequence[Source | ConversationSource]
    feeds: Sequence[Feed] = ()  # of documents; none for conversations, which have one source
    splits: tuple[str, ...]
    encoder: UnitEncoder
    tokenizer: Tokenizer
    spec: BuildSpec
    plan: dict[str, JSON]  # everything that determines the bytes
    options: Mapping[str, JSON] = field(default_factory=dict)  # for the manifest
    produced_by: Mapping[str, JSON] = field(default_factory=dict)  # for the manifest
    append: AppendPlan | None = None  # the store at the target is kept and extended
    on_progress: OnProgress | None = None
    engine: EngineChoice = "auto"
    engine_check: EngineCheck = "sample"
    resume: bool = False
    overwrite: bool = False

    @property
    def is_chat(self) -> bool:
        return not self.feeds

    def cut(self) -> Sequence[FeedChunks]:
        """The chunks of each feed."""
        if self.append is not None and self.append.chunks is not None:
            return [self.append.chunks]
        if not self.is_chat:
            return [cut_feed(feed) for feed in self.feeds]
        (source,) = self.sources
        fill = tuple((split, None) for split in self.splits)
        return [
            FeedChunks(source=source, chunks=(source,), sizes=(0,), is_portable=False, fill=fill)
        ]

    def stamps(self) -> list[JSON]:
        """What identifies the input as it is on this machine now."""
        return [stamp_of(source) for source in self.sources]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """A finished build. Times are here and never in the store."""

    folder: Path
    manifest: Manifest
    seconds: float
    resumed: bool  # True when work of an earlier run was used
    cost: BuildCost | None = None  # None: not measured, or nothing was left to do
    url: str | None = None  # where the store was sent, without secrets; `folder` is then scratch
    sent_files: int = 0
    sent_bytes: int = 0

    @property
    def utilisation(self) -> float | None:
        """The share of all cores' time that the build used."""
        if self.cost is None or not self.seconds:
            return None
        return self.cost.cpu_seconds / (self.seconds * self.cost.num_cores)

    def to_json(self) -> dict[str, Any]:
        """What a store never holds (when, where, how long), and the counts."""
        ledger, cost = self.manifest.ledger, self.cost
        facts: dict[str, Any] = {
            "store": self.url or str(self.folder),
            "seconds": round(self.seconds, 3),
            "resumed": self.resumed,
            "workers": cost.num_workers if cost else None,
            "cores": cost.num_cores if cost else None,
            "cpu_seconds": round(cost.cpu_seconds, 3) if cost else None,
            "utilisation": None if self.utilisation is None else round(self.utilisation, 3),
            "peak_bytes": cost.peak_bytes if cost else None,
            "ledger": msgspec.to_builtins(ledger),
            "machine": platform.platform(),
            "python": platform.python_version(),
        }
        if ledger.chat is None:
            facts |= {
                "documents_kept": ledger.documents.kept,
                "documents_read": ledger.documents.read,
                "tokens_kept": ledger.tokens.kept,
            }
        else:
            splits = self.manifest.splits.items()
            facts |= {
                "conversations_read": ledger.documents.read,
                "conversations_kept": ledger.documents.kept,
                "dropped": ledger.documents.dropped,
                "turns": ledger.chat.turns,
                "tokens_kept": ledger.tokens.kept,
                "trained_tokens": ledger.chat.trained_tokens,
                "splits": {name: split.documents for name, split in splits},
            }
        facts["produced_by"] = self.manifest.produced_by
        if self.url is not None:
            facts |= {"sent_files": self.sent_files, "sent_bytes": self.sent_bytes}
        return facts


class RunKeywords(TypedDict, total=False):
    """How a build is run. No byte of the store depends on it."""

    engine: EngineChoice  # "auto" unless given: a fast engine if it is proved equal
    engine_check: EngineCheck  # how much a fast engine is compared: "sample" unless given
    resume: bool  # continue where an equal build stopped; returns at once if it had finished
    overwrite: bool  # replace a finished store, in the moment the new one is whole


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
    with open_resources(**dividing) as resources:
        max_document = resources.max_document(tokenizer)
        feeds = limited_feeds(feeds, max_document)
        if append and not is_finished(target):
            log.info("%s: no store here yet: all of it is built", target)
        elif append:
            engine = run.get("engine", "auto")
            appending = plan_append(target, feeds, spec=spec, tokenizer=tokenizer, engine=engine)
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
            **run,
        )
        return run_build(job, resources)


def run_build(job: BuildJob, resources: Resources) -> BuildReport:
    """Build the store of a job."""
    started = time.monotonic()
    target, append = job.target, job.append
    check_shape(job.splits, job.encoder.rules.dtype, job.spec.shard_bytes)
    done = _finished(job) if append or (job.resume and not job.overwrite) else None
    if done is not None:
        remove_workplace(target, job.plan)
        return BuildReport(folder=target, manifest=done, seconds=0.0, resumed=append is None)
    overwrite = job.overwrite or append is not None
    check_target(target, overwrite=overwrite)
    stamps = job.stamps()
    plan = job.plan if append is None else {**job.plan, "continues": append.sha256}
    with open_workplace(target, plan, stamps=stamps, resume=job.resume) as work:
        _check_base(job)
        sizes = [source.size_hint() for source in job.sources]
        choice = EncoderChoice(
            work,
            job.tokenizer,
            engine=job.engine,
            check=job.engine_check,
            size_hint=None if None in sizes else sum(size or 0 for size in sizes),
            required=None if append is None else append.old.manifest.produced_by,
        )
        with WorkerPool(choice, resources, keep_open=work.lock) as pool:
            feeds = job.cut()
            if not job.is_chat:
                check_space(work.folder, feeds, job.tokenizer, job.encoder.rules)
            try:
                staged = _assemble(job, work, pool, feeds, stamps)
            except EngineMismatchError as mismatch:
                choice.drop(mismatch)
                staged = _assemble(job, work, pool, feeds, stamps)
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


def _assemble(
    job: BuildJob,
    work: Workplace,
    pool: WorkerPool,
    feeds: Sequence[FeedChunks],
    stamps: list[JSON],
) -> Path:
    """A finished store in the workplace, from the segments in the journal and new ones."""
    append, rules, staged = job.append, job.encoder.rules, work.staging()
    plan = plan_work(work, feeds, stamps=stamps, unit_bytes=pool.resources.unit_bytes)
    with StoreWriter(
        staged,
        splits=job.splits,
        dtype=rules.dtype,
        shard_bytes=job.spec.shard_bytes,
        chat=job.is_chat,
    ) as out:
        if append is not None:
            out.take_over(append.old, hold_drops=len(append.held))
        origins = _origin_log(job, feeds)
        assembly = Assembly(feeds, job.splits, out, append, origins)
        Scheduler(
            plan=plan,
            pool=pool,
            encoder=job.encoder,
            assembly=assembly,
            progress=[
                FeedProgress(number, feed, job.on_progress) for number, feed in enumerate(feeds)
            ],
            journal=work.segments,
        ).run()
        has_ends = rules.end_id is not None
        facts = store_facts(
            job.spec,
            job.tokenizer,
            sources=[source.describe() for source in job.sources],
            ledger=assembly.counter.ledger(separators=has_ends, chat=job.is_chat),
            produced_by={**pool.choice.produced_by(), **job.produced_by},
            options={"plan_sha256": plan_sha256(job.plan), **job.options},
            unit="example" if job.is_chat else "document",
        )
        manifest = out.finish(facts)
        _check_dropped(staged, manifest)
        if origins is not None:
            write_origins(staged, origins.finish(), manifest)
    return staged


def _origin_log(job: BuildJob, feeds: Sequence[FeedChunks]) -> OriginLog | None:
    """None where no row has a number: for conversations, and sources that are not files."""
    if not any(knows_rows(feed.source) for feed in job.feeds):
        return None
    if job.append is None:
        return OriginLog(feeds, job.splits)
    rows = job.append.origins
    return None if rows is None else OriginLog(feeds, job.splits, rows, job.append.whole)


def store_facts(
    spec: BuildSpec,
    tokenizer: Tokenizer,
    *,
    sources: list[dict[str, JSON]],
    ledger: Ledger,
    produced_by: dict[str, JSON],
    options: dict[str, JSON],
    unit: Literal["document", "example"],
) -> StoreFacts:
    """What the manifest says besides the files."""
    recorded: dict[str, Any] = {name: getattr(spec, name) for name in RECORDED}
    return StoreFacts(
        **recorded,
        unit=unit,
        tokenizer_sha256=model_sha256_of(tokenizer) or tokenizer.fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=vocab_size_of(tokenizer),
        special_token_ids=tokenizer.special_token_ids(),
        sources=sources,
        options={**spec.options, **options},
        ledger=ledger,
        produced_by=produced_by,
    )


def _finished(job: BuildJob) -> Manifest | None:
    """The manifest of the store at the target if nothing is left to do; None: build it."""
    if job.append is None:
        return _same_store(job) if is_finished(job.target) else None
    if job.append.chunks is not None:
        return None
    log.info("%s: no new files, so nothing to do", job.target)
    return job.append.old.manifest


def _check_base(job: BuildJob) -> None:
    """The store that is appended to must still be the same."""
    if job.append is not None and meta_sha256(job.append.old.folder) != job.append.sha256:
        raise BuildError(
            f"{job.target}: holds another store than when this build began; start again"
        )


def _check_unchanged(job: BuildJob, stamps: list[JSON]) -> None:
    """The last look at the input before the store appears."""
    for source, before, now in zip(job.sources, stamps, job.stamps(), strict=True):
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


def _same_store(job: BuildJob) -> Manifest:
    """The manifest of the finished store, which must be of this job."""
    target, manifest = job.target, read_manifest(job.target)
    if manifest.options.get("plan_sha256") == plan_sha256(job.plan):
        return manifest
    now = json.loads(json.dumps([source.describe() for source in job.sources]))
    changes = describe_difference(cast(JSON, manifest.sources), now)
    shown = f" (before -> now: {'; '.join(changes[:4])})" if changes else ""
    advice = "so there is nothing to resume: build elsewhere, or replace it with {overwrite}"
    if has_unfinished_build(target):
        advice = (
            "and an unfinished build beside it: if that was to replace the store, continue with "
            "{resume} and {overwrite}"
        )
    raise StoreExistsError(
        f"{target}: holds a finished store of other input or options{shown}, {advice}",
        resume=True,
        overwrite=True,
    )
