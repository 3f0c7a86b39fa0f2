"""Everything that differs between two stores: facts, files, documents, order, masks, exclusions.

Stores are only read, and files with equal hashes not even that, so damage is not found here: use
`verify`. Equal manifests need no further look, since they hold the hash of every file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from shardmill.errors import ManifestError
from shardmill.inspect.document_diff import (
    DocumentPlace,
    OrderBreak,
    SplitDocuments,
    compare_documents,
)
from shardmill.records import JSON
from shardmill.storage.files import describe_difference
from shardmill.store import Manifest, Store, open_store, read_exclusions
from shardmill.store.manifest import ListedFile, ShardEntry, SplitEntry

__all__ = ["DocumentPlace", "OrderBreak", "SplitDocuments", "StoreDiff", "diff_stores"]

_TOKENIZER = ("tokenizer_fingerprint", "tokenizer_sha256", "vocab_size", "special_token_ids")
_ELSEWHERE = {"sources", "splits", "ledger", "dropped", "format", "version", "built", *_TOKENIZER}
_SHOWN = 20  # sentences of a section


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDiff:
    """All that differs between two stores, called a and b."""

    a: str  # the folders
    b: str
    identical: bool  # every file that the manifests list, the manifests, and what is excluded
    facts: dict[str, tuple[str, ...]]  # section -> sentences, "before -> now"; none, no section
    documents: tuple[SplitDocuments, ...]  # by split
    moved: int  # documents that are in both stores, but in splits of other names
    trained_share: tuple[float, float] | None  # of all tokens; None: not both hold conversations


def diff_stores(a: str | Path, b: str | Path) -> StoreDiff:
    """Compare two finished stores on this machine."""
    left, right = open_store(a), open_store(b)
    excluded = tuple(_excluded(left, right))
    try:
        same = left.manifest == right.manifest
        facts = differing_facts(left.manifest, right.manifest)
    except RecursionError as error:
        raise ManifestError(
            f"{a}, {b}: sources or options of a manifest are nested too deeply to be compared"
        ) from error
    if same:
        moved = 0
        splits = tuple(
            SplitDocuments(split=name, both=left.num_documents(name)) for name in left.splits
        )
    else:
        splits, moved = compare_documents(left, right)
    return StoreDiff(
        a=str(a),
        b=str(b),
        identical=same and not excluded,
        facts=facts | ({"exclusions": excluded} if excluded else {}),
        documents=splits,
        moved=moved,
        trained_share=_trained_shares(left.manifest, right.manifest),
    )


def _excluded(left: Store, right: Store) -> Iterator[str]:
    """Where other tokens are excluded. Positions mean the same tokens in equal stores only."""
    before, now = read_exclusions(left), read_exclusions(right)
    for split in dict.fromkeys([*left.splits, *right.splits]):
        if not np.array_equal(before.spans(split), now.spans(split)):
            counts = [
                f"{found.num_tokens(split):,} tokens by "
                f"{sum(entry.split == split for entry in found.entries):,} entries"
                for found in (before, now)
            ]
            yield f"{split}: {' -> '.join(counts)}"


def _trained_shares(a: Manifest, b: Manifest) -> tuple[float, float] | None:
    before, now = (
        None if one.chat is None else one.chat.trained_tokens / max(one.tokens.kept, 1)
        for one in (a.ledger, b.ledger)
    )
    return None if before is None or now is None else (before, now)


def differing_facts(a: Manifest, b: Manifest) -> dict[str, tuple[str, ...]]:
    """What two manifests say differently: section -> sentences "before -> now".

    Every fact of a manifest is in one section, except totals and file names. A section without
    differences is left out.
    """
    before, now = (msgspec.to_builtins(manifest) for manifest in (a, b))
    chats = [one["options"].pop("chat", None) for one in (before, now)]
    tokenizers = [{name: one[name] for name in _TOKENIZER} for one in (before, now)]
    options = [{k: one[k] for k in one if k not in _ELSEWHERE} for one in (before, now)]
    sources = [
        {f"source {n}": each for n, each in enumerate(one["sources"])} for one in (before, now)
    ]
    sections = {
        "tokenizer": describe_difference(tokenizers[0], tokenizers[1]),
        "template": describe_difference(chats[0], chats[1]),
        "options": describe_difference(options[0], options[1]),
        "sources": describe_difference(sources[0], sources[1]),
        "splits": list(_split_changes(a.splits, b.splits)),
        "ledger": describe_difference(before["ledger"], now["ledger"]),
    }
    if not sections["sources"] and sources[0] != sources[1]:
        sections["sources"] = ["the same files, recorded with other facts"]
    found = {}
    for name, section in sections.items():
        lines = [line.removeprefix(": ") for line in section[:_SHOWN]]
        if len(section) > _SHOWN:
            lines.append(f"and {len(section) - _SHOWN:,} more")
            if name == "sources":
                lines.insert(0, _file_counts(section))
        if lines:
            found[name] = tuple(lines)
    return found


def _file_counts(changes: Sequence[str]) -> str:
    """The first line of a long list: how many files it is about."""
    added = sum(line.endswith(" -> is an input") for line in changes)
    removed = sum(line.endswith(" -> is none") for line in changes)
    names = {line.rpartition(": ")[0] for line in changes}  # a changed file has several lines
    return f"{added:,} files added, {removed:,} removed, {len(names) - added - removed:,} changed"


def _split_changes(
    before: Mapping[str, SplitEntry], now: Mapping[str, SplitEntry]
) -> Iterator[str]:
    for name in dict.fromkeys([*before, *now]):
        old, new = (_counts(splits.get(name)) for splits in (before, now))
        found = describe_difference(cast(JSON, old), cast(JSON, new), name)
        if not found and _hashes(before[name]) != _hashes(now[name]):
            files = _hashes(before[name]).items() ^ _hashes(now[name]).items()
            found = [f"{name}: other bytes in {len({file for file, _ in files}):,} files"]
        yield from found


def _counts(split: SplitEntry | None) -> dict[str, int] | None:
    if split is None:
        return None
    counts = {"documents": split.documents, "tokens": split.tokens, "shards": len(split.shards)}
    if split.chat is not None:
        counts |= {"turns": split.chat.num_turns, "trained tokens": split.chat.trained_tokens}
    return counts


def _hashes(split: SplitEntry) -> dict[str, str]:
    files: list[ListedFile | ShardEntry] = [split.index, *split.shards]
    if split.chat is not None:
        files += [split.chat.mask, split.chat.turns, split.chat.roles]
    return {entry.file: entry.sha256 for entry in files}
