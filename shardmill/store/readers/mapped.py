"""Read all shards as one array: the fast reader.

In: `ShardFiles`; then starts.  Out: filled rows.
Promise: shards are mapped at first touch, at most `max_maps` at a time; any thread may read at
any time; no view of the mapped memory leaves this file.
Not here: arguments (space), which shards stay mapped (laid), other systems (grouped).

Once every shard is laid nothing is ever lifted again, and reads need no lock. Until then, and for
good in a space with more shards than `max_maps`, a read holds the lock from its first look at the
table of laid shards to the last byte copied.

Which shards lie in the address range now.

In: shards about to be read.  Out: the same shards, laid.
Promise: never more than the limit; least recently used first out; a shard is checked on disk
right before it is laid.
Not here: locks. The caller lets nobody read while shards are laid or lifted.

One reserved range of addresses, over which files are laid. Linux only.

In: a size; then descriptors and places.  Out: one array of bytes over the whole range.
Promise: the range lives exactly as long as somebody holds that array or a view of it, and is given
back whole; a reserved place costs no memory and reading it is a fault, never wrong data.
Not here: which file lies where and when (ranged).

Python's own `mmap` object reserves the range and gives it back; what lies inside is replaced in
place with the C library's `mmap` (MAP_FIXED), which Python does not offer.

Read shard by shard: the portable reader.

In: `ShardFiles`; then starts.  Out: filled rows.
Promise: the same rows as the ranged reader, with nothing but Python's own `mmap`. At most
`max_maps` shards are mapped, and at most 256: here each holds a file descriptor too.
Not here: arguments (space), the fast way (ranged).
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
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.errors import StoreError
from shardmill.records import IntArray, OffsetArray
from shardmill.store.readers.copying import (
    WindowView,
    copy_long,
    copy_viewed,
    is_long,
    view_windows,
)
from shardmill.store.readers.files import (
    DTYPES,
    AddressLayout,
    ShardFiles,
    part_of,
    pieces,
    plan_layout,
    running_edges,
)

SUPPORTED = sys.platform == "linux" and sys.maxsize > 2**32
"""Whether `AddressRange` works here: 64-bit Linux."""

HUGE_PAGE = 2 * 2**20
"""A file laid on such a border is mapped in huge pages where the kernel holds it in such pieces
(recent kernels do, for files written in large pieces): random reads then wait less for address
translation. Nothing is asked of the kernel, and nothing is lost where it does not."""

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MADV_WILLNEED = 3
_MAP_NORESERVE = 0x4000


class AddressRange:
    """`num_bytes` of addresses from a huge page on, at first all reserved. Places are in bytes."""

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

    def lay(self, descriptor: int, place: int, num_bytes: int, skip: int = 0) -> None:
        """Lay `num_bytes` of a file, those behind the first `skip`, at `place`, read-only.

        `place` and `skip` are on pages.
        """
        self._map(place, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, skip)

    def lift(self, place: int, num_bytes: int) -> None:
        """Only reserved again. No other thread may be reading there."""
        self._map(place, num_bytes, _PROT_NONE, self._reserved, -1)

    def will_need(self, place: int, num_bytes: int) -> None:
        """Ask the kernel to read these pages ahead; returns at once. A hint: it may be ignored."""
        before = place % mmap.PAGESIZE
        self._libc.madvise(self._address + place - before, num_bytes + before, _MADV_WILLNEED)

    def _map(
        self, place: int, num_bytes: int, access: int, flags: int, descriptor: int, skip: int = 0
    ) -> None:
        address = self._address + place
        found = self._libc.mmap(address, num_bytes, access, flags | _MAP_FIXED, descriptor, skip)
        if found != address:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {num_bytes:,} bytes: {os.strerror(code)}")


class LaidShards:
    """The table of shards laid into one range."""

    def __init__(
        self, files: ShardFiles, layout: AddressLayout, addresses: AddressRange, limit: int
    ) -> None:
        self._files = files
        self._layout = layout
        self._addresses = addresses
        self._limit = limit
        self._laid = np.zeros(len(files), np.bool_)
        self._used = np.zeros(len(files), np.int64)  # the call that asked for a shard last
        self._clock = 0
        self._num_laid = 0

    @property
    def complete(self) -> bool:
        """Every shard is laid; from now on nothing changes."""
        return self._num_laid == len(self._laid)

    def hold(self, touched: OffsetArray) -> bool:
        """Lay the touched shards (repeats allowed). False, and nothing done, if too many."""
        if not self._laid[touched].all():
            shards = np.unique(touched)
            if len(shards) > self._limit:
                return False
            missing = shards[~self._laid[shards]]
            self._lift_oldest(self._num_laid + len(missing) - self._limit, keep=shards)
            for shard in missing.tolist():
                self._lay(shard)
        self._clock += 1
        self._used[touched] = self._clock
        return True

    def _lay(self, shard: int) -> None:
        place, num_bytes = self._place(shard)
        skip = self._files.file_bytes(shard) - num_bytes
        descriptor = self._files.open(shard)
        try:
            self._addresses.lay(descriptor, place, num_bytes, skip)
        except OSError as error:
            out_of_maps = error.errno == errno.ENOMEM
            advice = (
                "lower max_maps, close other spaces, or raise vm.max_map_count or the limit of "
                "addresses (ulimit -v)"
                if out_of_maps
                else f"{os.strerror(error.errno or 0)}: some file systems allow few maps or none"
            )
            raise StoreError(
                f"{self._files.paths[shard]}: the kernel refused another map; this space holds "
                f"{self._num_laid:,}; {advice}; reader='pread' needs no map"
            ) from error
        finally:
            os.close(descriptor)
        self._laid[shard] = True
        self._num_laid += 1

    def _lift_oldest(self, num_shards: int, *, keep: OffsetArray) -> None:
        """Lift the least recently used shards, at most `num_shards`, none of `keep`."""
        if num_shards <= 0:
            return
        loose = self._laid.copy()
        loose[keep] = False
        candidates = np.flatnonzero(loose)
        oldest = candidates[np.argsort(self._used[candidates], kind="stable")[:num_shards]]
        for shard in oldest.tolist():
            self._laid[shard] = False
            self._num_laid -= 1
            self._addresses.lift(*self._place(shard))

    def _place(self, shard: int) -> tuple[int, int]:
        """Where its map begins, and its bytes: the tokens and the end of a header before them."""
        lead = int(self._layout.leads[shard])
        return int(self._layout.addresses[shard]), lead + self._files.num_bytes(shard)


Visit: TypeAlias = Callable[[OffsetArray, slice, slice], None]

_MAX_VIEWS = 16  # window lengths remembered; making a view again costs a microsecond


class RangedReader:
    """One address range over all shards. OSError when it cannot be reserved."""

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
        self._laid = LaidShards(files, self._layout, self._range, max_maps)
        self._lock = threading.Lock()
        self._complete = self._laid.complete

    def fill(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        """`out[i]` becomes the `out.shape[1]` tokens from `starts[i]` on. Starts were checked."""
        windows = self._ready.get(out.shape[1])
        if windows is not None:
            copy_viewed(self._tokens[self._only_width], windows, starts, out)
        elif self._complete:
            self._copy(starts, out)
        else:
            self._fill_locked(starts, out)

    def _fill_locked(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        def copy(starts: OffsetArray, rows: slice, columns: slice) -> None:
            self._copy(starts, out[rows, columns])

        with self._lock:
            self._visit(starts, slice(0, len(starts)), slice(0, out.shape[1]), copy)
            self._complete = self._laid.complete

    def prefetch(self, starts: OffsetArray, length: int) -> None:
        """Ask the kernel to read these windows ahead. Maps their shards, waits for nothing."""
        with self._lock:
            self._visit(starts, slice(0, len(starts)), slice(0, length), self._advise)

    def _visit(self, starts: OffsetArray, rows: slice, columns: slice, visit: Visit) -> None:
        """Call `visit` on blocks of windows whose shards are laid; one block, if they all fit.

        `starts` are those of `rows`, at the first of `columns`.
        """
        if len(starts) == 0:
            return
        num_columns = columns.stop - columns.start
        if self._laid.hold(self._touched(starts, num_columns)):
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
            if is_long(self._tokens[width], length):
                copy_long(self._tokens[width], items, out)
                return
            windows = self._remember(width, length)
        if self._complete and self._only_width:
            self._ready[length] = windows
        copy_viewed(self._tokens[width], windows, items, out)

    def _remember(self, width: int, length: int) -> WindowView:
        if len(self._views) >= _MAX_VIEWS:
            self._views, self._ready = {}, {}
        windows = self._views[width, length] = view_windows(self._tokens[width], length)
        return windows

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
                place = (begin + int(layout.segment_shifts[segment])) * width
                self._range.will_need(place, (end - begin) * width)


_MAX_DESCRIPTORS = 256


class GroupedReader:
    """One map a shard. A map that is dropped lives on until the last read of it has ended."""

    def __init__(self, files: ShardFiles, *, max_maps: int) -> None:
        self._files = files
        self._edges = running_edges(files.counts)
        self._max_maps = min(max_maps, _MAX_DESCRIPTORS)
        self._lock = threading.Lock()
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()  # least recently used first

    def fill(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None:
        """`out[i]` becomes the `out.shape[1]` tokens from `starts[i]` on. Starts were checked."""
        length, edges = out.shape[1], self._edges
        shard = part_of(edges, starts)
        whole = starts + length <= edges[shard + 1]
        inside = starts - edges[shard]
        held, tokens = -1, np.empty(0, np.uint16)
        for row in np.argsort(shard, kind="stable").tolist():  # a shard is mapped once a call
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
                place = int(self._files.offsets[part]) + (begin - first) * width
                before = place % mmap.PAGESIZE
                num_bytes = (end - begin) * width + before
                self._map(part).madvise(mmap.MADV_WILLNEED, place - before, num_bytes)

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
