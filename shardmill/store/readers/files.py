"""The shard files of one token space, as they were when it was opened.

A file is opened only if it still has its size and its modification time. So no
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
import numpy.typing as npt

from shardmill.errors import DamagedStoreError, OptionError, StoreError
from shardmill.records import IntArray, OffsetArray, TokenFile
from shardmill.store.layout import ITEMSIZE

if TYPE_CHECKING:
    from shardmill.store import Store


DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Bytes of a token to the dtype of a shard on disk."""

BLOCK_BYTES = 256 * 1024
"""The buffer of gathered ids before their cast: small enough for a core's own cache."""

WindowView = npt.NDArray[np.void]

_OPEN = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
"""A pipe instead of a shard must not block; its size is then found to be wrong."""

_CHECK = "check the store with `shardmill verify`, then copy or build it again"


class ShardFiles:
    """The non-empty files, in order. Holds names and numbers, some hundred bytes per shard."""

    def __init__(
        self,
        paths: list[str],
        numbers: OffsetArray,
        width: int,
        modified: OffsetArray | None = None,
    ) -> None:
        """`numbers` (2, shards): tokens of each shard, bytes before the first. `width`: bytes of a
        token. `modified`: when each was written, in ns; None: look, and check the sizes."""
        self.paths, self.width = paths, width
        self.counts, self.offsets = numbers
        self._of: tuple[Store, str] | None = None  # the store and the split they come from
        self._modified = self._modification_times() if modified is None else modified

    @classmethod
    def of_files(cls, files: Iterable[TokenFile]) -> ShardFiles:
        """Files that need not come from a store; all of one dtype."""
        listed = list(files)
        widths = [_width(file) for file in listed]
        for file, width in zip(listed, widths, strict=True):
            if width != widths[0]:
                raise OptionError(
                    f"mixed dtypes: {listed[0].path} is {listed[0].dtype}, but {file.path} is "
                    f"{file.dtype}; read them apart"
                )
        held = [file for file in listed if file.num_tokens]
        numbers = [(file.num_tokens, file.offset) for file in held]
        return cls(
            [str(file.path.absolute()) for file in held],
            np.ascontiguousarray(np.array(numbers, np.int64).reshape(-1, 2).T),
            widths[0] if widths else 2,
        )

    @classmethod
    def of_store(cls, store: Store, split: str) -> ShardFiles:
        """The shards of a split, whose sizes the store has checked. They pickle as the store."""
        filled = [shard for shard in store.entry(split).shards if shard.tokens]
        numbers = np.zeros((2, len(filled)), np.int64)
        numbers[0] = [shard.tokens for shard in filled]
        paths = [f"{store.folder}/{shard.file}" for shard in filled]
        # only the last shard can be empty
        files = cls(paths, numbers, ITEMSIZE[store.dtype], store.modified[split][: len(filled)])
        files._of = store, split
        return files

    def __len__(self) -> int:
        return len(self.paths)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._of is not None:
            return ShardFiles.of_store, self._of
        return ShardFiles, (self.paths, np.stack((self.counts, self.offsets)), self.width)

    def file_bytes(self, shard: int) -> int:
        """Of its tokens and of what comes before them."""
        return int(self.offsets[shard] + self.counts[shard] * self.width)

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
                f"({self.counts[shard]:,} tokens of {self.width} bytes"
                f"{f' after a header of {offset:,}' if offset else ''}); {_CHECK}"
            )

    def _missing(self, shard: int) -> DamagedStoreError:
        return DamagedStoreError(
            f"{self.paths[shard]} is missing: found no file, wanted {self.file_bytes(shard):,} "
            "bytes; the store was moved, replaced or removed; open it again where it is now"
        )


def _width(file: TokenFile) -> int:
    width = ITEMSIZE.get(file.dtype)
    if width is None:
        raise OptionError(f"{file.path}: dtype {file.dtype!r}; wanted one of {sorted(ITEMSIZE)}")
    if file.num_tokens < 0:
        raise OptionError(f"{file.path}: {file.num_tokens:,} tokens; wanted 0 or more")
    if file.offset < 0 or file.offset % width:
        raise OptionError(
            f"{file.path}: tokens begin at byte {file.offset:,}; wanted a multiple of {width}, "
            "the bytes of a token"
        )
    return width


def running_edges(counts: IntArray) -> OffsetArray:
    """[3, 2] -> [0, 3, 5]."""
    edges = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def part_of(edges: OffsetArray, positions: OffsetArray) -> OffsetArray:
    """The part of each token position. Parts are not empty, and positions are inside."""
    return edges.searchsorted(positions, side="right") - 1


def view_windows(tokens: npt.NDArray[Any], length: int) -> WindowView:
    """Every window of `length` tokens as one opaque item: item `i` begins at token `i`, and numpy
    gathers such items with one memcpy each. Shares the memory of `tokens`."""
    shape = (max(0, len(tokens) - length + 1),)
    width = tokens.itemsize
    return np.ndarray(shape, f"V{length * width}", buffer=tokens, strides=(width,))


def take(values: npt.NDArray[Any], starts: OffsetArray, size: int) -> npt.NDArray[Any]:
    """(n, size): the values from each start on. Starts were checked."""
    if size == 1:
        return values[starts, None]
    return view_windows(values, size)[starts].view(values.dtype).reshape(-1, size)


def pieces(edges: OffsetArray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut `start..stop` at the edges: (part, start, stop) of each piece, in order."""
    part = int(part_of(edges, np.array([start], np.int64))[0])
    while start < stop:
        end = min(stop, int(edges[part + 1]))
        yield part, start, end
        part, start = part + 1, end
