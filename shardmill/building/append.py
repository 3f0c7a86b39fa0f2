"""Go on with a finished store: what is new, and where the old build stood.

In: the place of a store, a feed that names its old files and new ones.  Out: the feed in the order
old, then new; and what a build must know to write behind the old tokens.
Promise: the store that comes out is, byte for byte, the one that a build of the feed in that order
makes from the start; a store that this would not be true of is refused, with the difference named.
Not here: the files (sources), the bytes (shards), the run (run.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from shardmill.building.assembly import NO_TOKENS, Standing, void_drop
from shardmill.building.encode import Filler
from shardmill.building.origins import KnownOrigins, known_origins
from shardmill.building.spec import (
    BuildReport,
    BuildSpec,
    Feed,
    choose_dtype,
    describe_difference,
    plan_json,
    plan_sha256,
)
from shardmill.building.units import FeedGrains, fresh_grains
from shardmill.building.workplace import remove_workplace, workplace_of
from shardmill.errors import BuildError, OptionError
from shardmill.protocols import Tokenizer
from shardmill.records import JSON, Drop
from shardmill.sources import append_files
from shardmill.store import OldStore, is_finished, list_plans, open_old
from shardmill.store.layout import DTYPES
from shardmill.tokenizers import EngineChoice, vocab_size_of

log = logging.getLogger(__name__)

_PLAN = "plan_sha256"
_NAMED = ("dataset_config", "dataset_revision", "streaming", "split_rule", "seed", "shuffle_buffer")
_SAME = (*_NAMED, "append_eot", "shard_bytes")
"""Facts that a spec and a manifest call by the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingOn:
    """A build behind a finished store."""

    old: OldStore
    feed: FeedGrains  # what is new
    standing: Standing
    origins: KnownOrigins | None  # None: nobody knows those of the old documents

    @property
    def filled(self) -> dict[str, int]:
        return {name: split.tokens for name, split in self.old.manifest.splits.items()}

    def check_engine(self, engine: EngineChoice) -> None:
        """A store is made by one engine; its manifest names one."""
        made = self.old.manifest.produced_by
        fast = made.get("engine") != made.get("reference")
        if engine != "auto" and fast != (engine == "fast"):
            raise OptionError(
                f"engine={engine!r}: the tokens in {self.old.folder} were made by "
                f"{made.get('engine')!r}, which goes on: ask for none, or build anew with "
                "overwrite=True"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """A store and its inputs as they are now."""

    feed: Feed  # old files, then new ones
    plan: dict[str, JSON]  # of a whole build of it
    going_on: GoingOn | None  # None: nothing is new


def old_store(target: Path) -> OldStore | None:
    """The store to be continued; None, announced, when it must be built as a whole."""
    if is_finished(target):
        return open_old(target)
    log.info("%s: no store here yet: all of it is built", target)
    return None


def find_more(
    old: OldStore, feeds: Sequence[Feed], *, spec: BuildSpec, tokenizer: Tokenizer
) -> More:
    """The feed in the order old, then new; refused when it is not that of the old store."""
    if len(feeds) != 1:
        raise OptionError(f"{len(feeds)} feeds: files are added to a store of one source only")
    _check_kind(old)
    (feed,), manifest = feeds, old.manifest
    files = append_files(feed.source, manifest.sources[0])
    ordered = replace(feed, source=files.source)
    dtype = choose_dtype(spec.dtype, vocab_size_of(tokenizer))
    plan = plan_json([ordered], spec, tokenizer, dtype)
    _check_plan(old, plan, spec, feed.source.name)
    if Filler(feed.fill, {name: split.tokens for name, split in manifest.splits.items()}).full:
        raise BuildError(
            f"{old.folder}: full: its old files filled all splits, so that nothing of new ones "
            "would be kept; build it anew with other limits and overwrite=True"
        )
    if files.fresh is None:
        return More(feed=ordered, plan=plan, going_on=None)
    fresh = fresh_grains(files)
    log.info("%s: %d new files behind %d", old.folder, files.num_new, len(files.old))
    for name in list_plans(old.folder):
        log.warning("%s: the pack plan %r is of the old tokens alone and goes", old.folder, name)
    documents = manifest.ledger.documents
    void = documents.dropped.get(NO_TOKENS, 0)
    given = documents.kept + documents.over_budget + void
    held = _held(old, feed.source.name, given, fresh.num_shared) if void else ()
    standing = Standing(ledger=manifest.ledger, num_given=given, held=held)
    origins = known_origins(old, ordered, fresh, _void_numbers(old) if void else ())
    going_on = GoingOn(old=old, feed=fresh.feed, standing=standing, origins=origins)
    return More(feed=ordered, plan=plan, going_on=going_on)


def nothing_new(old: OldStore, plan: dict[str, JSON]) -> BuildReport:
    """The store stays as it is; what a build left that was killed behind its last step, goes."""
    log.info("%s: nothing new, so nothing to do", old.folder)
    note = workplace_of(old.folder) / "plan.json"
    left = json.loads(note.read_bytes()) if note.exists() else {}
    base = (left.get("plan") or {}).get("continues")
    remove_workplace(old.folder, plan if base is None else {**plan, "continues": base})
    return BuildReport(folder=old.folder, manifest=old.manifest, seconds=0.0, resumed=False)


def _check_kind(old: OldStore) -> None:
    manifest = old.manifest
    chat = any(split.chat is not None for split in manifest.splits.values())
    if chat or manifest.unit != "document":
        raise OptionError(
            f"{old.folder}: a store of {'conversations' if chat else 'examples'}; files are added "
            "to stores of documents only: build it anew with overwrite=True"
        )
    if _PLAN not in manifest.options or len(manifest.sources) != 1:
        raise OptionError(
            f"{old.folder}: was not built from one source by `shardmill build` "
            f"({len(manifest.sources)} sources), so nothing can be added to it: build it anew with "
            "overwrite=True"
        )


def _check_plan(old: OldStore, plan: dict[str, Any], spec: BuildSpec, name: str) -> None:
    """Everything but the files must be as it was: with the old files the plan is the old plan."""
    manifest = old.manifest
    source, void = manifest.sources[0], manifest.ledger.documents.dropped.get(NO_TOKENS, 0)
    ours = dict(plan["spec"])
    if manifest.dataset_name == source.get("name") and spec.dataset_name == name:
        ours["dataset_name"] = manifest.dataset_name  # neither was named: both go by their source
    feed = {**plan["feeds"][0], "source": source}
    same = plan_sha256({**plan, "feeds": [feed], "spec": ours}) == manifest.options[_PLAN]
    if same and (not void or name == source.get("name")):
        return
    changes = list(_changes(old, {**plan, "spec": ours}))
    if same:
        changes = [f"name of the source, which dropped rows hold: {source.get('name')} -> {name}"]
    elif not changes:
        changes = ["how many tokens go to which split, or the options of the source"]
    shown = "\n  ".join(changes[:8])
    raise BuildError(
        f"{old.folder}: was built otherwise, so nothing can be added to it (before -> now):\n"
        f"  {shown}\nRepeat the options of the first build, or build it anew with overwrite=True."
    )


def _changes(old: OldStore, plan: dict[str, Any]) -> Iterator[str]:
    """What the manifest can tell of a plan that is not the old one."""
    manifest, spec = old.manifest, plan["spec"]
    before = {name: getattr(manifest, name) for name in (*_SAME, "dataset_name")}
    before |= {
        "dtype": DTYPES[manifest.token_dtype],
        "options": {k: v for k, v in manifest.options.items() if k != _PLAN},
        "tokenizer": manifest.tokenizer_fingerprint,
        "splits": sorted(manifest.splits),
    }
    now = {**{name: spec[name] for name in before if name in spec}, "tokenizer": plan["tokenizer"]}
    now["splits"] = sorted(split for split, _ in plan["feeds"][0]["fill"])
    yield from describe_difference(cast(JSON, before), cast(JSON, json.loads(json.dumps(now))))


def _void_numbers(old: OldStore) -> list[int]:
    """Of the texts without a token among those that the source gave, in order; see `void_drop`."""
    ids = [drop.id for drop in old.drops() if drop.reason == NO_TOKENS]
    return sorted(int(one.rpartition(" ")[2]) for one in ids)


def _held(old: OldStore, name: str, given: int, num_shared: int) -> tuple[int, ...]:
    """The texts without a token of the last `num_shared` that were given. Their rows stand at the
    end of the list of dropped ones, and a batch lists what its source dropped first."""
    known = {void_drop(name, given - back): -back for back in range(1, num_shared + 1)}
    held: list[int] = []
    for drop in old.drops():
        place = known.get(Drop(id=drop.id, reason=drop.reason))
        if place is None:
            held.clear()
        else:
            held.append(place)
    return tuple(held)
