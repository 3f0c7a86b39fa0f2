"""Pack plans: how full rows are, which examples share one, one row token by token.

In: the rows of a plan.  Out: facts for JSON.
Promise: rows are those of `PackSpace`; of a plan with many rows evenly spread ones are counted, and
it is said how many; the emptiest are told of those.
Not here: making plans (build), what a training reads (steps).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmill.inspector.documents import even_runs
from shardmill.inspector.opened import OpenStore
from shardmill.inspector.query import NotThereError
from shardmill.inspector.view import shown, some_of
from shardmill.mapped import PackSpace, RowPieces
from shardmill.records import JSON, OffsetArray

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
        *(array[part].tolist() for array in (pieces.examples, pieces.places, pieces.lengths)),
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
    begins, ends = pieces.places, pieces.places + pieces.lengths
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
