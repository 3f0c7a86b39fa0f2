"""What a stream asks of a source: numbered rows of one length.

In: nothing; this is the protocol and its record.  Out: `RowSource`, `Place`, and what every source
checks and does alike.
Promise: whatever has these names can be mixed, shuffled, resumed and divided over ranks with
everything else that has them.
Not here: windows of a store or folder (sources), rows of a pack plan (packs).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.mapped.documents import Borders
from shardmill.mapped.space import as_positions, first_outside
from shardmill.records import OffsetArray

_BLOCK_BYTES = 256 * 1024

Documents: TypeAlias = tuple[tuple[int, int, int], ...]
"""(number in the split, start, stop) of each, in the order of the row."""


class Place(NamedTuple):
    """Where the tokens of one row lie, in the token space of its split."""

    start: int  # its first token
    stop: int  # behind its last token
    documents: Documents | None  # whose tokens these are; None when nobody knows


@runtime_checkable
class RowSource(Protocol):
    """A read-only sequence of rows without a state. Threads may share it; it pickles by path."""

    path: Path  # the store's folder, or the folder of tokens
    split: str | None  # None: the folder is no store
    name: str  # part of the order: the same rows under another name come in another order
    seq_len: int  # inputs of a row
    fingerprint: str  # equal ones, equal rows
    num_tokens: int  # in all rows
    window_bytes: int  # of one row on disk, about

    def __len__(self) -> int: ...

    def fill(
        self,
        items: npt.ArrayLike,
        input_ids: OffsetArray,
        labels: OffsetArray,
        rows: OffsetArray | None = None,
    ) -> None:
        """Row `items[i]` becomes row `i`, or row `rows[i]`, of both: (n, seq_len), int64."""

    def fill_unchecked(
        self,
        items: OffsetArray,
        input_ids: OffsetArray,
        labels: OffsetArray,
        rows: OffsetArray | None = None,
    ) -> None:
        """`fill` for items that an order gave, int64 and below the length, into fitting rows."""

    def borders(self, items: OffsetArray) -> Borders:
        """Where documents begin in these rows, tokens of `seq_len + 1`; an error when nobody knows,
        also for no items."""

    def place(self, item: int) -> Place: ...

    def prefetch(self, items: npt.ArrayLike) -> None:
        """Ask the kernel to read these rows ahead; returns at once."""

    def close(self) -> None: ...


def checked_name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise OptionError(f"name={name!r}: wanted a name for this source, such as 'wiki'")
    return name


def check_fill(
    source: RowSource, items: npt.ArrayLike, *arrays: OffsetArray, unit: str
) -> OffsetArray:
    """The border of every `fill`: items that the source has, for arrays that its rows fit.

    `unit` is what a row of this source is called.
    """
    numbers = as_positions(items)
    row = first_outside(numbers, len(source) - 1)
    if row is not None:
        raise IndexError(f"{unit} {numbers[row]:,} of {len(source):,}")
    check_rows(source.seq_len, *arrays)
    return numbers


def row_blocks(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Some rows at a time: narrow ids on their way to int64 stay in a core's own cache."""
    size = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def check_rows(seq_len: int, *arrays: OffsetArray) -> None:
    """Refuse arrays that rows of `seq_len` cannot be put into."""
    for array in arrays:
        if array.dtype != "int64" or array.shape[1:] != (seq_len,):
            raise OptionError(f"rows of {array.dtype} {array.shape}; wanted int64 (n, {seq_len:,})")
