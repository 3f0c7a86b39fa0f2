"""Many token files as one run of tokens.

In: `TokenFile` records, in order, of either dtype; or a store and a split.  Out: copies of ids.
Promise: `gather` equals slicing the concatenation of all files; the result never depends on
`max_maps`, the reader or the process; copies pickle by path, survive fork and spawn, and open
their files again where they arrive.
Not here: epochs, shuffling, documents, the shift between inputs and targets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from shardmill.arguments import check_memory, whole_number
from shardmill.closing import Closing
from shardmill.errors import OptionError, StoreError
from shardmill.mapped import memory, pread
from shardmill.mapped.files import ShardFiles
from shardmill.mapped.grouped import GroupedReader
from shardmill.mapped.ranged import RangedReader
from shardmill.records import IntArray, OffsetArray, TokenFile

if TYPE_CHECKING:
    from shardmill.shards import Store

logger = logging.getLogger(__name__)

MAX_MAPS = 4096
"""Shards mapped at a time, unless told otherwise."""

_LARGE = 2**28
"""Tokens of a gather from which on it is asked whether they fit into memory."""

MOST_MAPS = 16_384
"""The kernel allows a process 65,530 maps; a shard takes up to two; others need some too."""

ReaderName: TypeAlias = Literal["auto", "mapped", "pread", "ranged", "grouped"]
"""How shards are read. Tokens are the same with every reader.

"mapped" maps files: the quickest, but a file that is cut while it is mapped ends the process
(SIGBUS). "pread" reads with system calls: a file that is cut is an error. "auto" is "pread" on
network file systems and "mapped" elsewhere. "ranged" (one address range, 64-bit Linux) and
"grouped" (one map after another, everywhere) are the two ways to map."""


READERS: tuple[ReaderName, ...] = get_args(ReaderName)


class Reader(Protocol):
    """What a space asks of the code that maps and copies."""

    def fill(self, starts: OffsetArray, out: npt.NDArray[Any]) -> None: ...

    def prefetch(self, starts: OffsetArray, length: int) -> None: ...


class TokenSpace(Closing):
    """Tokens 0..num_tokens of all files, one file after another. Threads may share it.

    `max_maps`: the most shards that are mapped, or open, at a time. `reader`: see `ReaderName`;
    the attribute of that name says what was chosen, "mapped" or "pread".
    """

    reader: Literal["mapped", "pread"]

    def __init__(
        self,
        files: Sequence[TokenFile] | ShardFiles,
        *,
        max_maps: int = MAX_MAPS,
        reader: ReaderName = "auto",
    ) -> None:
        if not 1 <= whole_number(max_maps, "max_maps", least=None) <= MOST_MAPS:
            raise OptionError(
                f"max_maps={max_maps:,}: wanted 1 to {MOST_MAPS:,}; the kernel allows a process "
                f"65,530 maps, and a shard takes up to two"
            )
        if reader not in READERS:
            choices = ", ".join(map(repr, READERS))
            raise OptionError(f"reader={reader!r}: wanted {choices}")
        if reader == "pread" and not pread.SUPPORTED:
            raise OptionError("reader='pread': this system has no preadv; wanted 'mapped'")
        self._files = files if isinstance(files, ShardFiles) else ShardFiles(files)
        self._max_maps = max_maps
        self._choice = reader
        self._opened: tuple[int, Reader] | None = None  # in which process, and what
        self._closed = False
        self.num_tokens = int(self._files.counts.sum())
        self.dtype: np.dtype[Any] = np.dtype(f"uint{8 * self._files.width}")
        self._wide_enough = {self.dtype}  # dtypes of `out` that were found to do
        self.reader = self._chosen()

    def gather(
        self, starts: npt.ArrayLike, length: int, out: npt.NDArray[Any] | None = None
    ) -> IntArray:
        """Row `i` holds the `length` tokens from `starts[i]` on: (n, length).

        `out` is filled and returned when given: that shape, any integer dtype that holds every
        value of `dtype` (int32 and int64 hold uint16). Without it a new array of `dtype`.
        """
        return self.gather_unchecked(self._checked(starts, length), length, out)

    def read(self, start: int, stop: int) -> IntArray:
        """A copy of the tokens `start..stop`, of `dtype`."""
        start = whole_number(start, "start", least=None)
        stop = whole_number(stop, "stop", least=None)
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start:,}..{stop:,} of {self.num_tokens:,}")
        out = np.empty((1, stop - start), self.dtype)
        if start < stop:
            self._reader().fill(np.array([start], np.int64), out)
        tokens: IntArray = out[0]
        return tokens

    def prefetch(self, starts: npt.ArrayLike, length: int) -> None:
        """Tell the kernel that these windows will be gathered soon; returns at once.

        Worth its microseconds (a system call a window) only for data that is not in memory.
        """
        self._reader().prefetch(self._checked(starts, length), length)

    def close(self) -> None:
        """Let go of all maps; may be called again. A gather under way in a thread ends well."""
        self._closed = True
        self._opened = None

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return (
            f"TokenSpace({self.num_tokens:,} {self.dtype} tokens in {len(self._files):,} "
            f"shards, {self.reader}{closed})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reader = self._chosen()  # this machine may have them on another file system

    def gather_unchecked(
        self, starts: OffsetArray, length: int, out: npt.NDArray[Any] | None = None
    ) -> IntArray:
        """`gather` for callers that looked at `starts` themselves: int64, all windows inside.

        A window outside would read memory that is not there, and that ends the process.
        """
        shape = (len(starts), length)
        if out is None:
            if shape[0] * length > _LARGE:
                what = f"{shape[0]:,} windows of {length:,} tokens"
                check_memory(shape[0] * length * self.dtype.itemsize, what, "ask for fewer")
            out = np.empty(shape, self.dtype)
        elif type(out) is not np.ndarray or out.dtype not in self._wide_enough:
            self._check_out(out)
        if out.shape != shape:
            raise OptionError(f"out has shape {out.shape}, wanted {shape}")
        if not out.flags.writeable:
            raise OptionError("out is read-only; pass an array that can be filled")
        self._reader().fill(starts, out)
        return out

    def _checked(self, starts: npt.ArrayLike, length: int) -> OffsetArray:
        length = whole_number(length, "length")
        array = as_positions(starts)
        row = first_outside(array, self.num_tokens - length)
        if row is not None:
            start = int(array[row])
            raise IndexError(
                f"window {row} of {len(array):,}: tokens {start:,}..{start + length:,} of "
                f"{self.num_tokens:,}"
            )
        return array

    def _check_out(self, out: npt.NDArray[Any]) -> None:
        if not isinstance(out, np.ndarray):
            raise OptionError(f"out is a {type(out).__name__}, wanted a numpy array")
        if out.dtype.kind not in "iu" or not np.can_cast(self.dtype, out.dtype, "safe"):
            raise OptionError(
                f"out has dtype {out.dtype}, which does not hold every {self.dtype} token; "
                f"wanted {self.dtype} or a wider integer, such as int64"
            )
        self._wide_enough.add(out.dtype)

    def _reader(self) -> Reader:
        """The reader of this process. What a forked child inherits may be half-way through a
        change another thread was making, so a child opens its own."""
        opened, process = self._opened, os.getpid()
        if opened is None or opened[0] != process:
            if self._closed:
                raise StoreError(f"{self!r} is closed; open the tokens again")
            opened = self._opened = (process, self._open_reader())
        return opened[1]

    def _chosen(self) -> Literal["mapped", "pread"]:
        if self._choice == "auto":
            return pread.reader_for(self._files.paths)
        return "pread" if self._choice == "pread" else "mapped"

    def _open_reader(self) -> Reader:
        if self.reader == "pread":
            return pread.PreadReader(self._files, max_open=self._max_maps)
        if self._choice == "grouped" or (self._choice != "ranged" and not memory.SUPPORTED):
            return GroupedReader(self._files, max_maps=self._max_maps)
        try:
            return RangedReader(self._files, max_maps=self._max_maps)
        except OSError as error:
            if self._choice == "ranged":
                raise
            logger.warning("%r: no address range (%s); reading shard by shard", self, error)
            return GroupedReader(self._files, max_maps=self._max_maps)


def open_tokens(
    store: Store, split: str, *, max_maps: int = MAX_MAPS, reader: ReaderName = "auto"
) -> TokenSpace:
    """All tokens of a split. Pickles as the store's path and fingerprint. `reader`: how shards are
    read, see `ReaderName`."""
    return TokenSpace(ShardFiles.of_store(store, split), max_maps=max_maps, reader=reader)


def as_positions(positions: npt.ArrayLike) -> OffsetArray:
    """One row of positions, as int64; nothing but integers."""
    array = np.asarray(positions)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.ndim != 1:
        raise OptionError(f"positions have shape {array.shape}, wanted one dimension")
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise OptionError(f"positions have dtype {array.dtype}, wanted integers")
    if array.dtype.kind == "u" and array.itemsize == 8:
        # past int64 it would come back negative; clipped, it is out of bounds as it should be
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    return array.astype(np.int64)


def first_outside(positions: OffsetArray, last: int) -> int | None:
    """Which position is the first one not in 0..last, both included; None if all are."""
    # argmin and argmax: a third of the price of min and max on a batch of starts
    if not len(positions) or (
        positions[positions.argmin()] >= 0 and positions[positions.argmax()] <= last
    ):
        return None
    return int(np.flatnonzero((positions < 0) | (positions > last))[0])
