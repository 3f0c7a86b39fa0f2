"""Other packers, each in a file of its own, each optional.

A file has `prepare(lengths, capacity)`, which makes what the packer takes of lengths that all fit
into a row; `pack(prepared, capacity)`, which is timed; and `rows(packed, lengths)`, which tells as
`Rows` what came out. Every packing is checked before anything is said about its speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peers import Peer

Numbers = npt.NDArray[np.int64]

PACKERS = (
    Peer("multipack", "pack_multipack", "numba"),
    Peer("OLMo-core", "pack_olmo", "ai2-olmo-core"),
    Peer("TRL", "pack_trl", "trl"),
)
SCAN = Peer("first-fit scan", "pack_scan", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """One contender: chat lengths in, rows out, and a call between the two that is timed."""

    name: str
    peer: bool
    prepare: Callable[[Numbers, int], Any]
    pack: Callable[[Any, int], Any]
    over_bound: Callable[[Any, Numbers, int], float]  # checks the rows, and counts them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Which items are in which row: of the first row, then of the second, and so on."""

    items: Numbers  # (n,) numbers of lengths
    counts: Numbers  # (num_rows,) items of each row


def check(name: str, rows: Rows, lengths: npt.ArrayLike, capacity: int) -> None:
    """Every item in exactly one row, no row empty or over capacity; else the reason."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if not np.array_equal(np.sort(rows.items), np.arange(len(sizes))):
        raise ValueError(f"{name}: not every item is in exactly one row")
    if rows.counts.min(initial=1) < 1 or rows.counts.sum() != len(sizes):
        raise ValueError(f"{name}: an empty row, or rows of more items than there are")
    starts = np.cumsum(rows.counts) - rows.counts
    held = np.add.reduceat(sizes[rows.items], starts)
    if held.max() > capacity:
        raise ValueError(f"{name}: row {held.argmax()} holds {held.max()}, capacity {capacity}")


def theirs(peer: Peer) -> Packer:
    module = peer.load()

    def over_bound(packed: Any, lengths: Numbers, capacity: int) -> float:
        pieces = split(lengths, capacity)
        rows = module.rows(packed, pieces)
        check(peer.name, rows, pieces, capacity)
        return len(rows.counts) / -(-int(pieces.sum()) // capacity)

    return Packer(
        name=peer.name,
        peer=True,
        prepare=lambda lengths, capacity: module.prepare(split(lengths, capacity), capacity),
        pack=module.pack,
        over_bound=over_bound,
    )


def split(lengths: Numbers, capacity: int) -> Numbers:
    """The pieces of all, none over capacity."""
    counts = -(-lengths // capacity)
    pieces = np.full(counts.sum(), capacity)
    pieces[np.cumsum(counts) - 1] = lengths - (counts - 1) * capacity
    return pieces


def rows_of_items(row_of: Numbers) -> Rows:
    """From the row of each item."""
    return Rows(items=np.argsort(row_of, kind="stable"), counts=np.bincount(row_of))


def rows_of_lists(lists: list[list[int]]) -> Rows:
    """From the items of each row."""
    counts = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    flat = (item for row in lists for item in row)
    return Rows(items=np.fromiter(flat, dtype=np.int64, count=int(counts.sum())), counts=counts)
