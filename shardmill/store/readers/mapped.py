"""Read shards through memory maps: the fast reader, for 64-bit Linux.

One range of addresses is reserved, and every shard is mapped into it when it is first read, so that
all shards are one array and a window may cross them. Threads may share a reader. No view of mapped
memory leaves this file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.errors import StoreError
from shardmill.records import IntArray, OffsetArray
from shardmill.store.readers.files import (
    BLOCK_BYTES,
    DTYPES,
    ShardFiles,
    WindowView,
    part_of,
    pieces,
    running_edges,
    view_windows,
)

SUPPORTED = sys.platform == "linux" and sys.maxsize > 2**32
"""Whether `AddressRange` works here: 64-bit Linux."""

HUGE_PAGE = 2 * 2**20
"""A file mapped at a multiple of it is mapped in huge pages where the kernel caches it in such
pieces (recent kernels do, for files written in large pieces): random reads then wait less for
address translation. Nothing is asked of the kernel, and nothing is lost where it does not."""

_LONG_ROW_BYTES = 16 * 1024  # for longer rows the second copy costs more than a Python step per row
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MADV_WILLNEED = 3
_MAP_NORESERVE = 0x4000
_MAX_VIEWS = 16  # window lengths remembered; making a view again costs a microsecond


class AddressRange:
    """`num_bytes` of addresses, aligned to a huge page, over which files are mapped.

    Reserved addresses cost no memory, and reading them is a fault, never wrong data. The range
    lives as long as `bytes` or a view of it. Python's `mmap` reserves and releases the whole; the
    parts are replaced with the C library's `mmap` (MAP_FIXED), which Python does not offer.
    """

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        held = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=flags, prot=_PROT_NONE)
        before = -np.frombuffer(held, np.uint8).ctypes.data % HUGE_PAGE
        self.bytes = np.frombuffer(held, np.uint8, count=num_bytes, offset=before)
        self._address: int = self.bytes.ctypes.data
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            *(ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
        ]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def map_file(self, descriptor: int, at: int, num_bytes: int, skip: int = 0) -> None:
        """Map `num_bytes` of a file, after its first `skip` bytes, read-only at byte `at` of the
        range. `at` and `skip` are multiples of a page."""
        address, flags = self._address + at, mmap.MAP_SHARED | _MAP_FIXED
        found = self._libc.mmap(address, num_bytes, mmap.PROT_READ, flags, descriptor, skip)
        if found != address:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {num_bytes:,} bytes: {os.strerror(code)}")

    def will_need(self, at: int, num_bytes: int) -> None:
        """Ask the kernel to read these pages ahead; returns at once. A hint: it may be ignored."""
        before = at % mmap.PAGESIZE
        self._libc.madvise(self._address + at - before, num_bytes + before, _MADV_WILLNEED)


@dataclass(frozen=True, slots=True, eq=False)
class AddressLayout:
    """Where shards go in the range. A segment is a run of shards without a gap."""

    edges: OffsetArray  # (shards + 1,) token positions: shard i is edges[i] .. edges[i + 1]
    addresses: OffsetArray  # (shards,) where the map of each begins, in bytes from the start
    leads: OffsetArray  # (shards,) bytes mapped before the first token: the end of a header
    num_bytes: int  # of the whole range, whole pages
    segment_edges: OffsetArray  # (segments + 1,) the same for segments
    segment_shifts: OffsetArray  # (segments,) token position + shift = item in the range


def plan_layout(
    counts: OffsetArray, width: int, *, page: int, huge_page: int, leads: OffsetArray | None = None
) -> AddressLayout:
    """Place non-empty shards one after another, each on its own page.

    page = 8 bytes, width 2, counts [4, 3, 4]: addresses [0, 8, 16], segment edges [0, 7, 11],
    shifts [0, 1]: after the three tokens of the second shard there is a gap of one.
    After a segment that ends with a large shard the next begins on a huge page: addresses are free.
    `leads`: bytes mapped before the first token of each shard, less than a page; default none.
    """
    leads = np.zeros(len(counts), np.int64) if leads is None else leads
    edges = running_edges(counts)
    sizes = leads + counts * width
    gap = (sizes[:-1] % page != 0) | (leads[1:] != 0)
    closes = np.append(gap, True)[: len(counts)]
    grain = np.where(closes & (sizes >= huge_page), huge_page, page)
    addresses = running_edges(-(-sizes // grain) * grain)
    heads = np.append(0, np.flatnonzero(closes[:-1]) + 1)[: len(counts)]
    return AddressLayout(
        edges=edges,
        addresses=addresses[:-1],
        leads=leads,
        num_bytes=int(addresses[-1]),
        segment_edges=np.append(edges[heads], edges[-1]),
        segment_shifts=(addresses[:-1] + leads)[heads] // width - edges[heads],
    )


def _copy_windows(
    tokens: IntArray, windows: WindowView, starts: OffsetArray, out: npt.NDArray[Any]
) -> None:
    """Gather `windows`, which is `view_windows(tokens, out.shape[1])`, and cast them into `out`.

    One gather and one cast per block of rows. Half of the cost of random windows is waiting for
    memory, so the first token of every window is loaded before: these loads do not depend on each
    other and wait together.
    """
    step = BLOCK_BYTES // windows.itemsize
    if len(starts) > step:
        for row in range(0, len(starts), step):
            _copy_windows(tokens, windows, starts[row : row + step], out[row : row + step])
        return
    tokens[starts]  # only to load them into the cache
    out[...] = windows[starts].view(tokens.dtype).reshape(out.shape)


class MappedReader:
    """One address range over all shards. OSError when it cannot be reserved.

    A shard is mapped when it is first read, under a lock, and then stays: reading needs no lock.
    """

    def __init__(self, files: ShardFiles) -> None:
        self._files = files
        self._layout = plan_layout(
            files.counts,
            files.width,
            page=mmap.PAGESIZE,
            huge_page=HUGE_PAGE,
            leads=files.offsets % mmap.PAGESIZE,
        )
        self._range = AddressRange(max(self._layout.num_bytes, mmap.PAGESIZE))
        self._tokens: IntArray = self._range.bytes.view(DTYPES[files.width])
        self._one_segment = len(self._layout.segment_shifts) == 1
        if self._one_segment:  # after a header: from here on, token i is item i
            self._tokens = self._tokens[int(self._layout.segment_shifts[0]) :]
        self._views: dict[int, WindowView] = {}
        self._ready: dict[int, WindowView] = {}  # lengths for which only the copy is left to do
        self._lock = threading.Lock()
        self._mapped = np.zeros(len(files), np.bool_)
        self._complete = False  # every shard is mapped

    def fill(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        """Copy the `out.shape[1]` tokens from `starts[i]` on to `out[i]`. Starts were checked."""
        windows = self._ready.get(out.shape[1])
        if windows is not None:
            _copy_windows(self._tokens, windows, starts, out)
            return
        self._map_touched(starts, out.shape[1])
        if self._one_segment:
            self._copy_whole(starts, out)
        else:
            self._copy(starts, out)

    def prefetch(self, starts: OffsetArray, length: int) -> None:
        """Ask the kernel to read these windows ahead. Maps their shards, waits for nothing."""
        self._map_touched(starts, length)
        layout, width = self._layout, self._files.width
        for start in starts.tolist():
            for segment, begin, end in pieces(layout.segment_edges, start, start + length):
                at = (begin + int(layout.segment_shifts[segment])) * width
                self._range.will_need(at, (end - begin) * width)

    def _map_touched(self, starts: OffsetArray, length: int) -> None:
        """Map the shards with any token of these windows."""
        if self._complete or not len(starts):
            return
        touched = self._touched(starts, length)
        missing = touched[~self._mapped[touched]]
        if len(missing):
            with self._lock:
                for shard in np.unique(missing).tolist():
                    if not self._mapped[shard]:
                        self._map(shard)
                self._complete = bool(self._mapped.all())

    def _touched(self, starts: OffsetArray, length: int) -> OffsetArray:
        """The shards with any token of these windows; some more than once."""
        first = part_of(self._layout.edges, starts)
        last = part_of(self._layout.edges, starts + (length - 1))
        if (last - first).max() <= 1:
            return np.concatenate((first, last))
        # windows over 1..3 and 2..2: changes [0 1 1 -1 -1] -> depth [0 1 2 1 0] -> shards 1, 2, 3
        changes = np.zeros(len(self._layout.edges), np.int64)
        np.add.at(changes, first, 1)
        np.add.at(changes, last + 1, -1)
        return np.flatnonzero(np.cumsum(changes))

    def _map(self, shard: int) -> None:
        lead = int(self._layout.leads[shard])  # the end of a header, before the tokens
        skip = int(self._files.offsets[shard]) - lead
        num_bytes = self._files.file_bytes(shard) - skip
        descriptor = self._files.open(shard)
        try:
            self._range.map_file(descriptor, int(self._layout.addresses[shard]), num_bytes, skip)
        except OSError as error:
            advice = f"{os.strerror(error.errno or 0)}: some file systems allow few maps or none"
            if error.errno == errno.ENOMEM:
                advice = (
                    "lower {max_maps}, close other spaces, or raise vm.max_map_count or the limit "
                    "of addresses (ulimit -v)"
                )
            raise StoreError(
                f"{self._files.paths[shard]}: the kernel refused another map; this space holds "
                f"{self._mapped.sum():,}; {advice}; {{reader}} needs no map",
                max_maps=...,
                reader="pread",
            ) from error
        finally:
            os.close(descriptor)
        self._mapped[shard] = True

    def _copy(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        """Copy from more than one segment."""
        layout, length = self._layout, out.shape[1]
        ends = layout.segment_edges[1:]
        segment = ends.searchsorted(starts, side="right")
        room = ends[segment] - starts  # tokens from each start to the end of its segment
        items = starts + layout.segment_shifts[segment]
        # argmin: a store of version 2 has a segment for each shard, so every batch comes here
        if not len(starts) or room[room.argmin()] >= length:
            self._copy_whole(items, out)
            return
        whole = room >= length
        rows = np.flatnonzero(whole)
        gathered = np.empty((len(rows), length), self._tokens.dtype)
        self._copy_whole(items[rows], gathered)
        out[rows] = gathered
        for row in np.flatnonzero(~whole).tolist():
            start = int(starts[row])
            for part, begin, end in pieces(layout.segment_edges, start, start + length):
                shift = int(layout.segment_shifts[part])
                out[row, begin - start : end - start] = self._tokens[begin + shift : end + shift]

    def _copy_whole(self, items: OffsetArray, out: npt.NDArray[Any]) -> None:
        """Copy windows inside segments."""
        length = out.shape[1]
        windows = self._views.get(length)
        if windows is None:
            if length * self._files.width >= _LONG_ROW_BYTES:
                for row, start in enumerate(items.tolist()):
                    out[row] = self._tokens[start : start + length]
                return
            if len(self._views) >= _MAX_VIEWS:
                self._views, self._ready = {}, {}
            windows = self._views[length] = view_windows(self._tokens, length)
        if self._complete and self._one_segment:
            self._ready[length] = windows
        _copy_windows(self._tokens, windows, items, out)
