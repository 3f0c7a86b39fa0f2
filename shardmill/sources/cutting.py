"""Join what is small into units of about one size.

In: sizes, in order, and how large a unit should be.  Out: runs of neighbours.
Promise: every neighbour once, in order; a run is as long as its size allows, and what alone is
larger stands alone; a pure function of its arguments.
Not here: cutting what is too large; each kind of input knows its own parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from shardmill.errors import OptionError

MOST = 1024
"""Of so many neighbours a run consists at most: it stays small to send, whatever their size."""


def runs(sizes: Iterable[int | None], num_bytes: int) -> Iterator[tuple[int, int]]:
    """Half-open runs of neighbours; one of size None stands alone."""
    start = stop = 0
    total: float = 0
    for size in sizes:
        weight = math.inf if size is None else size
        if start < stop and (total + weight > num_bytes or stop - start == MOST):
            yield start, stop
            start, total = stop, 0
        stop += 1
        total += weight
    if start < stop:
        yield start, stop


def check_num_bytes(num_bytes: int) -> None:
    if num_bytes < 1:
        raise OptionError(f"num_bytes={num_bytes}: wanted how large a piece should be, 1 or more")
