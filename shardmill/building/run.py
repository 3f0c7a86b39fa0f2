"""Run a build: workplace, journal, staged store, publication.

`build_store` builds documents; `run_build` builds whatever a `BuildJob` describes.

Same job and same input give the same bytes, with any number of workers, killed and resumed or not.
The store appears whole or not at all, and not if it keeps nothing or too little (`loss`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

import msgspec

from shardmill.arguments import whole_number
from shardmill.building.append import OldUnits, plan_append
from shardmill.building.finish import ExactShards, Finisher, OriginLog, exact_output
from shardmill.building.loss import MAX_LOSS, check_kept, check_max_loss
from shardmill.building.plan import (
    CHUNK_BYTES,
    RECORDED,
    BuildSpec,
    Feed,
    FeedChunks,
    check_feeds,
    cut_source,
    cut_units,
    plan_json,
    plan_sha256,
    read_units,
)
from shardmill.building.resources import (
    Resources,
    WorkerKeywords,
    check_space,
    limited_feeds,
    open_resources,
)
from shardmill.building.scheduler import (
    BuildCost,
    FeedProgress,
    FeedWork,
    OnProgress,
    Progress,
    Scheduler,
    WorkerPool,
)
from shardmill.building.segments import Segment, find_receipt, read_segment, receipt_name
from shardmill.building.splits import state_after
from shardmill.building.worker import ChunkEncoder, EncoderChoice, TokenRules, UnitEncoder
from shardmill.building.workplace import (
    FolderOutput,
    FolderWorkplace,
    StoreOutput,
    Workplace,
    open_workplace,
    workplace_at,
)
from shardmill.errors import (
    BuildError,
    EngineMismatchError,
    OptionError,
    SourceError,
    StoreExistsError,
)
from shardmill.protocols import ConversationSource, Source, Tokenizer
from shardmill.records import JSON, PreferenceKind
from shardmill.sources import stamp_of
from shardmill.sources.source import knows_rows
from shardmill.storage.files import describe_difference
from shardmill.store import (
    Ledger,
    Manifest,
    StoreFacts,
    StoreWriter,
)
from shardmill.store.layout import ITEMSIZE, MAX_COUNT, check_shape
from shardmill.store.plans import write_origins
from shardmill.store.writer import meta_sha256
from shardmill.threads import read_ahead
from shardmill.tokenizers import EngineCheck, EngineChoice, model_sha256_of, vocab_size_of

log = logging.getLogger(__name__)

_PAUSES = (0.01, 0.1, 1.0, 5.0, 30.0, 0.0)
"""Seconds to wait for a receipt that a worker has reported: a network disk may remember for up to a
minute that it was not there."""


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """One build of documents or of conversations."""

    target: Workplace
    sources: Sequence[Source | ConversationSource]
    feeds: Sequence[Feed] = ()  # of documents; none for conversations, which have one source
    splits: tuple[str, ...]
    encoder: UnitEncoder
    tokenizer: Tokenizer
    spec: BuildSpec
    plan: dict[str, JSON]  # everything that determines the bytes
    options: Mapping[str, JSON] = field(default_factory=dict)  # for the manifest
    produced_by: Mapping[str, JSON] = field(default_factory=dict)  # for the manifest
    preference: PreferenceKind | None = None  # of conversations that are prompts with answers
    append: OldUnits | None = None  # the store at the target is kept and extended
    on_progress: OnProgress | None = None
    engine: EngineChoice = "auto"
    engine_check: EngineCheck = "sample"
    resume: bool = False
    overwrite: bool = False
    max_loss: float = MAX_LOSS
    allow_empty: bool = False

    @property
    def is_chat(self) -> bool:
        return not self.feeds

    def cut(self) -> Sequence[FeedChunks]:
        """The chunks of each feed."""
        if not self.is_chat:
            return [cut_source(feed.source, feed.fill) for feed in self.feeds]
        (source,) = self.sources
        return [cut_source(source, tuple((split, None) for split in self.splits))]

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
    url: str | None = None  # where the store is, without secrets; `folder` had files at work only
    sent_files: int = 0  # to the URL, also by earlier runs; 0 if the store was there before
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
    scratch: str | Path | None  # of a store at a URL: for shards until they are sent
    max_loss: float  # the share of rows that may be lost, 0.05 unless given; see `loss`
    allow_empty: bool  # whether a store that keeps nothing may be published


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
    """Tokenise the feeds into a store at `folder`, which may be a URL.

    `append` keeps a finished store of the same options: the one feed names its old files,
    unchanged, and new ones, which are appended. The result is the store of a build of all files in
    this order; without new files it stays as it is. `overwrite` then only discards the work of an
    append that was stopped. For the other options see `RunKeywords` and `WorkerKeywords`.
    """
    run: dict[str, Any] = {**options}
    target, appending = workplace_at(folder, run.pop("scratch", None)), None
    splits = check_feeds(feeds)
    if target.url is not None:
        _refuse_for_urls(target.url, append=append, exact_shards=spec.exact_shards)
    dividing = {key: run.pop(key) for key in WorkerKeywords.__annotations__ if key in run}
    with open_resources(**dividing) as resources:
        max_document = resources.max_document(tokenizer)
        feeds = limited_feeds(feeds, max_document)
        if append and target.manifest() is None:
            log.info("%s: no store here yet: all of it is built", target)
        elif append:
            old, engine = target.folder, run.get("engine", "auto")
            appending = plan_append(old, feeds, spec=spec, tokenizer=tokenizer, engine=engine)
            feeds = [appending.feed]
        rules = TokenRules.of(spec, tokenizer)
        job = BuildJob(
            target=target,
            sources=[feed.source for feed in feeds],
            feeds=feeds,
            splits=splits,
            encoder=ChunkEncoder(
                rules=rules,
                max_document=max_document,
                by_hash=tuple(feed.by_hash for feed in feeds),
            ),
            tokenizer=tokenizer,
            spec=spec,
            plan=plan_json(feeds, spec, tokenizer, rules.dtype),
            append=appending,
            on_progress=on_progress,
            **run,
        )
        return run_build(job, resources)


def _refuse_for_urls(url: str, *, append: bool, exact_shards: bool) -> None:
    """Raise if an option was asked for that needs a whole store on a disk."""
    if append:
        raise OptionError(
            f"{{append}}: {url} is a URL; files can only be added to a local store: pull it, "
            "append to it, and push it with {replace}",
            append=True,
            replace=True,
        )
    if exact_shards:
        raise OptionError(
            f"{{exact_shards}}: {url} is a URL; shards of one size are cut on a disk: build the "
            "store in a folder, and push it",
            exact_shards=True,
        )


def run_build(job: BuildJob, resources: Resources) -> BuildReport:
    """Build the store of a job."""
    started = time.monotonic()
    target, append = job.target, job.append
    whole_number(job.spec.shard_bytes, "shard_bytes")
    check_shape(job.splits, job.encoder.rules.dtype, job.spec.shard_bytes)
    check_max_loss(job.max_loss)
    done = _finished(job)
    if done is not None:
        target.clean_up(job.plan)
        folder, resumed = target.folder, append is None
        return BuildReport(
            folder=folder, url=target.url, manifest=done, seconds=0.0, resumed=resumed
        )
    overwrite = job.overwrite or append is not None
    target.check(resume=job.resume, overwrite=overwrite)
    stamps = job.stamps()
    plan = job.plan if append is None else {**job.plan, "continues": append.sha256}
    # What every receipt of this build must have been made for.
    versions = {"chunk_bytes": CHUNK_BYTES, "receipts": 1, "exact": job.spec.exact_shards}
    unit_plan = plan_sha256({"plan": plan, "stamps": stamps, **versions})
    with open_workplace(
        target, plan, stamps=stamps, resume=job.resume, overwrite=overwrite
    ) as work:
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
            if not job.is_chat and isinstance(work, FolderWorkplace):
                check_space(work.work, feeds, job.tokenizer, job.encoder.rules)
            try:
                staged, manifest = _make(job, work, pool, feeds, unit_plan)
            except EngineMismatchError as mismatch:
                choice.drop(mismatch)
                staged, manifest = _make(job, work, pool, feeds, unit_plan)
        _check_unchanged(job, stamps)
        _check_base(job)
        check_kept(
            target,
            manifest,
            staged,
            job.sources,
            max_loss=job.max_loss,
            allow_empty=job.allow_empty,
        )
        sent_files, sent_bytes = work.publish(staged, overwrite=overwrite)
    return BuildReport(
        folder=target.folder,
        url=target.url,
        manifest=manifest,
        seconds=time.monotonic() - started,
        resumed=work.resumed,
        cost=pool.cost(),
        sent_files=sent_files,
        sent_bytes=sent_bytes,
    )


def _make(
    job: BuildJob,
    work: Workplace,
    pool: WorkerPool,
    feeds: Sequence[FeedChunks],
    plan: str,
) -> tuple[Path, Manifest]:
    """The folder of everything of the store, at a URL without its shards: what earlier runs made,
    and the rest."""
    rules, output = job.encoder.rules, work.output()

    def show(now: Progress) -> None:
        work.check_lock()  # not after hours of work
        if job.on_progress is not None:
            job.on_progress(now)

    progress = [FeedProgress(number, feed, show) for number, feed in enumerate(feeds)]
    shard_bytes, itemsize = job.spec.shard_bytes, ITEMSIZE[rules.dtype]
    exact = None
    if job.spec.exact_shards:
        assert isinstance(output, FolderOutput), "a URL is refused before"
        exact = ExactShards(output, shard_bytes=shard_bytes, itemsize=itemsize)
    with ExitStack() as stack:
        works = [
            stack.enter_context(_open_feed(job, output, feed, number, plan, progress[number]))
            for number, feed in enumerate(feeds)
        ]
        Scheduler(
            works=works,
            pool=pool,
            encoder=job.encoder,
            output=output,
            shard_tokens=shard_bytes // itemsize if exact is None else MAX_COUNT,
            progress=progress,
        ).run()
    made = output = work.output()  # with what is there now
    damaged = None
    if exact is not None:
        made, damaged = exact.output, exact.cut(_segments(job, output, works), pool)
    if damaged is None:
        finished = _finish(job, pool, made, works, exact)
        if isinstance(finished, Manifest):
            return made.store, finished
        damaged = finished
        if exact is not None:
            exact.discard()
    log.warning("%s: damaged after it was written; it is made again", damaged)
    output.remove_receipt(damaged)
    return _make(job, work, pool, feeds, plan)


def _open_feed(
    job: BuildJob,
    output: StoreOutput,
    feed: FeedChunks,
    number: int,
    plan: str,
    progress: FeedProgress,
) -> FeedWork:
    """The work on a feed, with what earlier runs have settled of it."""
    dtype = job.encoder.rules.dtype
    work = FeedWork(feed)
    shard_bytes = job.spec.shard_bytes
    units = partial(cut_units, feed, number, plan=plan, shard_bytes=shard_bytes, dtype=dtype)
    if job.append is not None:
        assert isinstance(output, FolderOutput), "a URL is refused before"
        job.append.settle(work, list(units()) if feed.is_cut else [], output)
    cursor, cut = None, units(first=work.num_settled)
    used_up = False
    if job.spec.exact_shards and isinstance(output, FolderOutput):
        used_up = exact_output(output).store.is_dir()
    itemsize = None if used_up else ITEMSIZE[dtype]
    # Shards in a folder are read to be trusted. Workers do that, when they are given their units.
    by_workers = feed.is_cut and isinstance(output, FolderOutput) and not used_up
    while not by_workers and not work.is_full:
        receipt = find_receipt(output, number, work.num_settled, itemsize=itemsize)
        if receipt is None or receipt.plan != plan:
            break
        if state_after(feed.fill, work.state, receipt) is None:
            break
        if feed.is_cut:
            unit = next(cut, None)
            if unit is None or not receipt.is_of(unit):
                break
            progress.count_unit(receipt, unit.num_bytes, by_batches=False)
        else:
            cursor = receipt.cursor
            progress.count_unit(receipt, 0, by_batches=False)
        work.receive(receipt)
    if feed.is_cut:
        work.begin(units(first=work.num_settled))
    else:
        found = read_units(feed, number, plan=plan, first=work.num_settled, cursor=cursor)
        work.begin(read_ahead(found, depth=1))
    return work


def _finish(
    job: BuildJob,
    pool: WorkerPool,
    output: StoreOutput,
    works: Sequence[FeedWork],
    exact: ExactShards | None,
) -> Manifest | str:
    """Write everything of the store but its shards; or the name of a damaged receipt."""
    feeds, rules = [work.feed for work in works], job.encoder.rules
    for path in output.store.iterdir():  # of an earlier try
        if path.is_file():
            path.unlink()
    with StoreWriter(
        output.store,
        splits=job.splits,
        dtype=rules.dtype,
        shard_bytes=job.spec.shard_bytes,
        chat=job.is_chat,
        preference=job.preference,
    ) as out:
        origins = OriginLog(feeds, job.splits) if _knows_origins(job) else None
        joined = None if exact is None else exact.adopter(out)
        finisher = Finisher(feeds, joined or out, origins)
        names: set[str] = set()
        states = (state for work in works for state in work.states[1:])
        for (name, segment), after in zip(_segments(job, output, works), states, strict=True):
            if segment is None:
                return name
            finisher.add(segment, after)
            names.update(shard.file for part in segment.splits.values() for shard in part.shards)
        names = names if joined is None else joined.finish()
        output.keep_only(names)
        facts = store_facts(
            job.spec,
            job.tokenizer,
            sources=[source.describe() for source in job.sources],
            ledger=finisher.counter.ledger(separators=rules.end_id is not None, chat=job.is_chat),
            produced_by={**pool.choice.produced_by(), **job.produced_by},
            options={"plan_sha256": plan_sha256(job.plan), **job.options},
            unit="example" if job.is_chat else "document",
        )
        manifest = out.finish(facts)
        _check_dropped(output.store, manifest)
        if origins is not None:
            # Files are added to whole units, which exact shards do not keep.
            units = finisher.units if exact is None else None
            found = origins.finish(units, job.feeds[0].by_hash)
            write_origins(output.store, found, manifest)
    return manifest


def _segments(
    job: BuildJob, output: StoreOutput, works: Sequence[FeedWork]
) -> Iterator[tuple[str, Segment | None]]:
    """Every settled unit, with the name of its receipt."""
    for number, work in enumerate(works):
        for unit in range(work.num_settled):
            yield receipt_name(number, unit), _segment(job, output, work, number, unit)


def _segment(
    job: BuildJob, output: StoreOutput, work: FeedWork, feed: int, unit: int
) -> Segment | None:
    """A settled unit, as it was settled; None: it is damaged, or a worker that was given up has
    written another version of it since."""
    if job.append is not None and unit < job.append.num_units:
        return job.append.segment(unit)
    data = None
    for pause in _PAUSES:
        data = output.read_receipt(receipt_name(feed, unit))
        if data is not None:
            break
        time.sleep(pause)
    exact = job.spec.exact_shards  # then the shards of units are used up
    itemsize = None if exact else ITEMSIZE[job.encoder.rules.dtype]
    found = None if data is None else read_segment(data, output, itemsize=itemsize)
    if found is None or found.receipt is None:
        return None
    after = state_after(work.feed.fill, work.states[unit], found.receipt)
    return found if after == work.states[unit + 1] else None


def _knows_origins(job: BuildJob) -> bool:
    """No row has a number among conversations, and in sources that are not files: of these, only
    the hash is worth recording that chose the splits."""
    rules = {feed.by_hash for feed in job.feeds}
    has_rows = any(knows_rows(feed.source) for feed in job.feeds)
    return len(rules) == 1 and (has_rows or rules != {None})


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
    target = job.target
    if job.append is not None:
        if job.append.has_new_files:
            return None
        log.info("%s: no new files, so nothing to do", target)
        return job.append.old.manifest
    # A build to a URL removes the store that it replaces first. One that is there is not replaced.
    if not job.resume or (job.overwrite and target.url is None):
        return None
    manifest = target.manifest()
    if manifest is None or manifest.options.get("plan_sha256") == plan_sha256(job.plan):
        return manifest
    if not job.overwrite:
        raise _other_store(job, manifest)
    return None


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


def _other_store(job: BuildJob, manifest: Manifest) -> StoreExistsError:
    """A finished store that is not of this job is in the way of a resume."""
    now = json.loads(json.dumps([source.describe() for source in job.sources]))
    changes = describe_difference(cast(JSON, manifest.sources), now)
    shown = f" (before -> now: {'; '.join(changes[:4])})" if changes else ""
    advice = "so there is nothing to resume: build elsewhere, or replace it with {overwrite}"
    if job.target.has_unfinished_build():
        advice = (
            "and an unfinished build beside it: if that was to replace the store, continue with "
            "{resume} and {overwrite}"
        )
    return StoreExistsError(
        f"{job.target}: holds a finished store of other input or options{shown}, {advice}",
        resume=True,
        overwrite=True,
    )
