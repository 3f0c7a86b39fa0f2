"""Read all shards as one array: the fast reader.

In: `ShardFiles`; then starts.  Out: filled rows.
Promise: shards are mapped at first touch, at most `max_maps` at a time; any thread may read at
any time; no view of the mapped memory leaves this file.
Not here: arguments (space), which shards stay mapped (laid), other systems (grouped).

Once every shard is laid nothing is ever lifted again, and reads need no lock. Until then, and for
good in a space with more shards than `max_maps`, a read holds the lock from its first look at the
table of laid shards to the last byte copied.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.mapped.files import DTYPES, ShardFiles
from shardmill.mapped.laid import LaidShards
from shardmill.mapped.layout import part_of, pieces, plan_layout
from shardmill.mapped.memory import HUGE_PAGE, AddressRange
from shardmill.mapped.rows import WindowView, copy_long, copy_viewed, is_long, view_windows
from shardmill.records import IntArray, OffsetArray

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
