"""The shard files of one space, as they were when it was opened.

In: `TokenFile` records.  Out: file descriptors, ready to be mapped.
Promise: a descriptor is given only for a file that still has the size it must have and the
modification time it had when it, or the store it belongs to, was opened; so no mapped page lies
past the end of a file (reading one kills the process) and shards of a replaced store are never
mixed with those of the old one.
They pickle by name and are looked at again where they arrive: those of a store through the store,
which refuses if it was built anew in the meantime.
Not here: mapping, reading. Nothing can be promised about a file that is cut while it is mapped.

Where every shard lies in one address range.

In: tokens, bytes a token and header bytes of each shard.  Out: a `Layout`, numbers only.
Promise: shards begin on pages and never overlap. Shards of one dtype that fill whole pages lie
behind one another without a gap and form one segment, inside which a window may cross shards
as if there were no edge.
Not here: files, memory, reading.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import DamagedStoreError, OptionError, StoreError
from shardmill.records import OffsetArray, TokenFile

if TYPE_CHECKING:
    from shardmill.store import Store


DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Bytes of a token to the dtype of a shard on disk."""

_WIDTHS = {"uint16": 2, "uint32": 4}

_OPEN = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
"""A pipe in the place of a shard must not block; its size is then found to be wrong."""


class ShardFiles:
    """The non-empty files, in order. Holds names and numbers, some hundred bytes a shard."""

    def __init__(self, files: Iterable[TokenFile], *, of: tuple[Store, str] | None = None) -> None:
        listed = [(file, _width(file)) for file in files]
        held = [(file, width) for file, width in listed if file.num_tokens]
        self.width = max((width for _, width in listed), default=2)  # of the widest token
        self.paths = [str(file.path.absolute()) for file, _ in held]
        self.counts: OffsetArray = np.array([file.num_tokens for file, _ in held], np.int64)
        self.widths: OffsetArray = np.array([width for _, width in held], np.int64)
        self.offsets: OffsetArray = np.array([file.offset for file, _ in held], np.int64)
        self._of = of  # the store and the split, when they come from one
        self._modified = self._look_at_all()

    @classmethod
    def of_store(cls, store: Store, split: str) -> ShardFiles:
        """The shards of a split, which the store has looked at. Pickling them pickles the store,
        which knows itself again."""
        files = cls((), of=(store, split))
        filled = [shard for shard in store.entry(split).shards if shard.tokens]
        files.width = _WIDTHS[store.dtype]
        files.paths = [f"{store.folder}/{shard.file}" for shard in filled]
        files.counts = np.array([shard.tokens for shard in filled], np.int64)
        files.widths = np.full(len(filled), files.width, np.int64)
        files.offsets = np.zeros(len(filled), np.int64)
        # only the last shard can be empty
        files._modified = store.modified[split][: len(filled)]
        return files

    def __len__(self) -> int:
        return len(self.paths)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._of is not None:
            return ShardFiles.of_store, self._of
        numbers = np.stack((self.counts, self.widths, self.offsets))
        return ShardFiles._again, (self.paths, numbers, self.width)

    @classmethod
    def _again(cls, paths: list[str], numbers: OffsetArray, width: int) -> ShardFiles:
        files = cls(())
        files.paths, files.width = paths, width
        files.counts, files.widths, files.offsets = numbers
        files._modified = files._look_at_all()
        return files

    def num_bytes(self, shard: int) -> int:
        """Of its tokens."""
        return int(self.counts[shard] * self.widths[shard])

    def file_bytes(self, shard: int) -> int:
        """Of its tokens and of what comes before them."""
        return int(self.offsets[shard]) + self.num_bytes(shard)

    def open(self, shard: int) -> int:
        """A read-only descriptor of a shard that is still the one that was opened.

        The caller closes it.
        """
        try:
            descriptor = os.open(self.paths[shard], _OPEN)
        except FileNotFoundError as missing:
            raise self._missing(shard) from missing
        except OSError as error:
            raise StoreError(f"{self.paths[shard]}: cannot be opened: {error.strerror}") from error
        found = os.fstat(descriptor)
        problem = self._wrong_size(shard, found) or self._rewritten(shard, found)
        if problem:
            os.close(descriptor)
            raise DamagedStoreError(problem)
        return descriptor

    def _look_at_all(self) -> OffsetArray:
        looks = (self._look(shard) for shard in range(len(self)))
        return np.fromiter(looks, np.int64, count=len(self))

    def _look(self, shard: int) -> int:
        """The modification time of a shard of the right size."""
        try:
            found = os.stat(self.paths[shard])  # noqa: PTH116 - plain strings: 100,000 of them
        except FileNotFoundError as missing:
            raise self._missing(shard) from missing
        problem = self._wrong_size(shard, found)
        if problem:
            raise DamagedStoreError(problem)
        return found.st_mtime_ns

    def _wrong_size(self, shard: int, found: os.stat_result) -> str:
        wanted = self.file_bytes(shard)
        if found.st_size == wanted:
            return ""
        return (
            f"{self.paths[shard]}: found {found.st_size:,} bytes, wanted {wanted:,} "
            f"({self.counts[shard]:,} tokens of {self.widths[shard]} bytes"
            + (f" behind {self.offsets[shard]:,} others" if self.offsets[shard] else "")
            + "); check the store with `shardmill verify`, then copy or build it again"
        )

    def _rewritten(self, shard: int, found: os.stat_result) -> str:
        if found.st_mtime_ns == self._modified[shard]:
            return ""
        return (
            f"{self.paths[shard]} was written to after it was opened for reading (modified at "
            f"{found.st_mtime_ns} ns, was {self._modified[shard]} ns): old and new shards are not "
            f"mixed; open the store again"
        )

    def _missing(self, shard: int) -> DamagedStoreError:
        return DamagedStoreError(
            f"{self.paths[shard]} is missing: found no file, wanted {self.file_bytes(shard):,} "
            f"bytes; the store was moved, replaced or removed; open it again where it is now"
        )


def _width(file: TokenFile) -> int:
    width = _WIDTHS.get(file.dtype)
    if width is None:
        raise OptionError(f"{file.path}: dtype {file.dtype!r}; wanted one of {sorted(_WIDTHS)}")
    if file.num_tokens < 0:
        raise OptionError(f"{file.path}: {file.num_tokens:,} tokens; wanted 0 or more")
    if file.offset < 0 or file.offset % width:
        raise OptionError(
            f"{file.path}: tokens begin at byte {file.offset:,}; wanted a multiple of {width}, "
            f"the bytes of a token"
        )
    return width


@dataclass(frozen=True, slots=True, eq=False)
class AddressLayout:
    """Token positions are those of the whole space; items count from the start of the range."""

    edges: OffsetArray  # (shards + 1,) shard k holds the tokens edges[k]..edges[k + 1]
    addresses: OffsetArray  # (shards,) where its map begins in the range, in bytes, on a page
    leads: OffsetArray  # (shards,) bytes from there to its first token: the end of a header
    num_bytes: int  # of the whole range, whole pages
    segment_edges: OffsetArray  # (segments + 1,) the same for segments
    segment_shifts: OffsetArray  # (segments,) token position + shift = item in the range
    segment_widths: OffsetArray  # (segments,) bytes of an item


def plan_layout(
    counts: OffsetArray,
    widths: OffsetArray,
    *,
    page: int,
    huge_page: int,
    leads: OffsetArray | None = None,
) -> AddressLayout:
    """Lay non-empty shards behind one another, each on its own page.

    page = 8 bytes, width 2, counts [4, 3, 4]: addresses [0, 8, 16], segment edges [0, 7, 11],
    shifts [0, 1]: the three tokens of the second shard leave room for one that is not there.
    Behind the end of a segment of large shards the next begins on a huge page: addresses are free.
    `leads`: bytes mapped before the first token of each shard, less than a page; none unless told.
    """
    leads = np.zeros(len(counts), np.int64) if leads is None else leads
    if len(counts) == 0:
        none, zero = np.zeros(0, np.int64), np.zeros(1, np.int64)
        return AddressLayout(zero, none, none, 0, zero, none, none)
    edges = running_edges(counts)
    sizes = leads + counts * widths
    gap = (sizes[:-1] % page != 0) | (leads[1:] != 0)
    closes = np.append(gap | (widths[:-1] != widths[1:]), True)
    grain = np.where(closes & (sizes >= huge_page), huge_page, page)
    addresses = running_edges(-(-sizes // grain) * grain)
    heads = np.append(0, np.flatnonzero(closes[:-1]) + 1)
    return AddressLayout(
        edges=edges,
        addresses=addresses[:-1],
        leads=leads,
        num_bytes=int(addresses[-1]),
        segment_edges=np.append(edges[heads], edges[-1]),
        segment_shifts=(addresses[:-1] + leads)[heads] // widths[heads] - edges[heads],
        segment_widths=widths[heads],
    )


def running_edges(counts: OffsetArray) -> OffsetArray:
    """[3, 2] -> [0, 3, 5]."""
    edges = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def part_of(edges: OffsetArray, positions: OffsetArray) -> OffsetArray:
    """Which part each token position lies in. Parts are not empty, positions inside."""
    return edges.searchsorted(positions, side="right") - 1


def pieces(edges: OffsetArray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut `start..stop` at the edges: (part, start, stop) of each piece, in order."""
    part = int(part_of(edges, np.array([start], np.int64))[0])
    while start < stop:
        end = min(stop, int(edges[part + 1]))
        yield part, start, end
        part, start = part + 1, end
