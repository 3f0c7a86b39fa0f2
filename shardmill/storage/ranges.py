"""A remote file, read by planned ranges that are fetched ahead.

Planned bytes are fetched in blocks of up to several MiB, a few blocks ahead of the reader, side by
side. So memory is bounded by the blocks, and distance costs bandwidth but no round trips. Nothing
before the first planned range is ever fetched; what was not planned is fetched when it is read. An
error of a fetch is raised by the read that needed it, where it may be retried.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from shardmill.threads import current_stop, stopped_by, wait_for

Fetch = Callable[[int, int], bytes]
Retry = Callable[[Callable[[], bytes]], bytes]
"""Calls a function, again if that may help."""
Range = tuple[int, int]  # half-open

BLOCK_BYTES = 8 * 2**20
"""The most that one request fetches."""
GAP_BYTES = 512 * 2**10
"""Ranges no further apart are fetched in one request: a round trip costs more than this."""
DEPTH = 4
"""Blocks in memory or being fetched."""


def blocks_of(
    ranges: Iterable[Range], *, block: int = BLOCK_BYTES, gap: int = GAP_BYTES
) -> list[Range]:
    """Ascending ranges as requests: neighbours are joined while they fit a block, long ones cut."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and start - joined[-1][1] <= gap and stop - joined[-1][0] <= block:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return [
        (first, min(first + block, stop))
        for start, stop in joined
        for first in range(start, stop, block)
    ]


class RangedFile(io.RawIOBase):
    """A file of `num_bytes`; `blocks` are ascending and do not overlap.

    `retry` runs in the thread that reads. With `is_slow_start` the number of blocks fetched ahead
    grows with each block that is read, so reading only the first block fetches little more.
    """

    def __init__(
        self,
        fetch: Fetch,
        num_bytes: int,
        blocks: Sequence[Range] = (),
        *,
        retry: Retry,
        is_slow_start: bool = False,
    ) -> None:
        super().__init__()
        self._retry = retry
        self._depth = 0 if is_slow_start else DEPTH
        self._fetch = fetch
        self._num_bytes = num_bytes
        self._blocks = blocks
        self._starts = [start for start, _ in blocks]
        self._position = 0
        self._current = -1
        self._held: dict[int, Future[bytes]] = {}
        self._pool = ThreadPoolExecutor(DEPTH, thread_name_prefix="shardmill-ranges")
        self._stop = current_stop()  # Arrow reads in its own threads

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}
        self._position = max(base[whence] + offset, 0)
        return self._position

    def read(self, size: int = -1) -> bytes | memoryview:
        """As of any file, but bytes within one block are not copied."""
        if self.closed:
            raise ValueError("read of a closed file")
        stop = self._num_bytes if size < 0 else min(self._position + size, self._num_bytes)
        parts: list[bytes | memoryview] = []
        with stopped_by(self._stop):
            while self._position < stop:
                part = self._part(self._position, stop)
                assert len(part) > 0, "a fetch must give all bytes or raise"
                self._position += len(part)
                parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close without waiting for the requests under way."""
        if not self.closed:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._held.clear()
        super().close()

    def _part(self, start: int, stop: int) -> bytes | memoryview:
        """At least one byte from `start` on."""
        index = bisect_right(self._starts, start) - 1
        if index >= 0 and start < self._blocks[index][1]:
            first, last = self._blocks[index]
            return memoryview(self._block(index))[start - first : min(stop, last) - first]
        following = self._starts[index + 1 : index + 2]
        return self._retry(partial(self._fetch, start, min([stop, *following])))

    def _block(self, index: int) -> bytes:
        if index != self._current:
            self._current, self._depth = index, min(self._depth + 1, DEPTH)
        wanted = range(index, min(index + self._depth, len(self._blocks)))
        for old in [held for held in self._held if held not in wanted]:
            self._held.pop(old).cancel()
        for number in wanted:
            self._begin(number)
        return self._retry(partial(self._end, index))

    def _begin(self, number: int) -> None:
        if number not in self._held:
            self._held[number] = self._pool.submit(self._fetch, *self._blocks[number])

    def _end(self, number: int) -> bytes:
        self._begin(number)
        try:
            return wait_for(self._held[number])
        except Exception:
            del self._held[number]  # the next try is a new request
            raise
