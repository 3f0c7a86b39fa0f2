"""The bytes of a pickle, front to back, and runs of whole numbers in it, thousands at a time.

A size that a file claims is compared with what is left of it before memory is taken. There is no
loop over numbers. A pickle writes a list as MARK numbers APPENDS, a thousand numbers at a time:
`( K. K. M.. e ( ...`, so `e(` is skipped: it neither ends the list nor adds to it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

INT1, INT2, INT4, TRUE, FALSE = 0x4B, 0x4D, 0x4A, 0x88, 0x89  # K M J, and the booleans
APPENDS, MARK = 0x65, 0x28
NUMBERS = frozenset((INT1, INT2, INT4, TRUE, FALSE))

_ROUNDS = 4  # jumps are doubled this often: 16 opcodes at a time
_SIZE = np.zeros(256, np.uint8)
_SIZE[[INT1, INT2, INT4, TRUE, FALSE, APPENDS]] = 2, 3, 5, 1, 1, 2
_MASK = np.zeros(256, np.int32)
_MASK[[INT1, INT2, INT4]] = 0xFF, 0xFFFF, -1
_PAD = bytes(8)
_BUFFER = 2**20
_WINDOW, _LONGEST = 2**12, 2**16  # bytes of numbers decoded together: frames end them too
_WIDTH = {INT1: 1, INT2: 2, INT4: 4}

Bytes = npt.NDArray[np.uint8]


class PickleDamagedError(Exception):
    """A pickle that cannot be whole; the message says how."""


class PickleBytes:
    """A reader that knows its position and how many of `size` bytes are left."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._first = file.tell()
        self._buffer, self._at, self._before = b"", 0, 0
        self._runs = deque((_WINDOW,) * 3, maxlen=3)  # bytes of the last three lists of numbers
        self._run = 0  # bytes of this one so far

    @property
    def position(self) -> int:
        """The byte of the file that is read next."""
        return self._first + self._before + self._at

    @property
    def left(self) -> int:
        return self._size - self._before - self._at

    def peek(self) -> int:
        if self._at >= len(self._buffer):
            self._fill(1)
        return self._buffer[self._at]

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
            raise PickleDamagedError("truncated: a name without an end")
        return self.take(stop + 1 - self._at)[:-1].decode("ascii", "replace")

    def number(self) -> int:
        """One number, with its opcode."""
        opcode = self.integer(1)
        if opcode in (TRUE, FALSE):
            return opcode == TRUE
        return int.from_bytes(self.take(_WIDTH[opcode]), "little", signed=opcode == INT4)

    def numbers(self, *, is_new: bool) -> npt.NDArray[np.int32]:
        """The run of numbers here, or the first part of it; `is_new` if a list begins with it."""
        if is_new:
            self._runs.append(self._run)
            self._run = 0
        # A bin has three lists, so this one will be as long as the third before it. A window that
        # is too long costs what it is too long, and one that is too short costs another turn.
        wanted = max(self._runs[0] - self._run, self._run, 16)
        wanted = min(wanted + wanted // 8 + 8, _LONGEST)
        self._fill(min(wanted, self.left))
        values, taken = decode_run(memoryview(self._buffer)[self._at : self._at + wanted])
        if not taken:
            raise PickleDamagedError("truncated: it ends inside a number")
        self._at += taken
        self._run += taken
        return values

    def _fill(self, count: int) -> None:
        """Make sure that `count` bytes are in the buffer."""
        if count > self.left:
            raise PickleDamagedError(
                f"truncated: {count:,} bytes are wanted, but {self.left:,} are left"
            )
        if self._at + count <= len(self._buffer):
            return
        rest = self._buffer[self._at :]
        self._before += self._at
        self._at = 0
        wanted = min(max(_BUFFER, count - len(rest)), self._size - self._before - len(rest))
        self._buffer = rest + self._file.read(wanted)
        if len(self._buffer) < count:
            raise PickleDamagedError("truncated: the file became shorter while it was read")


def decode_run(data: bytes | memoryview) -> tuple[npt.NDArray[np.int32], int]:
    """The numbers at the beginning of `data`, as int32, and how many bytes they take.

    A run ends at the first opcode that is not a number, or where the bytes end inside one.
    """
    window = np.frombuffer(bytes(data) + _PAD, np.uint8)
    stop = _pairs(window[: len(data) // 2 * 2])
    if 2 * stop > len(data) and int(window[stop]) not in NUMBERS:
        places = np.arange(0, stop, 2)
    else:
        places, stop = _opcodes(window, len(data))
    opcodes = window.take(places)
    numbers = opcodes != APPENDS
    if not numbers.all():
        places, opcodes = places[numbers], opcodes[numbers]
    words: npt.NDArray[Any] = np.ndarray((len(data),), "<i4", window, offset=1, strides=(1,))
    values = (words[places] & _MASK.take(opcodes)) + (opcodes == TRUE)
    return values.astype(np.int32, copy=False), stop


def encode_run(values: npt.NDArray[np.integer[Any]]) -> bytes:
    """The shortest opcodes of these numbers, each in the range of int32."""
    if len(values) and values.min() >= 0 and values.max() < 2**8:  # a loss mask
        pairs = np.full((len(values), 2), INT1, np.uint8)
        pairs[:, 1] = values
        return pairs.tobytes()
    wide = values.astype("<i4")
    small = (wide >= 0) & (wide < 2**16)
    sizes = np.where(small, np.where(wide < 2**8, 2, 3), 5)
    stops = np.cumsum(sizes)
    out = np.empty(int(stops[-1]) if len(stops) else 0, np.uint8)
    starts = stops - sizes
    out[starts] = np.choose(sizes // 2 - 1, [INT1, INT4])  # 2 and 3 give 0, 5 gives 1
    out[starts[sizes == 3]] = INT2
    octets = wide.view(np.uint8).reshape(-1, 4)
    for place in range(4):
        wanted = sizes > place + 1
        out[starts[wanted] + place + 1] = octets[wanted, place]
    return out.tobytes()


def _pairs(data: Bytes) -> int:
    """How many bytes from the beginning are `K.` or `e(`: of a loss mask, all of them."""
    opcodes = data[::2]
    if (opcodes[:8] != INT1).any():
        return 0
    pairs = opcodes == INT1
    pairs |= (opcodes == APPENDS) & (data[1::2] == MARK)
    return len(data) if pairs.all() else 2 * int(pairs.argmin())


def _opcodes(window: Bytes, length: int) -> tuple[npt.NDArray[np.int64], int]:
    """Where the opcodes of the run begin, in order, and where it ends.

    Where one opcode begins depends on all before it. So: from every byte, where would the next
    opcode be (`after`), and where the sixteenth? A walk in sixteens needs few steps, and the
    opcodes between are found for all steps at once.
    """
    data = window[:length]
    sizes = _SIZE.take(data)
    ends = np.flatnonzero(data == APPENDS)
    sizes[ends[window[ends + 1] != MARK]] = 0
    after = np.arange(length + 1)
    after[:length] += sizes
    for place in range(max(length - 4, 0), length):
        if after[place] > length:
            after[place] = place  # cut off
    levels = [after]  # where the next opcode is, the second, the fourth, the eighth
    for _ in range(_ROUNDS - 1):
        levels.append(levels[-1].take(levels[-1]))
    walk, steps, place = levels[-1].take(levels[-1]).data, [], 0
    while walk[place] != place:
        steps.append(place)
        place = walk[place]
    places: npt.NDArray[np.int64] = np.array(steps, np.int64)
    for level in reversed(levels):
        places = np.stack((places, level.take(places)), axis=1).ravel()
    return places[places < place], place
