"""Two stores become the list of what differs between them.

In: two finished stores on this machine.  Out: a `StoreDiff`.
Promise: stores are only read; files with equal hashes are not read at all; memory does not grow
with documents.
Not here: whether a store is damaged (`verify`), pack plans.

Everything that differs between two stores.

In: two folders.  Out: a `StoreDiff`.
Promise: equal manifests need no further look: they hold the hash of every file. What is excluded
from training counts too.
Not here: printing (cli), damage (`verify`).

What two manifests say differently.

In: two manifests.  Out: sentences by section, "before -> now".
Promise: pure; every fact of a manifest is in one section, but for totals and file names.
Not here: documents (documents.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardmill.errors import ManifestError
from shardmill.inspect.document_diff import compare_documents
from shardmill.inspect.document_match import DocumentPlace, OrderBreak, SplitDocuments, StoreDiff
from shardmill.store import Exclusions, Manifest, Store, open_store, read_exclusions
from shardmill.store.manifest import ListedFile, ShardEntry, SplitEntry

_TOKENIZER = ("tokenizer_fingerprint", "tokenizer_sha256", "vocab_size", "special_token_ids")
_ELSEWHERE = {"sources", "splits", "ledger", "dropped", "format", "version", "built", *_TOKENIZER}
_SHOWN = 20  # sentences of a section


def differing_facts(a: Manifest, b: Manifest) -> dict[str, tuple[str, ...]]:
    """Section -> sentences. A section with nothing to say is not there."""
    before, now = (msgspec.to_builtins(manifest) for manifest in (a, b))
    chats = [one["options"].pop("chat", None) for one in (before, now)]
    sections = {
        "tokenizer": changes(_part(before, _TOKENIZER), _part(now, _TOKENIZER)),
        "template": changes(*chats),
        "options": changes(_without(before, _ELSEWHERE), _without(now, _ELSEWHERE)),
        "sources": _source_changes(before["sources"], now["sources"]),
        "splits": _split_changes(a.splits, b.splits),
        "ledger": changes(before["ledger"], now["ledger"]),
    }
    found = {name: list(lines) for name, lines in sections.items()}
    return {name: _shown(lines) for name, lines in found.items() if lines}


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
    """How files are read, then which they are. A manifest may say anything of its sources."""
    found = [
        *changes([_bare(one) for one in before], [_bare(one) for one in now]),
        *_file_changes(*(dict(_files(sources)) for sources in (before, now))),
    ]
    if not found and before != now:
        found.append("the same files, recorded with other facts")
    yield from found


def _file_changes(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for word, names in (("removed", old.keys() - new.keys()), ("added", new.keys() - old.keys())):
        if names:
            some = ", ".join(sorted(names)[:5])
            yield f"{word} {len(names):,} files: {some}{', ...' if len(names) > 5 else ''}"
    for name in old:
        if name in new and _changed(old[name], new[name]):
            sizes = [entry.get("bytes") for entry in (old[name], new[name])]
            told = [f"{size:,}" if isinstance(size, int) else repr(size) for size in sizes]
            yield f"changed {name}: {told[0]} -> {told[1]} bytes"
    left, right = [n for n in old if n in new], [n for n in new if n in old]
    for first, second in zip(left, right, strict=True):
        if first != second:
            yield f"other order of files, first: {first} -> {second}"
            break


def _files(sources: list[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, entry) of all files, in order; files of one name in several sources are numbered."""
    seen: dict[str, int] = {}
    for source in sources:
        for part in _leaves(source):
            for entry in part["files"] if isinstance(part.get("files"), list) else ():
                facts = entry if isinstance(entry, dict) else {"file": entry}
                name = facts.get("file", facts)
                name = name if isinstance(name, str) else _short(name)
                seen[name] = seen.get(name, 0) + 1
                yield (name if seen[name] == 1 else f"{name} ({seen[name]})"), facts


def _leaves(source: Any) -> Iterator[Mapping[str, Any]]:
    if _is_concat(source):
        for part in source["parts"]:
            yield from _leaves(part)
    elif isinstance(source, dict):
        yield source


def _bare(source: Any) -> Any:
    """A source without its files, where it lists them."""
    if not isinstance(source, dict):
        return source
    bare = _without(source, {"files"} if isinstance(source.get("files"), list) else set())
    if _is_concat(source):
        bare["parts"] = [_bare(part) for part in source["parts"]]
    return bare


def _is_concat(source: Any) -> bool:
    return (
        isinstance(source, dict)
        and source.get("kind") == "concat"
        and isinstance(source.get("parts"), list)
    )


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the content differs, as far as both tell the same of it."""
    return any(old[key] != new[key] for key in old.keys() & new.keys() if key != "file")


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


def _part(facts: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: facts[name] for name in names}


def _without(facts: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in names}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _shown(lines: list[str]) -> tuple[str, ...]:
    more = [f"and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
    return (*lines[:_SHOWN], *more)


def diff_stores(a: str | Path, b: str | Path) -> StoreDiff:
    """Compare two finished stores on this machine."""
    left, right = open_store(a), open_store(b)
    try:
        return _diff(left, right, str(a), str(b))
    except RecursionError as error:
        raise ManifestError(
            f"{a}, {b}: sources or options of a manifest are nested too deeply to be compared"
        ) from error


def _diff(left: Store, right: Store, a: str, b: str) -> StoreDiff:
    excluded = tuple(_excluded(left, right))
    same = left.manifest == right.manifest
    if same:
        splits, moved = tuple(_all_of(left, name) for name in left.splits), 0
    else:
        found = compare_documents(left, right)
        splits, moved = found.splits, found.moved
    return StoreDiff(
        a=a,
        b=b,
        identical=same and not excluded,
        facts=differing_facts(left.manifest, right.manifest)
        | ({"exclusions": excluded} if excluded else {}),
        documents=splits,
        moved=moved,
        trained_share=_shares(left.manifest, right.manifest),
    )


def _excluded(left: Store, right: Store) -> Iterator[str]:
    """Where other tokens are excluded. Positions mean the same tokens in equal stores only."""
    before, now = read_exclusions(left), read_exclusions(right)
    for split in dict.fromkeys([*left.splits, *right.splits]):
        if not np.array_equal(before.spans(split), now.spans(split)):
            yield f"{split}: {_told(before, split)} -> {_told(now, split)}"


def _told(exclusions: Exclusions, split: str) -> str:
    entries = sum(entry.split == split for entry in exclusions.entries)
    return f"{exclusions.num_tokens(split):,} tokens by {entries:,} entries"


def _all_of(store: Store, split: str) -> SplitDocuments:
    return SplitDocuments(
        split=split,
        both=store.num_documents(split),
        only_a=0,
        only_b=0,
        other_mask=0,
        first_only_a=(),
        first_only_b=(),
        first_other_mask=(),
        order=None,
    )


def _shares(a: Manifest, b: Manifest) -> tuple[float, float] | None:
    shares = []
    for manifest in (a, b):
        chat, tokens = manifest.ledger.chat, manifest.ledger.tokens.kept
        if chat is None:
            return None
        shares.append(chat.trained_tokens / max(tokens, 1))
    return shares[0], shares[1]


__all__ = ["DocumentPlace", "OrderBreak", "SplitDocuments", "StoreDiff", "diff_stores"]
