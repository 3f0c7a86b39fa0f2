"""A store at a glance, and its shards.

In: a store that is open.  Out: facts for JSON.
Promise: the manifest's own numbers; the work does not grow with documents or tokens.
Not here: documents (documents), contents of shards (checking).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shardmill.errors import OptionError, StoreError
from shardmill.inspector.opened import OpenStore
from shardmill.inspector.shelf import Shelf
from shardmill.records import JSON
from shardmill.shards import Manifest, SplitEntry
from shardmill.shards.layout import DTYPES, ITEMSIZE


def store_list(shelf: Shelf) -> list[JSON]:
    """A line for each store; one that cannot be opened has its reason."""
    lines: list[JSON] = []
    for number, path in enumerate(shelf.paths):
        found = shelf.summary(number)
        lines.append(
            {
                "store": number,
                "name": shelf.names[number],
                "path": str(path),
                "kind": found.kind,
                "splits": list(found.splits),
                "error": found.error,
            }
        )
    return lines


def store_facts(number: int, opened: OpenStore, shelf: Shelf) -> dict[str, JSON]:
    """Everything that fits a first page."""
    store, manifest = opened.store, opened.store.manifest
    plain: dict[str, Any] = msgspec.to_builtins(
        {
            name: getattr(manifest, name)
            for name in ("ledger", "sources", "options", "produced_by", "special_token_ids")
        }
    )
    repaired = plain["ledger"]["repaired"]
    return {
        "store": number,
        "name": shelf.names[number],
        "path": str(store.folder),
        "kind": "chat" if store.is_chat else "text",
        "unit": manifest.unit,
        "dtype": store.dtype,
        "vocab_size": manifest.vocab_size,
        "fingerprint": store.fingerprint,
        "tokenizer": {
            "name": shelf.tokenizer_name(opened),
            "open": opened.reading.words is not None,
            "why": opened.reading.why,
            "fingerprint": manifest.tokenizer_fingerprint,
        },
        "splits": [split_facts(manifest, name) for name in store.splits],
        **plain,
        "repaired": repaired,
        "plans": [plan_line(name, opened) for name in opened.plans()],
        "exclusions": exclusion_facts(opened),
    }


def exclusion_facts(opened: OpenStore) -> dict[str, JSON] | None:
    """What is not trained on any more; None: everything is."""
    try:
        found = opened.exclusions
    except StoreError as error:
        return {"entries": 0, "documents": 0, "tokens": 0, "sha256": "", "error": str(error)}
    if not found.entries:
        return None
    return {
        "error": None,
        "entries": len(found.entries),
        "documents": sum(len(entry.documents or ()) for entry in found.entries),
        "tokens": sum(found.num_tokens(split) for split in opened.splits),
        "sha256": found.sha256,
    }


def split_facts(manifest: Manifest, name: str) -> dict[str, JSON]:
    split = manifest.splits[name]
    return {
        "name": name,
        "tokens": split.tokens,
        "documents": split.documents,
        "shards": len(split.shards),
        "bytes": split.tokens * ITEMSIZE[DTYPES[manifest.token_dtype]],
        "trained_tokens": split.chat.trained_tokens if split.chat else None,
        "turns": split.chat.num_turns if split.chat else None,
    }


def plan_line(name: str, opened: OpenStore) -> dict[str, JSON]:
    """A plan in the list; one that cannot be used has its reason."""
    plan = opened.plans()[name]
    if isinstance(plan, StoreError):
        return {"name": name, "error": str(plan)}
    facts = plan.facts
    return {
        "name": name,
        "split": facts.split,
        "seq_len": facts.options.seq_len,
        "rows": facts.metrics.num_rows,
        "pieces": facts.metrics.num_pieces,
        "utilisation": facts.utilisation,
        "error": None,
    }


def shard_page(
    manifest: Manifest, name: str, page: tuple[int, int], statuses: Mapping[str, str] | None
) -> dict[str, JSON]:
    """Some shards of a split. `statuses` of files that are not well; None: nobody looked."""
    start, limit = page
    split, width = known_split(manifest, name), ITEMSIZE[DTYPES[manifest.token_dtype]]
    return {
        "total": len(split.shards),
        "shards": [
            {
                "shard": start + place,
                "file": shard.file,
                "tokens": shard.tokens,
                "documents": shard.documents,
                "bytes": shard.tokens * width,
                "sha256": shard.sha256,
                "status": "unchecked" if statuses is None else statuses.get(shard.file, "ok"),
            }
            for place, shard in enumerate(split.shards[start : start + limit])
        ],
    }


def known_split(manifest: Manifest, name: str) -> SplitEntry:
    if name not in manifest.splits:
        raise OptionError(f"split={name!r}: wanted one of {list(manifest.splits)}")
    return manifest.splits[name]
