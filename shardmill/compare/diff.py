"""Everything that differs between two stores.

In: two folders.  Out: a `StoreDiff`.
Promise: equal manifests need no further look: they hold the hash of every file. What is excluded
from training counts too.
Not here: printing (cli), damage (`verify_store`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardmill.compare.documents import compare_documents
from shardmill.compare.facts import differing_facts
from shardmill.compare.records import SplitDocuments, StoreDiff
from shardmill.errors import ManifestError
from shardmill.shards import Exclusions, Manifest, Store, open_store, read_exclusions


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
