"""The chat sources of the cache: dolly and oasst1.

The plan of a build (input, options, tokenizer) is stored with it. Resuming keeps a finished store
with an equal plan and refuses one with another plan, saying what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from niels_gpt.cache.formats import TOKEN_DTYPE
from niels_gpt.data.dolly import chats_of_rows
from niels_gpt.data.oasst1 import read_threads
from niels_gpt.data.rows import open_rows
from niels_gpt.examples import SplitRule, write_examples
from niels_gpt.messages import Message, SplitUnit
from niels_gpt.work import Run
from shardmill.building import BuildReport, BuildSpec
from shardmill.errors import StoreExistsError
from shardmill.records import JSON
from shardmill.sources import HubSource
from shardmill.storage.files import describe_difference, fingerprint_files, list_files
from shardmill.store import is_finished, read_manifest

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """Where rows come from: a local path, or a hub dataset at a commit."""

    path: Path | None
    dataset: str
    split: str
    revision: str | None  # None for a local path
    max_retries: int

    def pinned(self) -> ChatInput:
        """The same with the commit that the hub has now; a local path has none."""
        if self.path is not None:
            return replace(self, revision=None)
        hub = HubSource(
            self.dataset, split=self.split, revision=self.revision, max_retries=self.max_retries
        )
        return replace(self, revision=hub.revision)

    def rows(self) -> Iterable[dict[str, Any]]:
        return open_rows(
            self.path,
            dataset=self.dataset,
            split=self.split,
            revision=self.revision,
            max_retries=self.max_retries,
        )

    def describe(self) -> dict[str, JSON]:
        if self.path is None:
            return {"dataset": self.dataset, "split": self.split, "revision": self.revision}
        return {"files": fingerprint_files(list_files(self.path, suffixes=_SUFFIXES))}


def build_dolly(run: Run, folder: Path) -> BuildReport:
    settings = run.settings
    source = ChatInput(
        path=settings.dolly_path,
        dataset=settings.dolly_dataset,
        split="train",
        revision=settings.dolly_revision,
        max_retries=settings.hub_retries,
    ).pinned()
    plan = _plan(run, source, {})
    # Dolly has no trees, so both rules give the same bytes: a cache built with either is kept.
    rules = [str(replace(_rule(run), unit=unit)) for unit in get_args(SplitUnit)]
    kept = _finished(run, folder, plan, same_splits=rules)
    if kept is not None:
        return kept
    return _write(run, folder, chats_of_rows(source.rows()), _spec(run, "dolly15k", source, plan))


def build_oasst1(run: Run, folder: Path) -> BuildReport:
    settings = run.settings
    source = ChatInput(
        path=settings.oasst1_path,
        dataset=settings.oasst1_dataset,
        split=settings.oasst1_split,
        revision=settings.oasst1_revision,
        max_retries=settings.hub_retries,
    ).pinned()
    lang = None if settings.oasst1_lang == "any" else settings.oasst1_lang
    plan = _plan(run, source, {"lang": lang, "max_messages": settings.oasst1_max_messages})
    kept = _finished(run, folder, plan)
    if kept is not None:
        return kept
    threads = read_threads(source.rows(), lang=lang, max_messages=settings.oasst1_max_messages)
    messages: dict[str, JSON] = {
        "read": threads.num_messages,
        "used": threads.num_used,
        "left_out": dict(threads.left_out),
    }
    spec = _spec(run, "oasst1", source, plan, messages=messages)
    return _write(run, folder, threads.chats, spec)


def _rule(run: Run) -> SplitRule:
    settings = run.settings
    return SplitRule(val_frac=settings.val_frac, seed=settings.seed, unit=settings.sft_split)


def _plan(run: Run, source: ChatInput, options: dict[str, JSON]) -> dict[str, JSON]:
    """Everything that decides the bytes."""
    return {
        "input": source.describe(),
        "split": str(_rule(run)),
        "tokenizer": run.tokenizer.fingerprint,
        **options,
    }


def _finished(
    run: Run, folder: Path, plan: dict[str, JSON], *, same_splits: Sequence[str] = ()
) -> BuildReport | None:
    """The store of an earlier run, when resuming and its plan is this one.

    Split rules in `same_splits` are taken as equal.
    """
    if not run.resume or run.overwrite or not is_finished(folder):
        return None
    manifest = read_manifest(folder)
    before = manifest.options.get("plan")
    if isinstance(before, dict) and before.get("split") in same_splits:
        plan = {**plan, "split": before["split"]}
    changes = describe_difference(before, plan)
    if changes:
        shown = "\n  ".join(changes[:8])
        raise StoreExistsError(
            f"{folder}: there is a finished store of other input or options (before -> now):\n"
            f"  {shown}\nbuild into another --cache-dir, or replace it with --overwrite"
        )
    return BuildReport(folder=folder, manifest=manifest, seconds=0.0, resumed=True)


def _spec(
    run: Run, name: str, source: ChatInput, plan: dict[str, JSON], **options: JSON
) -> BuildSpec:
    return BuildSpec(
        dataset_name=name if source.path else source.dataset,
        dataset_revision=source.revision,
        streaming=source.path is None,
        split_rule=str(_rule(run)),
        seed=run.settings.seed,
        dtype=TOKEN_DTYPE,
        options={"plan": plan, "val_frac": run.settings.val_frac, **options},
    )


def _write(run: Run, folder: Path, chats: Iterable[list[Message]], spec: BuildSpec) -> BuildReport:
    return write_examples(
        chats,
        folder,
        tokenizer=run.tokenizer,
        rule=_rule(run),
        spec=spec,
        overwrite=run.overwrite,
        max_loss=run.settings.max_loss,
        on_progress=run.on_progress,
    )


__all__ = ["build_dolly", "build_oasst1"]
