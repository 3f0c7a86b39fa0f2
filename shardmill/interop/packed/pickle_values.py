"""What can lie on the stack while a legacy pickle is read: numbers, arrays, bins, and names.

In: parts of a pickle.  Out: the same as numpy arrays, or a refusal (None, False or a sentence).
Promise: nothing here calls or imports what a file names; sizes are checked before memory is taken.
Not here: opcodes (unpickle.py), bytes (pickle_bytes.py).
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, Literal

import numpy as np

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
