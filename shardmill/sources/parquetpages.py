"""How large the pages of a Parquet column are, told without reading them.

In: an open file and the place of a column chunk.  Out: the bytes of each page, unpacked.
Promise: only the headers are read, some dozen bytes a page. What is no page header ends the list:
whoever reads the pages will say what is wrong with them.
Not here: pages themselves (Arrow reads them, each whole).

A header is a struct in Thrift's compact protocol: fields, each a byte (the step from the last
field's number in the high half, the type in the low half) and a value. Of a page, fields 2 and 3
are the sizes, unpacked and as stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_HEADER_BYTES = 2**16  # longer ones hold statistics of odd length
_UNPACKED, _STORED = 2, 3
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_FIXED = {_TRUE: 0, _FALSE: 0, _BYTE: 1, _DOUBLE: 8}
_MOST_DEPTH = 8


class _NoHeader(Exception):
    """Inside this file only."""


def page_sizes(stream: BinaryIO, start: int, stop: int) -> Iterator[int]:
    """Unpacked bytes of each page between two places of a file, in order."""
    while start < stop:
        stream.seek(start)
        header = _Header(stream.read(min(_HEADER_BYTES, stop - start)))
        try:
            sizes = header.struct(0)
        except (_NoHeader, IndexError):
            return
        if sizes.get(_STORED, -1) < 0 or sizes.get(_UNPACKED, -1) < 0:
            return
        yield sizes[_UNPACKED]
        start += header.place + sizes[_STORED]


@dataclass(slots=True)
class _Header:
    """Bytes, and how many of them are read."""

    data: bytes
    place: int = 0

    def struct(self, depth: int) -> dict[int, int]:
        """The whole numbers among the fields of a struct, by field; the rest is passed over."""
        numbers: dict[int, int] = {}
        field = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            field = field + step if step else self._signed()
            if kind in (_I16, _I32, _I64):
                numbers[field] = self._signed()
            else:
                self._skip(kind, depth)
        return numbers

    def _skip(self, kind: int, depth: int) -> None:
        if kind in _FIXED:
            self.place += _FIXED[kind]
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _BINARY:
            length = self._varint()  # first: it moves the place itself
            self.place += length
        elif kind == _STRUCT and depth < _MOST_DEPTH:
            self.struct(depth + 1)
        else:  # pages have neither lists nor maps in their headers
            raise _NoHeader

    def _byte(self) -> int:
        self.place += 1
        return self.data[self.place - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _signed(self) -> int:
        """Zigzag: 0, -1, 1, -2, ... are written as 0, 1, 2, 3, ..."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
