"""Everything that differs between two stores: facts, files, documents, order, masks, exclusions.

Stores are only read, and files with equal hashes not even that, so damage is not found here: use
`verify`. Equal manifests need no further look, since they hold the hash of every file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardmill.errors import ManifestError
from shardmill.inspect.document_diff import (
    DocumentPlace,
    OrderBreak,
    SplitDocuments,
    compare_documents,
)
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
        one.chat and one.chat.trained_tokens / max(one.tokens.kept, 1)
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
    tokenizers: list[Any] = [{name: one[name] for name in _TOKENIZER} for one in (before, now)]
    sections = {
        "tokenizer": changes(*tokenizers),
        "template": changes(*chats),
        "options": changes(_without(before, _ELSEWHERE), _without(now, _ELSEWHERE)),
        "sources": _source_changes(before["sources"], now["sources"]),
        "splits": _split_changes(a.splits, b.splits),
        "ledger": changes(before["ledger"], now["ledger"]),
    }
    found = {}
    for name, section in sections.items():
        lines = list(section)
        if len(lines) > _SHOWN:
            lines = [*lines[:_SHOWN], f"and {len(lines) - _SHOWN:,} more"]
        if lines:
            found[name] = tuple(lines)
    return found


def changes(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Each leaf in which two JSON values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from changes(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for at, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from changes(old, new, f"{path}[{at}]")
    elif before != now:
        yield f"{path + ': ' if path else ''}{_short(before)} -> {_short(now)}"


def _source_changes(before: list[Any], now: list[Any]) -> Iterator[str]:
    """How files are read, then which they are. A manifest may hold anything about its sources."""
    files: tuple[list[Any], list[Any]] = ([], [])
    bare = [
        [_without_files(source, listed) for source in sources]
        for sources, listed in zip((before, now), files, strict=True)
    ]
    found = [*changes(*bare), *_file_changes(*map(_by_name, files))]
    if not found and before != now:
        found.append("the same files, recorded with other facts")
    yield from found


def _without_files(source: Any, files: list[Any]) -> Any:
    """A source without its files, where it lists them; they are appended to `files`."""
    if not isinstance(source, dict):
        return source
    bare = dict(source)
    if isinstance(bare.get("files"), list):
        files += bare.pop("files")
    if bare.get("kind") == "concat" and isinstance(bare.get("parts"), list):
        bare["parts"] = [_without_files(part, files) for part in bare["parts"]]
    return bare


def _by_name(files: list[Any]) -> dict[str, Mapping[str, Any]]:
    """The entries of files by name, in order; of one name in several sources they are numbered."""
    found: dict[str, Mapping[str, Any]] = {}
    seen: dict[str, int] = {}
    for entry in files:
        facts = entry if isinstance(entry, dict) else {"file": entry}
        name = facts.get("file", facts)
        name = name if isinstance(name, str) else _short(name)
        seen[name] = seen.get(name, 0) + 1
        found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = facts
    return found


def _file_changes(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for word, names in (("removed", old.keys() - new.keys()), ("added", new.keys() - old.keys())):
        if names:
            some = ", ".join(sorted(names)[:5])
            yield f"{word} {len(names):,} files: {some}{', ...' if len(names) > 5 else ''}"
    left, right = [n for n in old if n in new], [n for n in new if n in old]
    for name in left:
        pair = old[name], new[name]
        recorded = (pair[0].keys() & pair[1].keys()) - {"file"}  # by both
        if any(pair[0][key] != pair[1][key] for key in recorded):
            sizes = [entry.get("bytes") for entry in pair]
            shown = [f"{size:,}" if isinstance(size, int) else repr(size) for size in sizes]
            yield f"changed {name}: {shown[0]} -> {shown[1]} bytes"
    for first, second in zip(left, right, strict=True):
        if first != second:
            yield f"other order of files, first: {first} -> {second}"
            break


def _split_changes(
    before: Mapping[str, SplitEntry], now: Mapping[str, SplitEntry]
) -> Iterator[str]:
    for name in dict.fromkeys([*before, *now]):
        old, new = (_counts(splits.get(name)) for splits in (before, now))
        found = list(changes(old, new, name))
        if not found and _hashes(before[name]) != _hashes(now[name]):
            files = list(changes(_hashes(before[name]), _hashes(now[name])))
            found = [f"{name}: other bytes in {len(files):,} files"]
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


def _without(facts: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in names}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
