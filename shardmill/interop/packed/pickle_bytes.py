"""The bytes of a pickle, front to back, and what it may refer back to.

In: an open file and the number of bytes that belong to the pickle.  Out: numbers, names, bytes.
Promise: a size that a file claims is compared with what is left of it before memory is taken; a
buffer of 1 MiB; what is kept for references is bounded, and a reference beyond it is refused.
Not here: opcodes (unpickle.py).
"""

from __future__ import annotations

from collections import deque
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.interop.packed.integer_runs import FALSE, INT1, INT2, INT4, TRUE, decode_run
from shardmill.interop.packed.pickle_values import Array, Bin, DType, Global, Numbers

_BUFFER = 2**20
_WINDOW, _LONGEST = 2**12, 2**16  # bytes of numbers decoded together: frames end them too
_MOST_KEPT = 2**16  # names and shared things of a whole file
_MOST_SHARED = 2**26  # bytes of them
_MOST_RECENT = 2**25  # bytes of bins that may be referred to again
_MOST_OF_A_BIN = 2**20  # things of one bin
_WIDTH = {INT1: 1, INT2: 2, INT4: 4}


class PickleBytes:
    """A reader that knows where it is and how much is left."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self.where = where
        self._file, self._size = file, size
        self._first = file.tell()
        self._buffer, self._at, self._before = b"", 0, 0
        self._runs = deque((_WINDOW,) * 3, maxlen=3)  # bytes of the last three lists of numbers
        self._run = 0  # bytes of this one so far

    @property
    def place(self) -> int:
        """The byte of the file that is read next."""
        return self._first + self._before + self._at

    @property
    def left(self) -> int:
        return self._size - self._before - self._at

    def peek(self) -> int:
        if self._at >= len(self._buffer):
            self._fill(1)
        return self._buffer[self._at]

    def skip(self, count: int) -> None:
        self._at += count

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._buffer):
            self._fill(count)
        self._at += count
        return self._buffer[self._at - count : self._at]

    def integer(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """A name up to the end of its line."""
        self._fill(min(256, self.left))
        stop = self._buffer.find(b"\n", self._at, self._at + 256)
        if stop < 0:
            raise self._truncated("a name without an end")
        return self.take(stop + 1 - self._at)[:-1].decode("ascii", "replace")

    def number(self) -> int:
        """One number, with its opcode."""
        opcode = self.integer(1)
        if opcode in (TRUE, FALSE):
            return opcode == TRUE
        return int.from_bytes(self.take(_WIDTH[opcode]), "little", signed=opcode == INT4)

    def numbers(self, *, is_new: bool) -> npt.NDArray[np.int32]:
        """The run of numbers here, or the first part of it; `is_new` when a list begins with it."""
        if is_new:
            self._runs.append(self._run)
            self._run = 0
        # A bin has three lists, so this one will be as long as the third before it. A longer window
        # costs what it is longer, and a shorter one another turn.
        wanted = max(self._runs[0] - self._run, self._run, 16)
        wanted = min(wanted + wanted // 8 + 8, _LONGEST)
        self._fill(min(wanted, self.left))
        values, taken = decode_run(memoryview(self._buffer)[self._at : self._at + wanted])
        if not taken:
            raise self._truncated("it ends inside of a number")
        self._at += taken
        self._run += taken
        return values

    def _fill(self, count: int) -> None:
        """See to it that `count` bytes are in the buffer."""
        if count > self.left:
            raise self._truncated(f"{count:,} bytes are wanted, but {self.left:,} are left")
        if self._at + count <= len(self._buffer):
            return
        rest = self._buffer[self._at :]
        self._before += self._at
        self._at = 0
        wanted = min(max(_BUFFER, count - len(rest)), self._size - self._before - len(rest))
        self._buffer = rest + self._file.read(wanted)
        if len(self._buffer) < count:
            raise self._truncated("the file became shorter while it was read")

    def _truncated(self, what: str) -> DamagedStoreError:
        return DamagedStoreError(
            f"{self.where}, byte {self.place:,}: truncated: {what}; copy it again"
        )


class Memo:
    """What a pickle may refer back to: names for ever, lists and bins for a while.

    Whatever is referred to once is kept from then on, so a list that all bins share stays.
    """

    def __init__(self, where: str) -> None:
        self.num_put = 0
        self._where = where
        self._kept: dict[int, Any] = {}
        self._recent: dict[int, Any] = {}
        self._young: list[int] = []  # put since the last bin was complete
        self._old: deque[tuple[list[int], int]] = deque()
        self._recent_bytes = self._shared_bytes = 0

    def put(self, index: int, value: object) -> None:
        if index != self.num_put:  # every pickler counts
            raise self._refused(f"it keeps object {index:,} where {self.num_put:,} comes next")
        self.num_put += 1
        if isinstance(value, str | Global | DType) or (isinstance(value, bytes) and len(value) < 2):
            self._keep(index, value)
        elif isinstance(value, Numbers | Array | Bin | int):
            if len(self._young) >= _MOST_OF_A_BIN:
                raise self._refused(f"more than {_MOST_OF_A_BIN:,} objects in a bin")
            self._young.append(index)
            self._recent[index] = value
        # tuples and long bytes are made anew each time by numpy: nobody refers to them

    def get(self, index: int) -> Any:
        if index in self._kept:
            return self._kept[index]
        value = self._recent.pop(index, None)
        if value is None:
            raise self._refused(
                f"it refers to object {index:,}, which is not there or no longer kept; save it "
                "with a copy for each bin"
            )
        if isinstance(value, Numbers | Array | Bin):
            self._shared_bytes += value.nbytes
        if self._shared_bytes > _MOST_SHARED:
            raise self._refused(f"more than {_MOST_SHARED:,} bytes shared between bins")
        self._keep(index, value)
        return value

    def bin_done(self, num_bytes: int) -> None:
        """A bin of so many bytes is complete: forget what lies too far back."""
        self._old.append((self._young, num_bytes + 64 * len(self._young)))
        self._recent_bytes += self._old[-1][1]
        self._young = []
        while self._recent_bytes > _MOST_RECENT:
            indices, size = self._old.popleft()
            self._recent_bytes -= size
            for index in indices:
                self._recent.pop(index, None)

    def _keep(self, index: int, value: object) -> None:
        if len(self._kept) >= _MOST_KEPT:
            raise self._refused(f"more than {_MOST_KEPT:,} names and shared objects")
        self._kept[index] = value

    def _refused(self, what: str) -> StoreError:
        return StoreError(f"{self._where}: refused: {what}")
