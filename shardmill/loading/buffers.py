"""Arrays that are used again when nobody looks at them any more.

In: a shape.  Out: an int64 array of it, its contents anything.
Promise: an array that is given out again is referred to by nobody else: not by a batch, a view, a
slice, a memoryview or a tensor that shares its memory. Whoever keeps a batch, in whole or in part,
keeps its array, and another one takes its place here.
Not here: filling. Not for two threads at a time.

How: all of these hold a reference to the array that owns the memory, and CPython counts references.
A count that is the one of an array in this list alone cannot rise by anybody else's doing. Where
references are not counted so (PyPy, or threads without the interpreter's lock) every array is new.
"""

from __future__ import annotations

import sys

import numpy as np

from shardmill.records import OffsetArray


def _counts_references() -> bool:
    with_lock = getattr(sys, "_is_gil_enabled", lambda: True)
    return sys.implementation.name == "cpython" and bool(with_lock())


class Buffers:
    """At most `most` arrays of one shape are remembered, those given out included."""

    def __init__(self, shape: tuple[int, ...], *, most: int) -> None:
        self._shape = shape
        self._most = most if _counts_references() else 0
        self._arrays: list[OffsetArray] = [np.empty(0, np.int64)]
        self._idle = self._references(0)  # what is counted when only the list has an array
        self._arrays.clear()

    def take(self) -> OffsetArray:
        """An array that nobody refers to: a used one, or a new one."""
        for place in range(len(self._arrays)):
            if self._references(place) == self._idle:
                # to the end: the one that was given out longest ago is looked at first
                array = self._arrays.pop(place)
                self._arrays.append(array)
                return array
        array = np.empty(self._shape, np.int64)
        if self._most:
            if len(self._arrays) == self._most:
                del self._arrays[0]  # somebody keeps it; it is his now
            self._arrays.append(array)
        return array

    def _references(self, place: int) -> int:
        return sys.getrefcount(self._arrays[place])
