"""Everything that differs between two stores.

In: two folders.  Out: a `StoreDiff`.
Promise: equal manifests need no further look: they hold the hash of every file.
Not here: printing (cli), damage (`verify_store`).
"""

from __future__ import annotations

from pathlib import Path

from shardmill.compare.documents import compare_documents
from shardmill.compare.facts import differing_facts
from shardmill.compare.records import SplitDocuments, StoreDiff
from shardmill.shards import Manifest, Store, open_store


def diff_stores(a: str | Path, b: str | Path) -> StoreDiff:
    """Compare two finished stores on this machine."""
    left, right = open_store(a), open_store(b)
    identical = left.manifest == right.manifest
    if identical:
        splits, moved = tuple(_all_of(left, name) for name in left.splits), 0
    else:
        found = compare_documents(left, right)
        splits, moved = found.splits, found.moved
    return StoreDiff(
        a=str(a),
        b=str(b),
        identical=identical,
        facts=differing_facts(left.manifest, right.manifest),
        documents=splits,
        moved=moved,
        trained_share=_shares(left.manifest, right.manifest),
    )


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
