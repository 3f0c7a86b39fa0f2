"""Append new files to a finished store.

The result is, byte for byte, the store that a build of the old files and then the new ones makes
from the start. A store for which that would not hold is refused, with the difference named. To get
the same batches, a chunk that holds old and new files is read again as a whole, and its old
documents are skipped; nothing of them is encoded.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from shardmill.building.assembly import NO_TOKENS, AppendPlan, Filler, mark_of, void_drop
from shardmill.building.plan import (
    RECORDED,
    BuildSpec,
    Feed,
    chunks_of,
    feed_of_chunks,
    plan_json,
    plan_sha256,
)
from shardmill.building.worker import TokenRules
from shardmill.errors import BuildError, OptionError, SourceError
from shardmill.protocols import Source, Tokenizer, continues
from shardmill.records import JSON, Cursor, Drop, TextBatch
from shardmill.sources import stamp_of
from shardmill.sources.append import Appended, append_files, files_of, only_files
from shardmill.storage.files import describe_difference
from shardmill.store import Store, list_plans, open_store, read_origins
from shardmill.store.layout import DTYPES
from shardmill.store.plans import GRAIN, MARK
from shardmill.store.writer import dropped_rows, meta_sha256
from shardmill.tokenizers import EngineChoice

log = logging.getLogger(__name__)

_PLAN = "plan_sha256"


def plan_append(
    folder: Path,
    feeds: Sequence[Feed],
    *,
    spec: BuildSpec,
    tokenizer: Tokenizer,
    engine: EngineChoice,
) -> AppendPlan:
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
    filled = {name: split.tokens for name, split in manifest.splits.items()}
    if Filler(feed.fill, filled).full:
        raise BuildError(
            f"{old.folder}: full: its old files filled all splits, so nothing of new ones would be "
            "kept; build it again with other limits and {overwrite}",
            overwrite=True,
        )
    if files.fresh is None:
        return AppendPlan(old=old, sha256=sha256, feed=ordered)
    _check_engine(old, engine)
    chunks, new, num_shared = _cut(files)
    num_whole = len(chunks) - isinstance(new[0], NewDocuments)
    log.info("%s: %d new files after %d", old.folder, files.num_new, len(files.old))
    for name in list_plans(old.folder):
        log.warning("%s: the pack plan %r is of the old tokens only and goes", old.folder, name)
    documents = manifest.ledger.documents
    num_void = documents.dropped.get(NO_TOKENS, 0)
    given = documents.kept + documents.over_budget + num_void
    return AppendPlan(
        old=old,
        sha256=sha256,
        feed=ordered,
        chunks=feed_of_chunks(files.fresh, new, feed.fill),
        num_given=given,
        held=_held(old, feed.source.name, given, num_shared) if num_void else (),
        whole=chunks[:num_whole],
        origins=_known_origins(old, ordered, chunks, num_whole, has_void=num_void > 0),
    )


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


def _held(old: Store, name: str, given: int, num_shared: int) -> tuple[int, ...]:
    """The texts without a token among the last `num_shared` that were given. Their rows are at the
    end of the list of dropped ones, and a batch lists what its source dropped first."""
    known = {void_drop(name, given - back): -back for back in range(1, num_shared + 1)}
    held: list[int] = []
    for drop in dropped_rows(old):
        position = known.get(Drop(id=drop.id, reason=drop.reason))
        if position is None:
            held.clear()
        else:
            held.append(position)
    return tuple(held)


def _amounts(batch: TextBatch) -> Counter[str]:
    """What a batch holds, by kind."""
    texts, drops = len(batch.texts), len(batch.drops)
    return Counter(batch.counts) + Counter(read=batch.num_read, texts=texts, drops=drops)


class NewDocuments:
    """A chunk without the documents of its first files. A `Source`; it can be pickled."""

    def __init__(self, chunk: Source, old: Counter[str], num_bytes: int | None) -> None:
        """`old` are the `_amounts` of its first files. About `num_bytes` of input are new."""
        self.whole_chunk = chunk
        self._old, self._num_bytes = old, num_bytes

    @property
    def name(self) -> str:
        return self.whole_chunk.name

    def describe(self) -> dict[str, JSON]:
        of = self.whole_chunk.describe()
        return {"kind": "rest", "of": of, "behind": self._old["read"]}

    def stamp(self) -> JSON:
        return stamp_of(self.whole_chunk)

    def size_hint(self) -> int | None:
        return self._num_bytes

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        """Every cursor is one of the whole chunk; the first one is after the old files."""
        if cursor is not None:
            return self.whole_chunk.batches(cursor)
        return (
            replace(
                batch,
                texts=batch.texts[old["texts"] :],
                num_read=batch.num_read - old["read"],
                counts={name: count - old[name] for name, count in batch.counts.items()},
                drops=batch.drops[old["drops"] :],
            )
            for batch, old in _new_batches(self.whole_chunk, self._old)
        )


def _new_batches(chunk: Source, old: Counter[str]) -> Iterator[tuple[TextBatch, Counter[str]]]:
    """The batches of a chunk that are not old as a whole, and what of each is old."""
    for batch in chunk.batches():
        if old["read"] and old["read"] >= batch.num_read:
            old = old - _amounts(batch)
            continue
        yield batch, old
        old = Counter()
    if old["read"]:
        raise SourceError(f"{chunk.name}: changed while it was read: wait for its writer")


def _cut(files: Appended) -> tuple[list[Source], list[Source], int]:
    """The chunks with old files, of which the last may have new ones too; those with new files; and
    how many old texts are in the batch with the first new document."""
    seen: list[Source] = []
    new: list[Source] = []
    num_shared = 0
    for chunk in chunks_of(files.source):
        locations = {file.place for file in files_of(chunk)}
        if locations & files.old:
            seen.append(chunk)
        if locations <= files.old:
            continue
        if locations & files.old:
            before = only_files(chunk, files.old)
            assert before is not None, "a chunk with old files has some"
            old = sum(map(_amounts, before.batches()), Counter[str]())
            num_shared = next((left["texts"] for _, left in _new_batches(chunk, old)), 0)
            fresh = only_files(chunk, locations - files.old)
            chunk = NewDocuments(chunk, old, fresh.size_hint() if fresh is not None else None)
        new.append(chunk)
    return seen, new, num_shared


def _known_origins(
    old: Store, feed: Feed, chunks: Sequence[Source], num_whole: int, *, has_void: bool
) -> list[list[int]] | None:
    """The table rows of the chunks with old files; None if the store does not know them."""
    found = read_origins(old.folder, old.manifest)
    if found is None:
        log.info("%s: does not know the origins of its documents, and will not", old.folder)
        return None
    marks = [mark_of(chunk) for chunk in chunks]
    rows: list[list[int]] = found.table[found.table[:, GRAIN] < len(chunks)].tolist()
    if any(row[MARK] != marks[row[GRAIN]] for row in rows if row[GRAIN] < num_whole):
        log.info("%s: its input is cut differently with the new files: counting again", old.folder)
        rows = _counted_rows(old, feed, chunks, _void_numbers(old) if has_void else ())
    for row in rows:
        row[MARK] = marks[row[GRAIN]]  # the last chunk ends elsewhere now
    return rows


def _void_numbers(old: Store) -> list[int]:
    """Of the texts without a token among those that the source gave; see `void_drop`."""
    ids = [drop.id for drop in dropped_rows(old) if drop.reason == NO_TOKENS]
    return sorted(int(one.rpartition(" ")[2]) for one in ids)


def _counted_rows(
    old: Store, feed: Feed, chunks: Sequence[Source], void: Sequence[int]
) -> list[list[int]]:
    """The table rows of chunks that are read again; nothing of them is encoded."""
    splits = old.manifest.splits
    rows: list[list[int]] = []
    given = lines = 0
    for number, chunk in enumerate(chunks):
        lines = lines if continues(chunk) else 0
        left, firsts = given - bisect_left(void, given), {}
        for split, _ in feed.fill:
            firsts[split] = min(left, splits[split].documents)
            left -= firsts[split]
        rows.append([0, number, 0, lines, *(firsts[split] for split in sorted(splits))])
        for batch in chunk.batches():
            given += len(batch.texts)
            lines += batch.num_rows
    return rows
