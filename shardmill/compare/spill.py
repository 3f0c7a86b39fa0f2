"""Records by the million, sorted into heaps on disk by their hash.

In: (n, 4) records: two hashes of a document, that of its mask, its number.  Out: heap by heap.
Promise: equal documents are in the heap of one number; a heap fits into memory, all of them need
not; few records stay in memory.
Not here: what is compared (documents.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardmill.compare.hashes import Hashes

HEAP_RECORDS = 2**20
_MOST_HEAPS = 256  # open files of a store, and a process may have a thousand
_WIDTH = 4


def num_heaps(num_records: int) -> int:
    return min(_MOST_HEAPS, -(-num_records // HEAP_RECORDS) or 1)


class Heaps:
    """The records of one store."""

    def __init__(self, folder: Path, count: int) -> None:
        """`count` heaps; one is kept in memory, more in files of `folder`."""
        self._parts: list[Hashes] = []
        names = [f"{at:03d}" for at in range(count)] if count > 1 else []
        self._files = [(folder / name).open("w+b") for name in names]

    def add(self, records: Hashes) -> None:
        if not self._files:
            self._parts.append(records)
            return
        heaps = records[:, 0] % np.uint64(len(self._files))
        order = np.argsort(heaps, kind="stable")
        edges = np.searchsorted(heaps[order], np.arange(len(self._files) + 1, dtype=np.uint64))
        sorted_records = records[order]
        for at, file in enumerate(self._files):
            file.write(np.ascontiguousarray(sorted_records[edges[at] : edges[at + 1]]).data)

    def heap(self, at: int) -> Hashes:
        """All records of a heap: (n, 4)."""
        if not self._files:
            return np.concatenate([np.empty((0, _WIDTH), np.uint64), *self._parts])
        self._files[at].seek(0)
        return np.fromfile(self._files[at], np.uint64).reshape(-1, _WIDTH)

    def close(self) -> None:
        for file in self._files:
            file.close()
