"""Build a store: sources to tokens to shards.

In: feeds (sources and the splits they fill), a tokenizer, a spec.  Out: a finished store.
Promise: same input, same bytes, killed and resumed or not; the store appears whole or not at all;
every document and token read is in one bucket of the ledger; memory does not grow with input.
Not here: reading formats (sources), ids (tokenizer), bytes of the store (shards).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from shardmill.build.commit import Committer
from shardmill.build.engine import EngineDesk
from shardmill.build.segments import load_segment, read_receipts
from shardmill.build.spec import (
    BuildReport,
    BuildSpec,
    Feed,
    Progress,
    check_feeds,
    plan_json,
    plan_sha256,
    store_facts,
)
from shardmill.build.tokenise import TokenRules, fill_journal, token_rules
from shardmill.build.workplace import (
    Workplace,
    has_unfinished_build,
    open_workplace,
    remove_workplace,
)
from shardmill.errors import EngineMismatchError, StoreExistsError
from shardmill.protocols import Tokenizer
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
    on_progress: Callable[[Progress], None] | None = None,
) -> BuildReport:
    """Tokenise the feeds into a store at `folder`.

    `resume` goes on where an equal build stopped (and returns at once when it had finished);
    without it a build starts from the beginning. `overwrite` replaces a finished store, in the
    moment the new one is whole.
    """
    started = time.monotonic()
    target = Path(folder).resolve()
    tell = on_progress or (lambda _: None)
    splits = check_feeds(feeds)
    rules = token_rules(spec, tokenizer)
    check_shape(splits, rules.dtype, spec.shard_bytes)
    plan = plan_json(feeds, spec, tokenizer, rules.dtype)
    if resume and is_finished(target) and not overwrite:
        manifest = _same_store(target, plan)
        remove_workplace(target, plan)
        return BuildReport(folder=target, manifest=manifest, seconds=0.0, resumed=True)
    check_target(target, overwrite=overwrite)
    stamps = [stamp_of(feed.source) for feed in feeds]
    with open_workplace(target, plan, stamps=stamps, resume=resume) as work:
        desk = EngineDesk(
            work, tokenizer, engine=engine, check=engine_check, size_hint=_size_hint(feeds)
        )

        stage = partial(_stage, feeds, work, desk=desk, rules=rules, tokenizer=tokenizer, spec=spec)
        try:
            staged = stage(on_progress=tell)
        except EngineMismatchError as mismatch:
            desk.drop(mismatch)
            work.discard_segments()
            staged = stage(on_progress=tell)
        publish_folder(staged, target, overwrite=overwrite)
        resumed = work.resumed
    return BuildReport(
        folder=target,
        manifest=read_manifest(target),
        seconds=time.monotonic() - started,
        resumed=resumed,
    )


def _stage(
    feeds: Sequence[Feed],
    work: Workplace,
    *,
    desk: EngineDesk,
    rules: TokenRules,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    on_progress: Callable[[Progress], None],
) -> Path:
    """A finished store in the workplace: from the segments that are there, then from new ones."""
    staged = work.staging()
    done = read_receipts(work.segments, rules.dtype)
    with StoreWriter(
        staged, splits=check_feeds(feeds), dtype=rules.dtype, shard_bytes=spec.shard_bytes
    ) as out:
        committer = Committer(feeds, out)
        for receipt in done:
            segment = load_segment(work.segments, receipt, rules.dtype)
            committer.add(receipt.feed, segment.documents, segment.drops)
            committer.seal(receipt)
        fill_journal(
            feeds,
            work.segments,
            done,
            desk=desk,
            rules=rules,
            committer=committer,
            on_progress=on_progress,
        )
        facts = store_facts(
            spec,
            tokenizer,
            sources=[feed.source.describe() for feed in feeds],
            ledger=committer.ledger(separators=rules.end_id is not None),
            produced_by=desk.produced_by(),
            options={"plan_sha256": plan_sha256(work.plan)},
        )
        out.finish(facts)
    return staged


def _size_hint(feeds: Sequence[Feed]) -> int | None:
    hints = [feed.source.size_hint() for feed in feeds]
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
