"""A store at a glance, and its shards.

In: a store that is open.  Out: facts for JSON.
Promise: the manifest's own numbers; the work does not grow with documents or tokens.
Not here: documents (documents), contents of shards (checking).

Pack plans: how full rows are, which examples share one, one row token by token.

In: the rows of a plan.  Out: facts for JSON.
Promise: rows are those of `PackSpace`; of a plan with many rows evenly spread ones are counted, and
it is said how many; the emptiest are told of those.
Not here: making plans (build), what a training reads (steps).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from shardmill.errors import OptionError, StoreError
from shardmill.inspect.documents import even_runs
from shardmill.inspect.stores import NotThereError, OpenStore, Shelf
from shardmill.inspect.tokens import shown, some_of
from shardmill.records import JSON, OffsetArray
from shardmill.store import Manifest
from shardmill.store.layout import DTYPES, ITEMSIZE
from shardmill.store.manifest import SplitEntry
from shardmill.store.readers import PackSpace, RowPieces


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


LOOK_AT_ALL = 2**21
"""Rows that are all counted; of more a part is."""
MOST_WASTE = 10_000
"""Rows that are told from the emptiest on."""
_BLOCK = 2**14  # rows at a time
_BINS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fill:
    """How many places of rows are used."""

    looked_at: int
    edges: OffsetArray  # (bins + 1,) used places, half-open
    counts: OffsetArray  # (bins,) rows
    emptiest: OffsetArray  # (k,) numbers of rows, the emptiest first


def plan_facts(opened: OpenStore, name: str, split: str | None) -> dict[str, JSON]:
    """A plan at a glance."""
    space = opened.plan(name, split)
    facts, fill = space.plan.facts, fill_of(opened, name, space)
    edges = fill.edges.tolist()
    return {
        "name": name,
        "split": facts.split,
        "seq_len": facts.options.seq_len,
        "room": facts.options.capacity,
        "rows": facts.metrics.num_rows,
        "utilisation": facts.utilisation,
        "looked_at": fill.looked_at,
        "histogram": [
            {"from": low, "to": high, "count": count}
            for low, high, count in zip(edges[:-1], edges[1:], fill.counts.tolist(), strict=True)
        ],
    }


def row_page(
    opened: OpenStore, name: str, split: str | None, page: tuple[int, int], sort: str
) -> dict[str, JSON]:
    """Some rows: in their order, or the emptiest first."""
    space = opened.plan(name, split)
    start, limit = page
    if sort == "waste":
        order = fill_of(opened, name, space).emptiest
        total, rows = len(order), order[start : start + limit]
    else:
        total = len(space)
        rows = np.arange(min(start, total), min(start + limit, total))
    pieces = space.pieces(rows)
    listed: list[JSON] = [
        row_facts(space, pieces, place, number) for place, number in enumerate(rows.tolist())
    ]
    return {"total": total, "rows": listed}


def row_facts(space: PackSpace, pieces: RowPieces, place: int, number: int) -> dict[str, JSON]:
    """Row `number`, which is row `place` of `pieces`."""
    part = slice(*pieces.offsets[place : place + 2].tolist())
    told = zip(
        *(array[part].tolist() for array in (pieces.examples, pieces.columns, pieces.lengths)),
        strict=True,
    )
    return {
        "row": number,
        "used": int(pieces.used[place]),
        "room": space.plan.facts.options.capacity,
        "pieces": [
            {"example": example, "place": at, "length": length} for example, at, length in told
        ],
    }


def row_view(
    opened: OpenStore, name: str, split: str | None, number: int, page: tuple[int, int]
) -> dict[str, JSON]:
    """A row token by token; a token of no piece has the piece -1."""
    space = opened.plan(name, split)
    if number >= len(space):
        total = len(space)
        has = f"has {total:,}, numbered 0 to {total - 1:,}" if total else "is empty"
        raise NotThereError(f"there is no row {number:,}: the plan {has}")
    pieces, rows = space.pieces([number]), space.rows([number])
    start = min(page[0], space.row_len)
    stop = min(start + page[1], space.row_len)
    begins, ends = pieces.columns, pieces.columns + pieces.lengths
    place = np.arange(start, stop)
    owner = np.searchsorted(begins, place, side="right") - 1
    owner[place >= ends[owner]] = -1
    tokens = some_of(rows.ids[0], start, stop, np.append(begins, ends))
    view = shown(tokens, opened.reading, trained=rows.trained[0, start:stop], piece=owner)
    return {**row_facts(space, pieces, 0, number), "view": view}


def fill_of(opened: OpenStore, name: str, space: PackSpace) -> Fill:
    """Made once for each plan."""
    return opened.keep(("fill", name, space.plan.fingerprint), lambda: measure_fill(space))


def measure_fill(space: PackSpace) -> Fill:
    """Counted a block of rows at a time; of each block only the emptiest rows are kept."""
    room = space.plan.facts.options.capacity
    width = -(-(room + 1) // _BINS)
    edges = np.arange(0, room + 1 + width, width, dtype=np.int64)
    edges[-1] = room + 1
    counts = np.zeros(len(edges) - 1, np.int64)
    looked_at, numbers, used = 0, np.empty(0, np.int64), np.empty(0, np.int64)
    for first, last in even_runs(len(space), LOOK_AT_ALL, _BLOCK):
        rows = np.arange(first, last)
        own = space.pieces(rows).used
        counts += np.bincount(own // width, minlength=len(counts))
        looked_at += len(rows)
        numbers, used = np.append(numbers, rows), np.append(used, own)
        order = np.lexsort((numbers, used))[:MOST_WASTE]
        numbers, used = numbers[order], used[order]
    return Fill(looked_at=looked_at, edges=edges, counts=counts, emptiest=numbers)
