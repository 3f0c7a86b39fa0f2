"""Make all mapped pages present, whoever mapped them.

In: a folder.  Out: nothing; every map of a file below it, in this process, has its pages.
Promise: a first look at a page that the kernel has in memory costs the same for all contenders:
nothing, since it happened before the clock ran. Where the kernel cannot, nothing is done.
Not here: reading files.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_MAPS = Path("/proc/self/maps")


def populate(folder: Path) -> bool:
    """False when this system has no way to do it."""
    if not sys.platform.startswith("linux"):
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return all(madvise(start, size, _POPULATE_READ) == 0 for start, size in _mapped(folder))


def _mapped(folder: Path) -> Iterator[tuple[int, int]]:
    """Address and bytes of the maps of files below `folder`."""
    for line in _MAPS.read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1].startswith("r") and fields[5].startswith(f"{folder}/"):
            start, stop = (int(edge, 16) for edge in fields[0].split("-"))
            yield start, stop - start
