"""The shard files of one token space, as they were when it was opened.

A descriptor is given only for a file that still has its size and its modification time. So no
mapped page is past the end of a file, where reading would kill the process, and shards of a
replaced store are never mixed with the old ones. Nothing can be promised about a file that is cut
while it is mapped. Files pickle by name and are checked again where they arrive; those of a store
through the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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

_CHECK = "check the store with `shardmill verify`, then copy or build it again"


class ShardFiles:
    """The non-empty files, in order. Holds names and numbers, some hundred bytes per shard."""

    def __init__(self, files: Iterable[TokenFile], *, of: tuple[Store, str] | None = None) -> None:
        listed = [(file, _width(file)) for file in files]
        held = [(file, width) for file, width in listed if file.num_tokens]
        self.width = max((width for _, width in listed), default=2)  # of the widest token
        self.paths = [str(file.path.absolute()) for file, _ in held]
        self.counts: OffsetArray = np.array([file.num_tokens for file, _ in held], np.int64)
        self.widths: OffsetArray = np.array([width for _, width in held], np.int64)
        self.offsets: OffsetArray = np.array([file.offset for file, _ in held], np.int64)
        self._of = of  # the store and the split, when they come from one
        self._modified = self._modification_times()

    @classmethod
    def of_store(cls, store: Store, split: str) -> ShardFiles:
        """The shards of a split, whose sizes the store has checked. They pickle as the store."""
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
        return ShardFiles._reopen, (self.paths, numbers, self.width)

    @classmethod
    def _reopen(cls, paths: list[str], numbers: OffsetArray, width: int) -> ShardFiles:
        files = cls(())
        files.paths, files.width = paths, width
        files.counts, files.widths, files.offsets = numbers
        files._modified = files._modification_times()
        return files

    def num_bytes(self, shard: int) -> int:
        """Of its tokens."""
        return int(self.counts[shard] * self.widths[shard])

    def file_bytes(self, shard: int) -> int:
        """Of its tokens and of what comes before them."""
        return int(self.offsets[shard]) + self.num_bytes(shard)

    def open(self, shard: int) -> int:
        """A read-only descriptor of a shard that has not changed. The caller closes it."""
        path = self.paths[shard]
        try:
            descriptor = os.open(path, _OPEN)
        except FileNotFoundError as missing:
            raise self._missing(shard) from missing
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            found = os.fstat(descriptor)
            self._check_size(shard, found.st_size)
            if found.st_mtime_ns != self._modified[shard]:
                raise DamagedStoreError(
                    f"{path} was written to after it was opened for reading (modified at "
                    f"{found.st_mtime_ns} ns, was {self._modified[shard]} ns): old and new shards "
                    "are not mixed; open the store again"
                )
        except DamagedStoreError:
            os.close(descriptor)
            raise
        return descriptor

    def _modification_times(self) -> OffsetArray:
        """Of all shards, each after a check of its size."""
        times = np.empty(len(self), np.int64)
        for shard, path in enumerate(self.paths):
            try:
                found = os.stat(path)  # noqa: PTH116 - plain strings: 100,000 of them
            except FileNotFoundError as missing:
                raise self._missing(shard) from missing
            self._check_size(shard, found.st_size)
            times[shard] = found.st_mtime_ns
        return times

    def _check_size(self, shard: int, found: int) -> None:
        wanted, offset = self.file_bytes(shard), self.offsets[shard]
        if found != wanted:
            raise DamagedStoreError(
                f"{self.paths[shard]}: found {found:,} bytes, wanted {wanted:,} "
                f"({self.counts[shard]:,} tokens of {self.widths[shard]} bytes"
                f"{f' after a header of {offset:,}' if offset else ''}); {_CHECK}"
            )

    def _missing(self, shard: int) -> DamagedStoreError:
        return DamagedStoreError(
            f"{self.paths[shard]} is missing: found no file, wanted {self.file_bytes(shard):,} "
            "bytes; the store was moved, replaced or removed; open it again where it is now"
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
            "the bytes of a token"
        )
    return width


def running_edges(counts: OffsetArray) -> OffsetArray:
    """[3, 2] -> [0, 3, 5]."""
    edges = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def part_of(edges: OffsetArray, positions: OffsetArray) -> OffsetArray:
    """The part of each token position. Parts are not empty, and positions are inside."""
    return edges.searchsorted(positions, side="right") - 1


def pieces(edges: OffsetArray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut `start..stop` at the edges: (part, start, stop) of each piece, in order."""
    part = int(part_of(edges, np.array([start], np.int64))[0])
    while start < stop:
        end = min(stop, int(edges[part + 1]))
        yield part, start, end
        part, start = part + 1, end
