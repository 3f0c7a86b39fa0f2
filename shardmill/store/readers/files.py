"""The shard files of one token space, as they were when it was opened, and reading with `preadv`.

A file is opened only if it still has its size and its modification time. So no
mapped page is past the end of a file, where reading would kill the process, and shards of a
replaced store are never mixed with the old ones. Nothing can be promised about a file that is cut
while it is mapped. Files pickle by name and are checked again where they arrive; those of a store
through the store.

`PreadReader` maps nothing and gives the same tokens as the mapped reader. A file that is cut after
it was opened, or a disk that fails, is an error that names the file; with a map it is a SIGBUS,
which ends the process. Few files are open at a time, however many shards and spaces there are.
Threads may share it.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
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

_MAX_OPEN = 512
"""Descriptors of all readers of a process together; a quarter of its limit if that is less."""

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


class _Descriptor:
    """An open file, closed when the last thread that reads from it drops the reference."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Any = os.close) -> None:  # bound: at exit modules are cleared first
        close(self.number)


class PreadReader:
    """Reads with `preadv`. A shard is opened and checked when it is first read.

    Windows are sorted; those that touch or overlap are one read. A read goes into the caller's rows
    if they have the dtype of the file, otherwise into one block that is then cast as a whole.
    """

    def __init__(self, files: ShardFiles, *, max_open: int) -> None:
        self._files, self._max_open = files, max_open
        self._edges = running_edges(files.counts)
        self._width = files.width
        # of tokens of shard k: byte in the file = position * width + shifts[k]
        self._shifts = files.offsets - self._edges[:-1] * files.width
        self._held: dict[int, _Descriptor] = {}
        with _lock:
            _readers.add(self)

    def fill(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        """Copy the `out.shape[1]` tokens from `starts[i]` on to `out[i]`. Starts were checked."""
        num_rows, length = out.shape
        if not num_rows or not length:
            return
        most = BLOCK_BYTES // self._width
        if length > most:
            for column in range(0, length, most):
                self.fill(starts + column, out[:, column : column + most])
            return
        step = most // length
        for first in range(0, num_rows, step):
            self._fill_block(starts[first : first + step], out[first : first + step])

    def prefetch(self, starts: OffsetArray, length: int) -> None:
        """Ask the kernel to read these windows ahead; where it cannot be asked, do nothing."""
        if not hasattr(os, "posix_fadvise"):
            return
        for start in np.sort(starts).tolist():
            for shard, begin, end in pieces(self._edges, start, start + length):
                at = begin * self._width + int(self._shifts[shard])
                number, size = self._opened(shard).number, (end - begin) * self._width
                os.posix_fadvise(number, at, size, os.POSIX_FADV_WILLNEED)

    def _fill_block(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        num_rows, length = out.shape
        order = starts.argsort(kind="stable")
        rising = starts[order]
        # starts [0 1 9], length 2: a new run begins at the third; runs 0..3 and 9..11
        apart = rising[1:] > rising[:-1] + length
        if apart.all():
            dtype = DTYPES[self._width]
            straight = out.dtype == dtype and out.flags.c_contiguous
            block = out if straight else np.empty(out.shape, dtype)
            self._read(rising, np.full(num_rows, length), order * length, block.reshape(-1))
            if not straight:
                out[...] = block
            return
        heads = np.append(0, np.flatnonzero(apart) + 1)
        tails = np.append(heads[1:], num_rows) - 1
        begins = rising[heads]
        lengths = rising[tails] + length - begins
        edges = running_edges(lengths)
        tokens = np.empty(edges[-1], DTYPES[self._width])
        self._read(begins, lengths, edges[:-1], tokens)
        inside = rising + np.repeat(edges[:-1] - begins, tails - heads + 1)
        out[order] = take(tokens, inside, length)

    def _read(
        self, starts: OffsetArray, lengths: OffsetArray, targets: OffsetArray, out: IntArray
    ) -> None:
        """Copy `lengths[i]` tokens from `starts[i]` on to `out`, from `targets[i]` on."""
        shards = part_of(self._edges, starts)
        crossing = starts + lengths > self._edges[shards + 1]
        if crossing.any():
            starts, lengths, targets = self._cut(starts, lengths, targets, crossing)
            shards = part_of(self._edges, starts)
        width = self._width
        view = out.data.cast("B")
        offsets = (starts * width + self._shifts[shards]).tolist()
        begins, ends = (targets * width).tolist(), ((targets + lengths) * width).tolist()
        held, number, preadv = -1, -1, os.preadv
        for shard, at, begin, end in zip(shards.tolist(), offsets, begins, ends, strict=True):
            if shard != held:
                descriptor = self._opened(shard)  # this reference keeps it open while it is read
                held, number = shard, descriptor.number
            part = view[begin:end]
            try:
                found = preadv(number, (part,), at)
            except OSError as error:
                raise self._unreadable(shard, at, error) from error
            if found != end - begin:
                self._read_bytes(shard, at + found, part[found:])

    def _cut(
        self,
        starts: OffsetArray,
        lengths: OffsetArray,
        targets: OffsetArray,
        crossing: npt.NDArray[np.bool_],
    ) -> tuple[OffsetArray, OffsetArray, OffsetArray]:
        """The same reads; those that cross the end of a shard are cut there."""
        cut = []
        for read in np.flatnonzero(crossing).tolist():
            start, target = int(starts[read]), int(targets[read])
            stop = start + int(lengths[read])
            for _, begin, end in pieces(self._edges, start, stop):
                cut.append((begin, end - begin, target + begin - start))
        whole = ~crossing
        table = np.array(cut, np.int64).T
        kept = np.stack((starts[whole], lengths[whole], targets[whole]))
        found = np.concatenate((kept, table), axis=1)
        starts, lengths, targets = found[:, found[0].argsort(kind="stable")]
        return starts, lengths, targets

    def _read_bytes(self, shard: int, at: int, part: memoryview) -> None:
        """Fill `part` from byte `at` of a shard on, in as many reads as it takes."""
        descriptor = self._opened(shard)
        while len(part):
            try:
                found = os.preadv(descriptor.number, (part,), at)
            except OSError as error:
                raise self._unreadable(shard, at, error) from error
            if not found:
                size = os.fstat(descriptor.number).st_size
                raise DamagedStoreError(
                    f"{self._files.paths[shard]}: found {size:,} bytes, wanted "
                    f"{self._files.file_bytes(shard):,}: it was cut after it was opened; {_CHECK}"
                )
            part, at = part[found:], at + found

    def _opened(self, shard: int) -> _Descriptor:
        descriptor = self._held.get(shard)
        if descriptor is None:
            if len(self._held) >= self._max_open:
                self._held.clear()  # one step: other threads change it at the same time
            _make_room()
            try:
                number = self._files.open(shard)
            except StoreError as error:
                code = getattr(error.__cause__, "errno", None)
                if code not in (errno.EMFILE, errno.ENFILE):
                    raise
                _close_all()
                number = self._files.open(shard)
            descriptor = self._held[shard] = _Descriptor(number)
        return descriptor

    def _unreadable(self, shard: int, at: int, error: OSError) -> StoreError:
        return StoreError(
            f"{self._files.paths[shard]}: cannot be read at byte {at:,}: {error.strerror}; check "
            "its disk or network, then resume from the last state"
        )


_readers: weakref.WeakSet[PreadReader] = weakref.WeakSet()
_lock = threading.Lock()  # for the set of readers


def _new_lock() -> None:
    """A child may be forked while another thread holds the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def _make_room() -> None:
    """Close all descriptors when the limit is reached. They are opened again when they are needed,
    at some microseconds each."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = _MAX_OPEN if soft == resource.RLIM_INFINITY else min(_MAX_OPEN, max(8, soft // 4))
    with _lock:
        held = sum(len(reader._held) for reader in _readers)
    if held >= limit:
        _close_all()


def _close_all() -> None:
    """Release the descriptors of all readers; one that a thread is reading is closed afterwards."""
    with _lock:
        readers = list(_readers)
    for reader in readers:
        reader._held.clear()
