"""Which part of the input every document came from: one small table beside the store.

The table is written atomically, and equal builds write equal bytes. `read_origins` returns what was
written, to the byte, for this very store. A store may have none. FORMAT.md describes the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from shardmill.errors import BuildError, DamagedStoreError
from shardmill.records import OffsetArray
from shardmill.storage.atomic import atomic_write, cannot_write
from shardmill.store.layout import ORIGINS, decode_sealed, encode_sealed
from shardmill.store.manifest import Count, Manifest, Sha256, fingerprint, read_plain_file

FEED, GRAIN, MARK, ROWS = range(4)
COLUMNS = ("feed", "grain", "mark", "rows")
"""The first columns of a table; the first document of each split follows."""
MAX_ORIGINS_BYTES = 2**30
_NEXT = "copy it again, or remove it: the store does without"


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["shardmill-origins"]
    version: Literal[1]
    store: Sha256
    fill: list[list[str]]
    splits: Annotated[list[str], msgspec.Meta(min_length=1)]
    entries: Count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origins:
    """Where documents came from, by parts of the input, in the order in which they were read."""

    fill: tuple[tuple[str, ...], ...]  # for each source the splits that it fills, in this order
    splits: tuple[str, ...]  # of the columns after COLUMNS
    table: OffsetArray  # (entries, len(COLUMNS) + len(splits)) see FORMAT.md

    def first(self, split: str) -> OffsetArray:
        """(entries,) how many documents of a split come before each part."""
        return self.table[:, len(COLUMNS) + self.splits.index(split)]


def write_origins(folder: Path, origins: Origins, manifest: Manifest) -> None:
    """Write the table into the folder of the finished store with this manifest."""
    path = folder / ORIGINS
    header = _Header(
        format="shardmill-origins",
        version=1,
        store=fingerprint(manifest),
        fill=[list(splits) for splits in origins.fill],
        splits=list(origins.splits),
        entries=len(origins.table),
    )
    for problem in _problems(header, origins, manifest):
        raise BuildError(f"{path}: refusing to write this table: {problem}")
    data = encode_sealed(header, np.ascontiguousarray(origins.table, "<i8").tobytes())
    try:
        with atomic_write(path) as file:
            file.write(data)
    except OSError as error:
        raise cannot_write(path, error) from error


def read_origins(folder: Path, manifest: Manifest) -> Origins | None:
    """The table of the store at `folder`, after all checks; None when it has none."""
    path = Path(folder) / ORIGINS
    data = read_plain_file(path, MAX_ORIGINS_BYTES)
    return None if data is None else decode_origins(data, manifest, where=str(path))


def decode_origins(data: bytes, manifest: Manifest, *, where: str) -> Origins:
    """The table that these bytes are. They are not trusted."""
    header, body, _ = decode_sealed(
        memoryview(data),
        _Header,
        "shardmill-origins",
        where=where,
        what="a table of origins",
        advice=_NEXT,
    )
    width = len(COLUMNS) + len(header.splits)
    if len(body) != 8 * width * header.entries:
        raise _damaged(where, f"not of {header.entries:,} entries")
    origins = Origins(
        fill=tuple(tuple(splits) for splits in header.fill),
        splits=tuple(header.splits),
        table=np.frombuffer(body, "<i8").reshape(header.entries, width),
    )
    for problem in _problems(header, origins, manifest):
        raise _damaged(where, problem)
    return origins


def _problems(header: _Header, origins: Origins, manifest: Manifest) -> Iterator[str]:
    """What cannot be true of a table of this store, the most telling first."""
    if header.store != fingerprint(manifest):
        yield f"of another store (fingerprint {header.store[:12]})"
        return
    if origins.splits != tuple(sorted(manifest.splits)):
        yield f"for the splits {list(origins.splits)}, the store has {sorted(manifest.splits)}"
        return
    if any(set(splits) - set(origins.splits) for splits in origins.fill):
        yield "a source fills a split that the store does not have"
    table = origins.table
    if not len(table):
        return
    order = table[:, FEED] * (int(table[:, GRAIN].max()) + 1) + table[:, GRAIN]
    if table.min() < 0 or table[:, FEED].max() >= len(origins.fill):
        yield "a number in it is impossible"
    elif (np.diff(order) <= 0).any() or (np.diff(table[:, len(COLUMNS) :], axis=0) < 0).any():
        yield "its entries do not rise"
    for split in origins.splits:
        if origins.first(split)[0] or origins.first(split)[-1] > manifest.splits[split].documents:
            yield f"its documents of split {split!r} are not those of the store"


def _damaged(where: str, what: str) -> DamagedStoreError:
    return DamagedStoreError(f"{where}: {what}; {_NEXT}")
