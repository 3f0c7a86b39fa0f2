"""Append new files to a finished store.

The result is, byte for byte, the store that a build of the old files and then the new ones makes
from the start. A store for which that would not hold is refused, with the difference named. Units
are cut by the input alone, so those of the old files are the same but for the last ones: their
shards are linked, and the store's own record of its units says the rest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from shardmill.building.finish import UnitEntry
from shardmill.building.plan import RECORDED, BuildSpec, Feed, Unit, plan_json, plan_sha256
from shardmill.building.scheduler import FeedWork
from shardmill.building.segments import NO_TOKENS, Segment
from shardmill.building.splits import open_state
from shardmill.building.worker import TokenRules
from shardmill.building.workplace import FolderOutput
from shardmill.errors import BuildError, OptionError
from shardmill.protocols import Tokenizer
from shardmill.records import JSON, OffsetArray
from shardmill.sources.append import append_files
from shardmill.storage.files import describe_difference
from shardmill.store import Store, list_plans, open_store, read_origins
from shardmill.store.layout import DTYPES, ITEMSIZE
from shardmill.store.writer import meta_sha256, share_file
from shardmill.tokenizers import EngineChoice

log = logging.getLogger(__name__)

_PLAN = "plan_sha256"


@dataclass(slots=True, kw_only=True)
class OldUnits:
    """A finished store, as far as a build of more files can use it."""

    old: Store
    sha256: str  # of its meta.json
    feed: Feed  # old files, then new ones
    has_new_files: bool
    entries: Sequence[UnitEntry]
    num_units: int = 0  # of them that are used
    _first: dict[str, list[int]] = field(default_factory=dict)  # by split: documents before each

    def settle(self, work: FeedWork, units: Sequence[Unit], output: FolderOutput) -> None:
        """Take over every unit that is as it was, from the first on."""
        self._first = {split: [0] for split in self.old.manifest.splits}
        linked, itemsize = True, ITEMSIZE[DTYPES[self.old.manifest.token_dtype]]
        for entry, unit in zip(self.entries, units, strict=False):
            if entry.mark != unit.mark:
                break
            for shard in (shard for part in entry.splits.values() for shard in part.shards):
                new = output.store / shard.file
                new.parent.mkdir(exist_ok=True)
                if not output.has(shard.file, shard.tokens * itemsize):
                    new.unlink(missing_ok=True)  # a copy that was killed
                    linked &= share_file(self.old.folder / shard.file, new, shard.sha256)
            for split, first in self._first.items():
                part = entry.splits.get(split)
                first.append(first[-1] + (part.documents if part is not None else 0))
            work.accept(entry.after)
        self.num_units = work.num_settled
        if not linked:
            log.info("%s: its shards are copied: this disk has no links", self.old.folder)

    def segment(self, number: int) -> Segment:
        """What the store knows of one of its units."""
        entry = self.entries[number]
        lengths: dict[str, OffsetArray] = {}
        for split, part in entry.splits.items():
            first = self._first[split][number]
            starts = self.old.document_starts(split)[first : first + part.documents]
            lengths[split] = np.diff(np.append(starts, starts[0] + part.tokens))
        return Segment(
            feed=0,
            mark=entry.mark,
            lines=entry.lines,
            splits=entry.splits,
            lengths=lengths,
        )


def plan_append(
    folder: Path,
    feeds: Sequence[Feed],
    *,
    spec: BuildSpec,
    tokenizer: Tokenizer,
    engine: EngineChoice,
) -> OldUnits:
    """Find the new files; refuse a store at `folder` that was not built with the same options."""
    sha256, old = meta_sha256(folder), open_store(folder)
    if len(feeds) != 1:
        raise OptionError(f"{len(feeds)} feeds: files are added to a store of one source only")
    _check_kind(old)
    (feed,), manifest = feeds, old.manifest
    files = append_files(feed.source, manifest.sources[0])
    ordered = replace(feed, source=files.source)
    plan = plan_json([ordered], spec, tokenizer, TokenRules.of(spec, tokenizer).dtype)
    _check_plan(old, plan, spec, feed.source.name)
    entries = _entries(old)
    state = entries[-1].after if entries else open_state(feed.fill)
    if state[0] == len(feed.fill):
        raise BuildError(
            f"{old.folder}: full: its old files filled all splits, so nothing of new ones would be "
            "kept; build it again with other limits and {overwrite}",
            overwrite=True,
        )
    if files.num_new:
        _check_engine(old, engine)
        log.info("%s: %d new files after %d", old.folder, files.num_new, len(files.old))
        for name in list_plans(old.folder):
            log.warning("%s: the pack plan %r is of the old tokens only and goes", old.folder, name)
    return OldUnits(
        old=old, sha256=sha256, feed=ordered, has_new_files=files.num_new > 0, entries=entries
    )


def _entries(old: Store) -> list[UnitEntry]:
    """The store's record of its units."""
    found = read_origins(old.folder, old.manifest)
    if found is None or found.units is None:
        raise OptionError(
            f"{old.folder}: has no record of its units (it was built by an older version, or its "
            "origins.table was removed), so nothing can be added to it: build it again with "
            "{overwrite}",
            overwrite=True,
        )
    try:
        return msgspec.json.Decoder(UnitEntry).decode_lines(found.units)
    except msgspec.MsgspecError as error:
        raise BuildError(
            f"{old.folder}: its record of units is not ours ({error}): build it again with "
            "{overwrite}",
            overwrite=True,
        ) from error


def _check_engine(old: Store, engine: EngineChoice) -> None:
    """A store is made by one engine; its manifest names it."""
    made = old.manifest.produced_by
    is_fast = made.get("engine") != made.get("reference")
    if engine != "auto" and is_fast != (engine == "fast"):
        raise OptionError(
            f"{{engine}}: the tokens in {old.folder} were made by {made.get('engine')!r}, which "
            "makes the new ones too: leave it out, or build again with {overwrite}",
            engine=engine,
            overwrite=True,
        )


def _check_kind(old: Store) -> None:
    manifest = old.manifest
    chat = any(split.chat is not None for split in manifest.splits.values())
    if chat or manifest.unit != "document":
        raise OptionError(
            f"{old.folder}: a store of {'conversations' if chat else 'examples'}; files are added "
            "to stores of documents only: build it again with {overwrite}",
            overwrite=True,
        )
    if _PLAN not in manifest.options or len(manifest.sources) != 1:
        raise OptionError(
            f"{old.folder}: was not built from one source by `shardmill build` "
            f"({len(manifest.sources)} sources), so nothing can be added to it: build it again "
            "with {overwrite}",
            overwrite=True,
        )


def _check_plan(old: Store, plan: dict[str, Any], spec: BuildSpec, name: str) -> None:
    """Everything but the files must be as it was: with the old files the plan is the old plan."""
    manifest = old.manifest
    source, void = manifest.sources[0], manifest.ledger.documents.dropped.get(NO_TOKENS, 0)
    ours = dict(plan["spec"])
    if manifest.dataset_name == source.get("name") and spec.dataset_name == name:
        ours["dataset_name"] = manifest.dataset_name  # both are named after their source
    feed = {**plan["feeds"][0], "source": source}
    same = plan_sha256({**plan, "feeds": [feed], "spec": ours}) == manifest.options[_PLAN]
    if same and (not void or name == source.get("name")):
        return
    if same:
        changes = [f"name of the source, which dropped rows hold: {source.get('name')} -> {name}"]
    else:
        changes = _changes(old, {**plan, "spec": ours})
    shown = "\n  ".join(
        changes[:8] or ["how many tokens go to which split, or the options of the source"]
    )
    raise BuildError(
        f"{old.folder}: was built with other options, so nothing can be added to it "
        f"(before -> now):\n  {shown}\nRepeat the options of the first build, or build it again "
        "with {overwrite}.",
        overwrite=True,
    )


def _changes(old: Store, plan: dict[str, Any]) -> list[str]:
    """How a plan differs from what the manifest says."""
    manifest, spec = old.manifest, plan["spec"]
    before = {name: getattr(manifest, name) for name in (*RECORDED, "shard_bytes")}
    before |= {
        "dtype": DTYPES[manifest.token_dtype],
        "options": {k: v for k, v in manifest.options.items() if k != _PLAN},
        "tokenizer": manifest.tokenizer_fingerprint,
        "splits": sorted(manifest.splits),
    }
    now = {**{name: spec[name] for name in before if name in spec}, "tokenizer": plan["tokenizer"]}
    now["splits"] = sorted(split for split, _ in plan["feeds"][0]["fill"])
    return describe_difference(cast(JSON, before), cast(JSON, json.loads(json.dumps(now))))
