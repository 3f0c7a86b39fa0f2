"""Read shards through memory maps: the fast reader, and a portable one.

`RangedReader` (64-bit Linux) reserves one range of addresses and maps every shard into it,
so that all shards are one array and a window may cross them. `GroupedReader` maps shard by
shard with nothing but Python's own `mmap`. Both map a shard at first touch, keep at most
`max_maps` of them, and may be shared by threads. No view of mapped memory leaves this file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

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
_MAX_DESCRIPTORS = 256  # of a GroupedReader: each of its maps holds one


class AddressRange:
    """`num_bytes` of addresses, aligned to a huge page, over which files are mapped.

    Reserved addresses cost no memory, and reading them is a fault, never wrong data. The range
    lives as long as `bytes` or a view of it. Python's `mmap` reserves and releases the whole; the
    parts are replaced with the C library's `mmap` (MAP_FIXED), which Python does not offer.
    """

    def __init__(self, num_bytes: int) -> None:
        self._reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        held = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=self._reserved, prot=_PROT_NONE)
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
        self._map(at, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, skip)

    def unmap(self, at: int, num_bytes: int) -> None:
        """Only reserve these bytes again. No other thread may be reading there."""
        self._map(at, num_bytes, _PROT_NONE, self._reserved, -1)

    def will_need(self, at: int, num_bytes: int) -> None:
        """Ask the kernel to read these pages ahead; returns at once. A hint: it may be ignored."""
        before = at % mmap.PAGESIZE
        self._libc.madvise(self._address + at - before, num_bytes + before, _MADV_WILLNEED)

    def _map(
        self, at: int, num_bytes: int, access: int, flags: int, descriptor: int, skip: int = 0
    ) -> None:
        address = self._address + at
        found = self._libc.mmap(address, num_bytes, access, flags | _MAP_FIXED, descriptor, skip)
        if found != address:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {num_bytes:,} bytes: {os.strerror(code)}")


@dataclass(frozen=True, slots=True, eq=False)
class AddressLayout:
    """Where shards go in the range. A segment is a run of shards of one dtype without a gap."""

    edges: OffsetArray  # (shards + 1,) token positions: shard i is edges[i] .. edges[i + 1]
    addresses: OffsetArray  # (shards,) where the map of each begins, in bytes from the start
    leads: OffsetArray  # (shards,) bytes mapped before the first token: the end of a header
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
    """Place non-empty shards one after another, each on its own page.

    page = 8 bytes, width 2, counts [4, 3, 4]: addresses [0, 8, 16], segment edges [0, 7, 11],
    shifts [0, 1]: after the three tokens of the second shard there is a gap of one.
    After a segment that ends with a large shard the next begins on a huge page: addresses are free.
    `leads`: bytes mapped before the first token of each shard, less than a page; default none.
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


class _MappedShards:
    """Which shards are mapped into the range: at most `limit`, the least recently used go first.

    It has no lock: the caller lets no thread read while shards are mapped or unmapped.
    """

    def __init__(
        self, files: ShardFiles, layout: AddressLayout, addresses: AddressRange, limit: int
    ) -> None:
        self._files = files
        self._layout = layout
        self._addresses = addresses
        self._limit = limit
        self._mapped = np.zeros(len(files), np.bool_)
        self._used = np.zeros(len(files), np.int64)  # the last call that asked for a shard
        self._clock = 0
        self._num_mapped = 0

    @property
    def complete(self) -> bool:
        """Every shard is mapped; from now on nothing changes."""
        return self._num_mapped == len(self._mapped)

    def hold(self, touched: OffsetArray) -> bool:
        """Map the touched shards (repeats allowed). False, and nothing done, if too many."""
        if not self._mapped[touched].all():
            shards = np.unique(touched)
            if len(shards) > self._limit:
                return False
            missing = shards[~self._mapped[shards]]
            self._unmap_oldest(self._num_mapped + len(missing) - self._limit, keep=shards)
            for shard in missing.tolist():
                self._map(shard)
        self._clock += 1
        self._used[touched] = self._clock
        return True

    def _map(self, shard: int) -> None:
        at, num_bytes = self._span(shard)
        skip = self._files.file_bytes(shard) - num_bytes
        descriptor = self._files.open(shard)
        try:
            self._addresses.map_file(descriptor, at, num_bytes, skip)
        except OSError as error:
            advice = f"{os.strerror(error.errno or 0)}: some file systems allow few maps or none"
            if error.errno == errno.ENOMEM:
                advice = (
                    "lower {max_maps}, close other spaces, or raise vm.max_map_count or the limit "
                    "of addresses (ulimit -v)"
                )
            raise StoreError(
                f"{self._files.paths[shard]}: the kernel refused another map; this space holds "
                f"{self._num_mapped:,}; {advice}; {{reader}} needs no map",
                max_maps=...,
                reader="pread",
            ) from error
        finally:
            os.close(descriptor)
        self._mapped[shard] = True
        self._num_mapped += 1

    def _unmap_oldest(self, num_shards: int, *, keep: OffsetArray) -> None:
        """Unmap the least recently used shards, at most `num_shards`, none of `keep`."""
        if num_shards <= 0:
            return
        loose = self._mapped.copy()
        loose[keep] = False
        candidates = np.flatnonzero(loose)
        oldest = candidates[np.argsort(self._used[candidates], kind="stable")[:num_shards]]
        for shard in oldest.tolist():
            self._mapped[shard] = False
            self._num_mapped -= 1
            self._addresses.unmap(*self._span(shard))

    def _span(self, shard: int) -> tuple[int, int]:
        """Where its map begins, and its bytes: the tokens and the end of a header before them."""
        lead = int(self._layout.leads[shard])
        return int(self._layout.addresses[shard]), lead + self._files.num_bytes(shard)


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


Visit: TypeAlias = Callable[[OffsetArray, slice, slice], None]


class RangedReader:
    """One address range over all shards. OSError when it cannot be reserved.

    Once every shard is mapped nothing is unmapped again, and reads need no lock. Until then, and
    always in a space with more shards than `max_maps`, a read holds the lock from its first look at
    the table of mapped shards to the last byte copied.
    """

    def __init__(self, files: ShardFiles, *, max_maps: int) -> None:
        page = mmap.PAGESIZE
        self._layout = plan_layout(
            files.counts,
            files.widths,
            page=page,
            huge_page=HUGE_PAGE,
            leads=files.offsets % page,
        )
        self._range = AddressRange(max(self._layout.num_bytes, page))
        self._tokens: dict[int, IntArray] = {
            width: self._range.bytes.view(dtype) for width, dtype in DTYPES.items()
        }
        self._views: dict[tuple[int, int], WindowView] = {}
        self._ready: dict[int, WindowView] = {}  # lengths for which only the copy is left to do
        widths = self._layout.segment_widths
        self._same_width = int(widths[0]) if len(widths) and (widths == widths[0]).all() else 0
        self._only_width = self._same_width if len(widths) == 1 else 0
        if self._only_width:  # a header before the only segment: from here on, token i is item i
            shift = int(self._layout.segment_shifts[0])
            self._tokens[self._only_width] = self._tokens[self._only_width][shift:]
        self._shards = _MappedShards(files, self._layout, self._range, max_maps)
        self._lock = threading.Lock()
        self._complete = self._shards.complete

    def fill(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        """Copy the `out.shape[1]` tokens from `starts[i]` on to `out[i]`. Starts were checked."""
        windows = self._ready.get(out.shape[1])
        if windows is not None:
            _copy_windows(self._tokens[self._only_width], windows, starts, out)
        elif self._complete:
            self._copy(starts, out)
        else:

            def copy(starts: OffsetArray, rows: slice, columns: slice) -> None:
                self._copy(starts, out[rows, columns])

            with self._lock:
                self._visit(starts, slice(0, len(starts)), slice(0, out.shape[1]), copy)
                self._complete = self._shards.complete

    def prefetch(self, starts: OffsetArray, length: int) -> None:
        """Ask the kernel to read these windows ahead. Maps their shards, waits for nothing."""
        with self._lock:
            self._visit(starts, slice(0, len(starts)), slice(0, length), self._advise)

    def _visit(self, starts: OffsetArray, rows: slice, columns: slice, visit: Visit) -> None:
        """Call `visit` on blocks of windows whose shards are mapped; one block, if they all fit.

        `starts` are those of `rows`, at the first of `columns`.
        """
        if len(starts) == 0:
            return
        num_columns = columns.stop - columns.start
        if self._shards.hold(self._touched(starts, num_columns)):
            visit(starts, rows, columns)
        elif len(starts) > 1:
            middle = len(starts) // 2
            cut = rows.start + middle
            self._visit(starts[:middle], slice(rows.start, cut), columns, visit)
            self._visit(starts[middle:], slice(cut, rows.stop), columns, visit)
        else:
            first, last = part_of(self._layout.edges, starts[0] + np.array([0, num_columns - 1]))
            middle = int(self._layout.edges[(first + last + 1) // 2] - starts[0])
            cut = columns.start + middle
            self._visit(starts, rows, slice(columns.start, cut), visit)
            self._visit(starts + middle, rows, slice(cut, columns.stop), visit)

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

    def _copy(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        if self._only_width:
            self._copy_whole(self._only_width, starts, out)
            return
        layout, length = self._layout, out.shape[1]
        segment = part_of(layout.segment_edges, starts)
        whole = starts + length <= layout.segment_edges[segment + 1]
        if self._same_width and whole.all():
            self._copy_whole(self._same_width, starts + layout.segment_shifts[segment], out)
            return
        for width in np.unique(layout.segment_widths[segment[whole]]).tolist():
            rows = np.flatnonzero(whole & (layout.segment_widths[segment] == width))
            items = starts[rows] + layout.segment_shifts[segment[rows]]
            if len(rows) == len(starts):
                self._copy_whole(width, items, out)
            else:
                gathered = np.empty((len(rows), length), DTYPES[width])
                self._copy_whole(width, items, gathered)
                out[rows] = gathered
        for row in np.flatnonzero(~whole).tolist():
            self._copy_pieces(int(starts[row]), out[row])

    def _copy_whole(self, width: int, items: OffsetArray, out: npt.NDArray[Any]) -> None:
        length = out.shape[1]
        windows = self._views.get((width, length))
        if windows is None:
            if length * width >= _LONG_ROW_BYTES:
                for row, start in enumerate(items.tolist()):
                    out[row] = self._tokens[width][start : start + length]
                return
            if len(self._views) >= _MAX_VIEWS:
                self._views, self._ready = {}, {}
            windows = self._views[width, length] = view_windows(self._tokens[width], length)
        if self._complete and self._only_width:
            self._ready[length] = windows
        _copy_windows(self._tokens[width], windows, items, out)

    def _copy_pieces(self, start: int, row: npt.NDArray[Any]) -> None:
        """One window over a gap or a change of dtype."""
        layout = self._layout
        for segment, begin, end in pieces(layout.segment_edges, start, start + len(row)):
            tokens = self._tokens[int(layout.segment_widths[segment])]
            shift = int(layout.segment_shifts[segment])
            row[begin - start : end - start] = tokens[begin + shift : end + shift]

    def _advise(self, starts: OffsetArray, _rows: slice, columns: slice) -> None:
        layout, length = self._layout, columns.stop - columns.start
        for start in starts.tolist():
            for segment, begin, end in pieces(layout.segment_edges, start, start + length):
                width = int(layout.segment_widths[segment])
                at = (begin + int(layout.segment_shifts[segment])) * width
                self._range.will_need(at, (end - begin) * width)


class GroupedReader:
    """One map per shard. A map that is dropped lives until the last read of it has ended."""

    def __init__(self, files: ShardFiles, *, max_maps: int) -> None:
        self._files = files
        self._edges = running_edges(files.counts)
        self._max_maps = min(max_maps, _MAX_DESCRIPTORS)
        self._lock = threading.Lock()
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()  # least recently used first

    def fill(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        """Copy the `out.shape[1]` tokens from `starts[i]` on to `out[i]`. Starts were checked."""
        length, edges = out.shape[1], self._edges
        shard = part_of(edges, starts)
        whole = starts + length <= edges[shard + 1]
        inside = starts - edges[shard]
        held, tokens = -1, np.empty(0, np.uint16)
        for row in np.argsort(shard, kind="stable").tolist():  # each shard is mapped once
            if not whole[row]:
                self._copy_pieces(int(starts[row]), out[row])
                continue
            if shard[row] != held:
                held = int(shard[row])
                tokens = self._tokens(held)
            out[row] = tokens[inside[row] : inside[row] + length]

    def prefetch(self, starts: OffsetArray, length: int) -> None:
        """Ask the kernel to read these windows ahead; where it cannot be asked, do nothing."""
        if not hasattr(mmap.mmap, "madvise"):
            return
        for start in starts.tolist():
            for part, begin, end in pieces(self._edges, start, start + length):
                width, first = int(self._files.widths[part]), int(self._edges[part])
                at = int(self._files.offsets[part]) + (begin - first) * width
                before = at % mmap.PAGESIZE
                num_bytes = (end - begin) * width + before
                self._map(part).madvise(mmap.MADV_WILLNEED, at - before, num_bytes)

    def _copy_pieces(self, start: int, row: npt.NDArray[Any]) -> None:
        for part, begin, end in pieces(self._edges, start, start + len(row)):
            first = int(self._edges[part])
            row[begin - start : end - start] = self._tokens(part)[begin - first : end - first]

    def _tokens(self, shard: int) -> npt.NDArray[Any]:
        dtype = DTYPES[int(self._files.widths[shard])]
        return np.frombuffer(self._map(shard), dtype, offset=int(self._files.offsets[shard]))

    def _map(self, shard: int) -> mmap.mmap:
        with self._lock:
            if shard not in self._maps:
                while len(self._maps) >= self._max_maps:
                    self._maps.popitem(last=False)
                descriptor = self._files.open(shard)
                try:
                    size = self._files.file_bytes(shard)
                    self._maps[shard] = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
                finally:
                    os.close(descriptor)
            self._maps.move_to_end(shard)
            return self._maps[shard]
