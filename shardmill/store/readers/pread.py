"""Read shards with `preadv`: the reader that maps nothing.

It gives the same tokens as the mapped reader. A file that is cut after it was opened, or a disk
that fails, is an error that names the file; with a map it is a SIGBUS, which ends the process. Few
files are open at a time, however many shards and spaces there are. Threads may share it.

Windows are sorted; those that touch or overlap are one read. A read goes into the caller's rows if
they have the dtype of the file, otherwise into one block that is then cast as a whole.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.records import IntArray, OffsetArray
from shardmill.store.readers.files import (
    BLOCK_BYTES,
    DTYPES,
    ShardFiles,
    part_of,
    pieces,
    running_edges,
    take,
)

_MAX_OPEN = 512
"""Descriptors of all readers of a process together; a quarter of its limit if that is less."""


class _Descriptor:
    """An open file, closed when the last thread that reads from it drops the reference."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Any = os.close) -> None:  # bound: at exit modules are cleared first
        close(self.number)


class PreadReader:
    """Reads with `preadv`. A shard is opened and checked when it is first read."""

    def __init__(self, files: ShardFiles, *, max_open: int) -> None:
        self._files, self._max_open = files, max_open
        self._edges = running_edges(files.counts)
        self._width = files.width
        # of tokens of shard k: byte in the file = position * width + shifts[k]
        self._shifts = files.offsets - self._edges[:-1] * files.width
        self._held: OrderedDict[int, _Descriptor] = OrderedDict()  # the oldest first
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
                    f"{self._files.file_bytes(shard):,}: it was cut after it was opened; check the "
                    "store with `shardmill verify`, then copy or build it again"
                )
            part, at = part[found:], at + found

    def _opened(self, shard: int) -> _Descriptor:
        descriptor = self._held.get(shard)
        if descriptor is None:
            while len(self._held) >= self._max_open:
                with suppress(KeyError):  # another thread may have closed them all
                    self._held.popitem(last=False)
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
