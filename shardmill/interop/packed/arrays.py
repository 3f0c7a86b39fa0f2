"""Plain `.npy` files, written at once or row by row.

In: arrays.  Out: files that are durable, with their sha256.
Promise: a full disk is an error, never a signal: nothing is written through a map. Rows never
written are zero.
Not here: names and shapes (layout), when a folder is finished (staging).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.interop.packed.layout import npy_header
from shardmill.interop.packed.staging import cannot_write

_BUFFER = 2**20


class RowFile:
    """A two-dimensional array on disk, all zero at first."""

    def __init__(self, path: Path, dtype: str, shape: tuple[int, int]) -> None:
        self.path = path
        header = npy_header(dtype, shape)
        self._start = len(header)
        self._row_bytes = shape[1] * np.dtype(dtype).itemsize
        try:
            self._file = path.open("xb", buffering=0)
            self._put(memoryview(header), 0)
            self._file.truncate(self._start + shape[0] * self._row_bytes)
        except OSError as error:
            raise cannot_write(path, error) from error

    def write(self, row: int, values: npt.NDArray[Any]) -> None:
        """`values`, contiguous and of the file's dtype, from the start of `row` on."""
        try:
            self._put(values.reshape(-1).view(np.uint8).data, self._start + row * self._row_bytes)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _put(self, data: memoryview, position: int) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, position)
            data, position = data[count:], position + count


def write_array(path: Path, values: npt.NDArray[Any]) -> None:
    """One new file with all of `values`, durable."""
    with path.open("xb") as file:
        file.write(npy_header(values.dtype.str, values.shape))
        file.write(np.ascontiguousarray(values).data)
        file.flush()
        os.fsync(file.fileno())


def file_sha256(path: Path) -> str:
    """sha256 of a whole file, in little memory."""
    digest, buffer = hashlib.sha256(), bytearray(_BUFFER)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()
