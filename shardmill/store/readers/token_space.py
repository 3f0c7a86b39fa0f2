"""Many token files as one run of tokens, and that run cut into windows.

`gather` equals slicing the concatenation of all files. The result never depends on `max_maps`, the
reader or the process. Copies pickle by path, survive fork and spawn, and open their files again
where they arrive.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from shardmill.arguments import nearest, whole_number
from shardmill.errors import OptionError, StoreError
from shardmill.machine import check_memory
from shardmill.protocols import Closing
from shardmill.records import IntArray, OffsetArray, TokenFile
from shardmill.store import Store, open_store
from shardmill.store.layout import META
from shardmill.store.manifest import MAX_META_BYTES, refuse_remote
from shardmill.store.readers import mapped
from shardmill.store.readers.files import PreadReader, ShardFiles

logger = logging.getLogger(__name__)

MAX_MAPS = 4096
"""Shards mapped at a time by default."""

_LARGE = 2**28  # tokens; a larger gather is checked against the memory that is available

_MAPS_LIMIT = 16_384
"""The kernel allows a process 65,530 maps; a shard takes up to two, and others need some too."""

ReaderName: TypeAlias = Literal["auto", "mapped", "pread"]
"""How shards are read. Tokens are the same with every reader.

"mapped" maps files: the fastest, but a file that is cut while it is mapped ends the process
(SIGBUS). "pread" reads with system calls: a file that is cut is an error. "auto" is "pread" on
network file systems and "mapped" elsewhere. Where shards cannot be mapped (more than `max_maps` of
them, or another system than 64-bit Linux), "mapped" is read as "pread"."""

READERS: tuple[ReaderName, ...] = get_args(ReaderName)

_NETWORK = {
    *("lustre", "wekafs", "gpfs", "beegfs", "ceph", "afs", "orangefs", "pvfs2", "panfs"),
    *("nfs", "nfs4", "cifs", "smb3", "fuse", "fuseblk"),
}
"""File systems on which files are not mapped. Lustre and WekaFS refuse maps after some hundred. On
all of them a server, network or daemon that fails under a mapped page causes a SIGBUS."""

_MOUNTS = Path("/proc/self/mountinfo")

_MAX_COPIED = 64 * 2**20
"""Bytes of an index or mask: 8 million documents, or the mask of 500 million tokens."""

Values = TypeVar("Values", bound=npt.NDArray[Any])


Reader: TypeAlias = mapped.MappedReader | PreadReader


class TokenSpace(Closing):
    """Tokens 0..num_tokens of all files, one file after another. Threads may share it.

    All files have one dtype. `max_maps`: how many shards are mapped, or open, at most. `reader`:
    see `ReaderName`; the attribute of that name says what was chosen, "mapped" or "pread".
    """

    reader: Literal["mapped", "pread"]

    def __init__(
        self,
        files: Sequence[TokenFile] | ShardFiles,
        *,
        max_maps: int = MAX_MAPS,
        reader: ReaderName = "auto",
    ) -> None:
        if not 1 <= whole_number(max_maps, "max_maps", least=None) <= _MAPS_LIMIT:
            raise OptionError(
                f"{{max_maps}}: wanted 1 to {_MAPS_LIMIT:,}; the kernel allows a process 65,530 "
                "maps, and a shard takes up to two",
                max_maps=max_maps,
            )
        if reader not in READERS:
            raise OptionError(f"{{reader}}: wanted {', '.join(map(repr, READERS))}", reader=reader)
        self._files = files if isinstance(files, ShardFiles) else ShardFiles.of_files(files)
        self._max_maps = max_maps
        self._choice = reader
        self._opened: tuple[int, Reader] | None = None  # the process id and its reader
        self._closed = False
        self.num_tokens = int(self._files.counts.sum())
        self.dtype: np.dtype[Any] = np.dtype(f"uint{8 * self._files.width}")
        self._wide_enough = {self.dtype}  # dtypes of `out` that passed the check
        self.reader = self._chosen()

    def gather(
        self, starts: npt.ArrayLike, length: int, out: npt.NDArray[Any] | None = None
    ) -> IntArray:
        """Row `i` holds the `length` tokens from `starts[i]` on: (n, length).

        `out`, if passed, is filled and returned: of that shape, and of any integer dtype that holds
        every value of `dtype` (int32 and int64 hold uint16). Otherwise a new array of `dtype`.
        """
        return self.gather_unchecked(self._checked(starts, length), length, out)

    def read(self, start: int, stop: int) -> IntArray:
        """A copy of the tokens `start..stop`, of `dtype`."""
        start = whole_number(start, "start", least=None)
        stop = whole_number(stop, "stop", least=None)
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start:,}..{stop:,} of {self.num_tokens:,}")
        if start == stop:
            return np.empty(0, self.dtype)
        tokens: IntArray = self.gather_unchecked(np.array([start], np.int64), stop - start)[0]
        return tokens

    def prefetch(self, starts: npt.ArrayLike, length: int) -> None:
        """Ask the kernel to read these windows ahead; returns at once.

        Worth its microseconds (a system call a window) only for data that is not in memory.
        """
        self._reader().prefetch(self._checked(starts, length), length)

    def close(self) -> None:
        """Release all maps; may be called again. A gather that runs in a thread completes."""
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
        self.reader = self._chosen()  # here the files may be on another file system

    def gather_unchecked(
        self, starts: OffsetArray, length: int, out: npt.NDArray[Any] | None = None
    ) -> IntArray:
        """`gather` for callers that checked `starts` themselves: int64, all windows inside.

        A window outside would read memory that is not mapped, which ends the process.
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
            raise OptionError("out is read-only; pass a writeable array")
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
        """The reader of this process. A forked child opens its own: what it inherits may be in the
        middle of a change that another thread was making."""
        opened, process = self._opened, os.getpid()
        if opened is None or opened[0] != process:
            if self._closed:
                raise StoreError(f"{self!r} is closed; open the tokens again")
            opened = self._opened = (process, self._open_reader())
        return opened[1]

    def _chosen(self) -> Literal["mapped", "pread"]:
        if self._choice == "pread" or not mapped.SUPPORTED or len(self._files) > self._max_maps:
            return "pread"
        return reader_for(self._files.paths) if self._choice == "auto" else "mapped"

    def _open_reader(self) -> Reader:
        if self.reader == "mapped":
            try:
                return mapped.MappedReader(self._files)
            except OSError as error:
                logger.warning("%r: no address range (%s); reading with pread", self, error)
        return PreadReader(self._files, max_open=self._max_maps)


def open_tokens(
    store: Store, split: str, *, max_maps: int = MAX_MAPS, reader: ReaderName = "auto"
) -> TokenSpace:
    """All tokens of a split. Pickles as the store's path and fingerprint; see `TokenSpace`."""
    return TokenSpace(ShardFiles.of_store(store, split), max_maps=max_maps, reader=reader)


def held_by(reader: str, array: Values) -> Values:
    """A mapped index, mask or plan for `reader`: with "pread" it is copied into memory, so that
    cutting the file does no harm, unless it is larger than 64 MiB."""
    return array.copy() if reader == "pread" and array.nbytes <= _MAX_COPIED else array


def reader_for(paths: Iterable[str], mounts: str | None = None) -> Literal["mapped", "pread"]:
    """How to read these files: "pread" if any is on a network file system, else "mapped".

    `mounts`: the mount table of Linux; by default that of this process, empty elsewhere.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            mounts = ""
    folders = {os.path.dirname(path) for path in paths}  # noqa: PTH120 - 100,000 plain strings
    kinds = [file_system_of(os.path.realpath(folder), mounts) or "" for folder in folders]
    network = any(kind in _NETWORK or kind.startswith("fuse.") for kind in kinds)
    return "pread" if network else "mapped"


def file_system_of(path: str, mounts: str) -> str | None:
    """The type of the file system of an absolute path; None if it is unknown."""
    longest, kind = -1, None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
        inside = point == "/" or path == point or path.startswith(f"{point}/")
        if inside and len(point) >= longest:  # of two mounts at one point the later one is visible
            longest, kind = len(point), after.split()[0]
    return kind


def as_positions(positions: npt.ArrayLike) -> OffsetArray:
    """A one-dimensional array of int64; nothing but integers is converted."""
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
        # beyond int64 it would become negative; clipped, it is out of bounds as it should be
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    return array.astype(np.int64)


def first_outside(positions: OffsetArray, last: int) -> int | None:
    """The index of the first position outside 0..last, both included; None if there is none."""
    # argmin and argmax: a third of the cost of min and max on a batch of starts
    if not len(positions) or (
        positions[positions.argmin()] >= 0 and positions[positions.argmax()] <= last
    ):
        return None
    return int(np.flatnonzero((positions < 0) | (positions > last))[0])


def item_numbers(numbers: npt.ArrayLike, num_items: int, kind: str) -> OffsetArray:
    """`as_positions` of 0..num_items - 1; any other one is an IndexError such as "row 7 of 5"."""
    array = as_positions(numbers)
    wrong = first_outside(array, num_items - 1)
    if wrong is not None:
        raise IndexError(f"{kind} {array[wrong]:,} of {num_items:,}")
    return array


class Windows:
    """Every whole window of a space: window `i` is `seq_len + 1` tokens from `i * seq_len` on.

    Neighbours share one token, so every transition from a token to the next is in exactly one
    window. Tokens at the end that fill no window are in none.
    """

    def __init__(self, space: TokenSpace, *, seq_len: int) -> None:
        self.space = space
        self.seq_len = whole_number(seq_len, "seq_len")

    def __len__(self) -> int:
        return max(0, (self.space.num_tokens - 1) // self.seq_len)

    def gather(self, indices: npt.ArrayLike, out: npt.NDArray[Any] | None = None) -> IntArray:
        """The windows of these numbers, (n, seq_len + 1); `out` as in `TokenSpace.gather`."""
        return self.space.gather_unchecked(self._starts(indices), self.seq_len + 1, out)

    def gather_unchecked(self, indices: OffsetArray) -> IntArray:
        """`gather` for callers that know all indices to be int64 and below `len(self)`."""
        return self.space.gather_unchecked(indices * self.seq_len, self.seq_len + 1)

    def prefetch(self, indices: npt.ArrayLike) -> None:
        """Ask the kernel to read these windows ahead; see `TokenSpace.prefetch`."""
        self.space.prefetch(self._starts(indices), self.seq_len + 1)

    def __repr__(self) -> str:
        return f"Windows({self.space!r}, seq_len={self.seq_len:,}, windows={len(self):,})"

    def _starts(self, indices: npt.ArrayLike) -> OffsetArray:
        return item_numbers(indices, len(self), "window") * self.seq_len


_FORMAT = re.compile(rb'"format"\s*:\s*"shardmill-store"')


def find_split(path: str | Path, split: str | None = None) -> tuple[Store, str] | None:
    """The split that `path` means: a store's folder, or `folder/split`; None if it is no store.

    A store with one split needs no name. A damaged or unfinished store is an error.
    """
    refuse_remote(path)
    folder = Path(path).absolute()
    if _is_ours(folder):
        store, named = open_store(folder), split
    elif _is_ours(folder.parent):
        store, named = open_store(folder.parent), folder.name
        if split not in (None, named):
            raise OptionError(f"{folder} is the split {named!r}, but {{split}}", split=split)
    else:
        return None
    if named is None and len(store.splits) == 1:
        named = store.splits[0]
    if named not in store.splits:
        near = None if named is None else nearest(named, store.splits)
        meant = near or store.splits[0]
        raise OptionError(
            f"{store.folder}: a store with the splits {list(store.splits)}; "
            + ("say which" if named is None else f"none is {named!r}")
            + (f"; did you mean {near!r}?" if near else "")
            + f": {{split}}, or open {store.folder / meant}",
            split=meant,
        )
    return store, named


def is_store(path: str | Path) -> bool:
    """Whether `find_split` finds a store at `path`, sound or not."""
    folder = Path(path).absolute()
    return _is_ours(folder) or _is_ours(folder.parent)


def _is_ours(folder: Path) -> bool:
    """Whether meta.json claims to be a manifest of ours, sound or not."""
    path = folder / META
    try:
        if not path.is_file() or path.stat().st_size > MAX_META_BYTES:
            return False
        return _FORMAT.search(path.read_bytes()) is not None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise OptionError(f"{path}: cannot be read ({error}); is this a store?") from error
