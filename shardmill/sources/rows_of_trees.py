"""Which rows make a tree, when each row is one message.

In: rows in order, each with the tree it names.  Out: units of rows whose trees are whole.
Promise: where all rows of a tree lie together, as the published sets have them, a unit is one tree
and memory is one tree's. Whether they do is found by reading the trees' names once, beforehand, so
that it does not depend on where reading starts. Where they do not, or a row names no tree, all rows
are one unit, held in memory up to `MAX_HELD_BYTES` of text, and joined by their ids alone.
Not here: the threads (see `shape_trees`). Rows that do not fit go with the tree before them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardmill.errors import SourceError
from shardmill.records import Drop
from shardmill.sources.chatbatches import Spot, Unit
from shardmill.sources.shape_trees import TreeRow, threads
from shardmill.sources.shapes import Item

logger = logging.getLogger(__name__)

MAX_HELD_BYTES = 512 * 2**20
"""Of text, when the rows of a tree do not lie together."""


class PlacedRow(NamedTuple):
    """One row, or the drop that became of it, and the spot behind it."""

    row: TreeRow | Drop
    end: Spot
    repaired: bool = False


def trees_lie_together(trees: Iterable[object]) -> bool:
    """Does each tree's name come in one run only, and on every row? Keeps 8 bytes per tree."""
    closed: set[bytes] = set()
    current: str | None = None
    for tree in trees:
        if not isinstance(tree, str):
            return False
        if tree == current:
            continue
        key = hashlib.blake2b(tree.encode("utf-8", "replace"), digest_size=8).digest()
        if key in closed:
            return False
        closed.add(key)
        current = tree
    return True


def units_of_trees(rows: Iterable[PlacedRow], *, together: bool, name: str) -> Iterator[Unit]:
    """Units in order; `together` is what `trees_lie_together` found."""
    held: list[PlacedRow] = []
    tree: str | None = None
    num_bytes = 0
    for placed in rows:
        row = placed.row
        if isinstance(row, TreeRow):
            if together and tree is not None and row.tree != tree:
                yield _unit(held)
                held, num_bytes = [], 0
            tree = row.tree
            num_bytes += len(row.message["content"])
            if not together and num_bytes > MAX_HELD_BYTES:
                raise SourceError(
                    f"source {name!r}: the rows of a tree do not lie together, and all of them are "
                    f"more than the {MAX_HELD_BYTES:,} bytes that are held; sort the rows by "
                    "message_tree_id"
                )
        held.append(placed)
    if held:
        yield _unit(held)


def _unit(held: list[PlacedRow]) -> Unit:
    repaired = any(placed.repaired for placed in held)
    return Unit(_items([placed.row for placed in held]), held[-1].end, repaired)


def _items(rows: list[TreeRow | Drop]) -> Iterator[Item]:
    yield from threads([row for row in rows if isinstance(row, TreeRow)])
    yield from (row for row in rows if isinstance(row, Drop))
