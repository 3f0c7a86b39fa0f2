"""Run a build: workplace, journal, staged store, publication. The same for texts and chats.

In: a job.  Out: a finished store at its target.
Promise: same job and same input, same bytes, killed and resumed or not; the store appears whole or
not at all; a fast engine that is caught out is replaced and its work done again.
Not here: what differs between kinds of builds (store.py, chats.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardmill.build.commit import Committer, Place
from shardmill.build.engine import EngineDesk
from shardmill.build.journal import Feeder, fill_journal
from shardmill.build.segments import load_segment, read_receipts
from shardmill.build.spec import BuildReport, BuildSpec, plan_sha256, store_facts
from shardmill.build.tokenise import TokenRules
from shardmill.build.workplace import (
    Workplace,
    has_unfinished_build,
    open_workplace,
    remove_workplace,
)
from shardmill.errors import EngineMismatchError, StoreExistsError
from shardmill.protocols import ConversationSource, Source, Tokenizer
from shardmill.records import JSON
from shardmill.shards import (
    Manifest,
    StoreWriter,
    check_shape,
    check_target,
    is_finished,
    publish_folder,
    read_manifest,
)
from shardmill.sources import stamp_of
from shardmill.tokenizer import EngineCheck, EngineChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One build, and the two functions in which texts and chats differ."""

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
    open_feeders: Callable[[Path, EngineDesk], Sequence[Feeder]]  # journal's folder, engines
    open_places: Callable[[StoreWriter], Place]


def run_build(
    job: Job, *, engine: EngineChoice, engine_check: EngineCheck, resume: bool, overwrite: bool
) -> BuildReport:
    """`resume` and `overwrite` as in `build_store`."""
    started = time.monotonic()
    target = job.target
    check_shape(job.splits, job.rules.dtype, job.spec.shard_bytes)
    if resume and is_finished(target) and not overwrite:
        manifest = _same_store(target, job.plan)
        remove_workplace(target, job.plan)
        return BuildReport(folder=target, manifest=manifest, seconds=0.0, resumed=True)
    check_target(target, overwrite=overwrite)
    stamps = [stamp_of(source) for source in job.sources]
    with open_workplace(target, job.plan, stamps=stamps, resume=resume) as work:
        desk = EngineDesk(
            work, job.tokenizer, engine=engine, check=engine_check, size_hint=_size_hint(job)
        )
        try:
            staged = _stage(job, work, desk)
        except EngineMismatchError as mismatch:
            desk.drop(mismatch)
            work.discard_segments()
            staged = _stage(job, work, desk)
        publish_folder(staged, target, overwrite=overwrite)
        resumed = work.resumed
    return BuildReport(
        folder=target,
        manifest=read_manifest(target),
        seconds=time.monotonic() - started,
        resumed=resumed,
    )


def _stage(job: Job, work: Workplace, desk: EngineDesk) -> Path:
    """A finished store in the workplace: from the segments that are there, then from new ones."""
    staged, rules = work.staging(), job.rules
    done = read_receipts(work.segments, rules.dtype)
    with StoreWriter(
        staged,
        splits=job.splits,
        dtype=rules.dtype,
        shard_bytes=job.spec.shard_bytes,
        chat=job.chat,
    ) as out:
        feeders = job.open_feeders(work.segments, desk)
        committer = Committer(len(feeders), out, job.open_places(out))
        for receipt in done:
            committer.add(receipt.feed, load_segment(work.segments, receipt, rules.dtype))
            committer.seal(receipt)
        fill_journal(feeders, work.segments, done, committer)
        facts = store_facts(
            job.spec,
            job.tokenizer,
            sources=[source.describe() for source in job.sources],
            ledger=committer.ledger(separators=rules.end_id is not None, chat=job.chat),
            produced_by={**desk.produced_by(), **job.produced_by},
            options={"plan_sha256": plan_sha256(job.plan), **job.options},
            unit="example" if job.chat else "document",
        )
        out.finish(facts)
    return staged


def _size_hint(job: Job) -> int | None:
    hints = [source.size_hint() for source in job.sources]
    return None if None in hints else sum(hint for hint in hints if hint is not None)


def _same_store(target: Path, plan: dict[str, JSON]) -> Manifest:
    manifest = read_manifest(target)
    if manifest.options.get("plan_sha256") != plan_sha256(plan):
        if has_unfinished_build(target):
            raise StoreExistsError(
                f"{target}: a finished store of other input or options stands here, and beside it "
                "lies an unfinished build: if that was to replace it, go on with --resume "
                "--overwrite"
            )
        raise StoreExistsError(
            f"{target}: a finished store of other input or options stands here, so there is "
            "nothing to resume: build elsewhere, or replace it with --overwrite"
        )
    return manifest
