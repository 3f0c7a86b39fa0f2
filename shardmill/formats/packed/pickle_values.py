"""The bytes of a pickle, front to back, and what it may refer back to.

In: an open file and the number of bytes that belong to the pickle.  Out: numbers, names, bytes.
Promise: a size that a file claims is compared with what is left of it before memory is taken; a
buffer of 1 MiB; what is kept for references is bounded, and a reference beyond it is refused.
Not here: opcodes (unpickle.py).

What can lie on the stack while a legacy pickle is read: numbers, arrays, bins, and names.

In: parts of a pickle.  Out: the same as numpy arrays, or a refusal (None, False or a sentence).
Promise: nothing here calls or imports what a file names; sizes are checked before memory is taken.
Not here: opcodes (unpickle.py), bytes (pickle_bytes.py).

Runs of whole numbers in a pickle, thousands at a time.

In: bytes that begin at an opcode.  Out: the numbers of the run that begins there, as int32.
Promise: exactly what the opcodes say, in order; a run ends at the first opcode that is no number,
or where the bytes end in the middle of one. No loop over numbers.
Not here: what the numbers are for (unpickle.py), files.

A pickle writes a list as MARK numbers APPENDS, a thousand numbers at a time: `( K. K. M.. e ( ...`.
So `e(` is passed over: it neither ends the list nor adds to it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.records import IntArray

MOST_TOKENS: Final = 2**24
"""No bin is longer than this: 16 million tokens."""


class Sign(Enum):
    """Places on the stack that hold no value."""

    MARK = "mark"
    DONE = "a bin that was given away"


class Global(Enum):
    """The four names a packed .npy needs. They are compared, never looked up."""

    RECONSTRUCT = "_reconstruct"
    NDARRAY = "ndarray"
    DTYPE = "dtype"
    SCALAR = "scalar"


_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")  # numpy 1 and numpy 2
_GLOBALS = {
    **{(module, "_reconstruct"): Global.RECONSTRUCT for module in _MULTIARRAY},
    **{(module, "scalar"): Global.SCALAR for module in _MULTIARRAY},
    ("numpy", "ndarray"): Global.NDARRAY,
    ("numpy", "dtype"): Global.DTYPE,
}
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_OBJECT = ("O8", "O4", "O")
_ORDERS = ("<", ">", "|", "=")
_OBJECT_FLAGS = 63  # of dtype("O"), in every numpy; those of whole numbers are 0


def global_named(module: object, name: object) -> Global | None:
    """One of the four, or None for every other name."""
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    return _GLOBALS.get((module, name))


class Numbers:
    """A list of whole numbers that is being read."""

    def __init__(self) -> None:
        self._chunks: list[IntArray] = []
        self._count = 0
        self._values: IntArray | None = None  # when the list is complete

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def is_empty(self) -> bool:
        return self._count == 0

    def add(self, chunk: IntArray) -> str | None:
        """Numbers at the end; a sentence when that cannot be."""
        if self._values is not None:
            return "a list that goes on after it was used"
        if self._count + len(chunk) > MOST_TOKENS:
            return f"a list of more than {MOST_TOKENS:,} numbers"
        self._count += len(chunk)
        self._chunks.append(chunk)
        return None

    def extend(self, items: list[Any]) -> str | None:
        if not all(isinstance(item, int) and -(2**63) <= item < 2**63 for item in items):
            return "an element of a list that is no whole number of 64 bits"
        return self.add(np.array(items, np.int64)) if items else None

    def values(self) -> IntArray | None:
        """All of them, as int32 or int64."""
        if self._values is None:
            self._values = np.concatenate([np.empty(0, np.int32), *self._chunks])
            self._chunks = [self._values]
        return self._values


class DType:
    """A dtype of whole numbers, or that of objects."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._order: Literal["<", ">", "|", "="] | None = None

    @classmethod
    def named(cls, name: object) -> DType | None:
        return cls(name) if isinstance(name, str) and name in (*_DTYPES, *_OBJECT) else None

    @property
    def is_object(self) -> bool:
        return self.name in _OBJECT

    def build(self, state: tuple[Any, ...]) -> bool:
        """Take the byte order. No subarrays, fields, metadata, other flags or second time."""
        flags = _OBJECT_FLAGS if self.is_object else 0
        plain = len(state) == 8 and state[0] == 3 and state[2:] == (None, None, None, -1, -1, flags)
        if not plain or self._order is not None or state[1] not in _ORDERS:
            return False
        self._order = state[1]
        return True

    def numbers(self, raw: object, count: int) -> IntArray | None:
        """`count` numbers in these bytes; None when they are not just that."""
        if self.is_object or not isinstance(raw, bytes):
            return None
        stored = np.dtype("u1" if self.name == "b1" else self.name)
        if len(raw) != count * stored.itemsize:
            return None
        found: IntArray = np.frombuffer(raw, stored.newbyteorder(self._order or "="))
        if self.name == "b1" and count and found.max() > 1:
            return None
        return found.astype(stored, copy=False)


class Array:
    """A numpy array that is being read."""

    def __init__(self) -> None:
        self._values: IntArray | None = None
        self.outer_count: int | None = None  # bins, when it is the array around all of them

    @property
    def nbytes(self) -> int:
        return 0 if self._values is None else self._values.nbytes

    def build(self, state: tuple[Any, ...]) -> bool:
        """Take (version, shape, dtype, fortran, bytes): one dimension of numbers, and once."""
        version, shape, dtype, fortran, raw = state
        if version != 1 or not isinstance(dtype, DType) or fortran not in (0, 1):
            return False
        if not isinstance(shape, tuple) or len(shape) != 1 or not isinstance(shape[0], int):
            return False
        if self._values is not None or not 0 <= shape[0] <= MOST_TOKENS:
            return False
        self._values = dtype.numbers(raw, shape[0])
        return self._values is not None

    def values(self) -> IntArray | None:
        return self._values


class Bin:
    """A dict that is being read: complete when it has all fields."""

    def __init__(self) -> None:
        self.fields: dict[str, IntArray] = {}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.fields.values())


class Outer:
    """The list of all elements of the array: only their number is kept."""

    def __init__(self) -> None:
        self.count = 0


INT1, INT2, INT4, TRUE, FALSE = 0x4B, 0x4D, 0x4A, 0x88, 0x89  # K M J, and the booleans
APPENDS, MARK = 0x65, 0x28

_ROUNDS = 4  # jumps are doubled so often: 16 opcodes at a time
_SIZE = np.zeros(256, np.uint8)
_SIZE[[INT1, INT2, INT4, TRUE, FALSE, APPENDS]] = 2, 3, 5, 1, 1, 2
_MASK = np.zeros(256, np.int32)
_MASK[[INT1, INT2, INT4]] = 0xFF, 0xFFFF, -1
_PAD = bytes(8)
_NUMBERS = frozenset((INT1, INT2, INT4, TRUE, FALSE))

Bytes = npt.NDArray[np.uint8]


def begins_run(opcode: int) -> bool:
    """Whether a number begins with this byte."""
    return opcode in _NUMBERS


def decode_run(data: bytes | memoryview) -> tuple[npt.NDArray[np.int32], int]:
    """The numbers at the beginning of `data`, and how many bytes they take."""
    window = np.frombuffer(bytes(data) + _PAD, np.uint8)
    stop = _pairs(window[: len(data) // 2 * 2])
    if 2 * stop > len(data) and not begins_run(int(window[stop])):
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
    """How many bytes are `K.` or `e(` from the beginning on: of a loss mask, all of them."""
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
