"""Sources cut at places that depend on the input alone, and read piece by piece.

In: a source.  Out: its grains; the batches of some of them, one grain behind the other.
Promise: grains are a function of the input, so batches, which never cross them, are the same
however the work is divided later; a cursor names the grain and the place in it.
Not here: which grains a worker gets (units.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardmill.errors import BuildError
from shardmill.protocols import CuttableSource, Source, continues
from shardmill.records import Cursor, TextBatch

GRAIN_BYTES = 8 * 2**20
"""Two batches. A ledger counts whole batches when a budget closes a feed, so this is a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrainBatch:
    """A batch and its place in the rows of its file. Its drops count rows from its own first."""

    batch: TextBatch  # the cursor is one of the grains
    begins: bool  # its rows are the first of a file, or it has none
    grain: str  # the name of its grain: a file, or which part of it
    number: int  # of its grain among those that are read


def grains_of(source: Source) -> Sequence[Source]:
    """The grains of a source, in order; a source that cannot be cut is one."""
    if not isinstance(source, CuttableSource):
        return (source,)
    return source.cut(GRAIN_BYTES) or (source,)


def grain_sizes(grains: Sequence[Source]) -> list[int]:
    """Bytes of each grain, about. From what is known of its files: asking a grain may read a
    footer, and there are very many grains."""
    files: list[Sequence[Any]] = [getattr(grain, "files", ()) for grain in grains]
    parts = Counter(mine[0].name for mine in files if len(mine) == 1)
    return [
        sum(file.num_bytes for file in mine) // (parts[mine[0].name] if len(mine) == 1 else 1)
        if mine
        else GRAIN_BYTES
        for mine in files
    ]


def read_grains(
    grains: Sequence[Source], cursor: Cursor | None
) -> Generator[GrainBatch, None, None]:
    """The batches of the grains, from the start or from a cursor of theirs on."""
    first, inner, rows = _place(grains, cursor)
    for number in range(first, len(grains)):
        begins = not rows and not continues(grains[number])
        for batch in grains[number].batches(inner):
            drops = tuple(
                drop if drop.row is None else replace(drop, row=drop.row - rows)
                for drop in batch.drops
            )
            rows += batch.num_rows
            place: Cursor = {"grain": number, "cursor": batch.cursor, "rows": rows}
            yield GrainBatch(
                batch=replace(batch, drops=drops, cursor=place),
                begins=begins,
                grain=grains[number].name,
                number=number,
            )
            begins = False
        inner, rows = None, 0


def _place(grains: Sequence[Source], cursor: Cursor | None) -> tuple[int, Cursor | None, int]:
    """(grain, place in it, rows of it that were read)."""
    if cursor is None:
        return 0, None, 0
    number, inner, rows = (cursor.get(key) for key in ("grain", "cursor", "rows"))
    if not (
        isinstance(number, int)
        and 0 <= number < len(grains)
        and isinstance(inner, dict)
        and isinstance(rows, int)
    ):
        raise BuildError(
            f"a receipt holds the cursor {cursor!r:.200}, which is no place among "
            f"{len(grains):,} grains: start again with overwrite=True"
        )
    return number, inner, rows
