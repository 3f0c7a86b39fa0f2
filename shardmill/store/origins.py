"""Which input every document of a store came from: one small table beside the store.

In: a table, a row for each grain of input in the order of a build, or a folder.  Out: the file
`origins.table`, or the `Origins` read from it.
Promise: the file appears whole or not at all; equal builds write equal bytes; what `read_origins`
returns is what was written, to the byte, and of this very store; a store may have none.
Not here: making the table (build), reading the input again (blame). FORMAT.md has the bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from shardmill.errors import BuildError, DamagedStoreError, ManifestError
from shardmill.records import OffsetArray
from shardmill.storage.atomic import atomic_write, cannot_write
from shardmill.store.entries import Count, Manifest, Sha256
from shardmill.store.exclusions import read_bytes
from shardmill.store.layout import ORIGINS
from shardmill.store.store import fingerprint

FEED, GRAIN, MARK, ROWS = range(4)
COLUMNS = ("feed", "grain", "mark", "rows")
"""The first columns of a table; behind them the first document of each split."""
MAX_ORIGINS_BYTES = 2**30
_HEAD = re.compile(rb'\{"format":"shardmill-origins","version":([0-9]+),')
_UNIT, _SEAL = 64, 32
_MAX_HEADER = 2**20
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
    """Where documents came from, grain by grain, in the order in which they were written."""

    fill: tuple[tuple[str, ...], ...]  # for each feed the splits that it fills, in this order
    splits: tuple[str, ...]  # of the columns behind COLUMNS
    table: OffsetArray  # (entries, len(COLUMNS) + len(splits)) see FORMAT.md

    def first(self, split: str) -> OffsetArray:
        """(entries,) how many documents of a split lie before each grain."""
        return self.table[:, len(COLUMNS) + self.splits.index(split)]


def write_origins(folder: Path, origins: Origins, manifest: Manifest) -> None:
    """Put the table beside the finished store that this manifest is of."""
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
    line = msgspec.json.encode(header)
    line += b" " * (-(len(line) + 1) % _UNIT) + b"\n"
    data = line + np.ascontiguousarray(origins.table, "<i8").tobytes()
    try:
        with atomic_write(path) as file:
            file.write(data + hashlib.sha256(data).digest())
    except OSError as error:
        raise cannot_write(path, error) from error


def read_origins(folder: Path, manifest: Manifest) -> Origins | None:
    """The table of the store at `folder`, after all checks; None when it has none."""
    path = Path(folder) / ORIGINS
    data = read_bytes(path, MAX_ORIGINS_BYTES)
    return None if data is None else decode_origins(data, manifest, where=str(path))


def decode_origins(data: bytes, manifest: Manifest, *, where: str) -> Origins:
    """The table that these bytes are. They are not trusted."""
    version = _HEAD.match(data[: 2 * _UNIT])
    if version is None or len(data) < _UNIT + _SEAL:
        raise ManifestError(f"{where}: no table of origins, or its beginning is damaged; {_NEXT}")
    if int(version[1]) != 1:
        raise ManifestError(
            f"{where}: of version {version[1].decode()}, but this shardmill reads version 1; "
            "upgrade shardmill"
        )
    if hashlib.sha256(data[:-_SEAL]).digest() != data[-_SEAL:]:
        raise _damaged(where, "its sha256 is not the one at its end: changed or cut off")
    line = data[: min(_MAX_HEADER, len(data) - _SEAL)].partition(b"\n")[0]
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _damaged(where, f"its first line is no header ({error})") from error
    width = len(COLUMNS) + len(header.splits)
    body = data[len(line) + 1 : -_SEAL]
    if (len(line) + 1) % _UNIT or len(body) != 8 * width * header.entries:
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
    """What cannot be true of a table of this store, most telling first."""
    if header.store != fingerprint(manifest):
        yield f"of another store (fingerprint {header.store[:12]})"
        return
    if origins.splits != tuple(sorted(manifest.splits)):
        yield f"of the splits {list(origins.splits)}, the store has {sorted(manifest.splits)}"
        return
    if any(set(splits) - set(origins.splits) for splits in origins.fill):
        yield "a feed fills a split that the store has not"
    table = origins.table
    if not len(table):
        return
    places = table[:, FEED] * (int(table[:, GRAIN].max()) + 1) + table[:, GRAIN]
    if table.min() < 0 or table[:, FEED].max() >= len(origins.fill):
        yield "a number in it is impossible"
    elif (np.diff(places) <= 0).any() or (np.diff(table[:, len(COLUMNS) :], axis=0) < 0).any():
        yield "its entries do not rise"
    for split in origins.splits:
        if origins.first(split)[0] or origins.first(split)[-1] > manifest.splits[split].documents:
            yield f"its documents of split {split!r} are not those of the store"


def _damaged(where: str, what: str) -> DamagedStoreError:
    return DamagedStoreError(f"{where}: {what}; {_NEXT}")
