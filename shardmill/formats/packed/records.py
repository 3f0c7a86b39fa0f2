"""What every packed format holds: bins of whole sequences, one behind the other.

In: nothing; these are the records and the protocols of the packed formats.
Out: `PackedBin`, the `PackedShard` and `PackedShardWriter` protocols, `check_bin`.
Promise: one invariant, checked by one function, for every format that is written or read.
Not here: files (memmap, parquet, legacy), and which sequences share a bin (packing).

Check bins, sizes and paths as a caller gives them, before anything is written.

Refused in the caller's words: ragged lists, masked arrays, ids that do not fit, bins that break the
invariant of records.py, impossible paths, and URLs where a local path is needed.

Many half-open spans as one array of places.

In: starts and stops.  Out: every place of every span, and where each span begins among them.
Promise: pure; one allocation of the result's size.
Not here: what lies at the places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardmill.arguments import refuse_url, whole_number
from shardmill.errors import DamagedStoreError, OptionError, TokenRangeError
from shardmill.records import IntArray, OffsetArray, Ragged

LossMask: TypeAlias = npt.NDArray[np.uint8]
Alignment: TypeAlias = Literal["label", "roll_right"]
"""What `loss_mask[j]` speaks of. "label": whether the label `ids[j + 1]` is trained; the last place
of every sequence is 0. "roll_right": the mask of the tokens moved right by one over the whole bin.
"""


Check: TypeAlias = Callable[[Path], object]
"""Called with a finished shard before it gets its name: when it raises, nothing is published."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBin:
    """The sequences of one bin, without padding."""

    input_ids: IntArray  # (L,) any integer dtype
    loss_mask: LossMask  # (L,) 0 or 1, aligned as the shard says
    seq_starts: npt.NDArray[np.int64]  # (S,) from 0, strictly increasing, the last below L

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def seq_boundaries(self) -> list[int]:
        """The starts and the end: sequence `i` is `boundaries[i]..boundaries[i + 1]`."""
        return [*self.seq_starts.tolist(), len(self.input_ids)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBlock:
    """Some bins behind one another, padded with zeros to one length: that of a row, or less."""

    input_ids: IntArray  # (n, width)
    loss_mask: LossMask  # (n, width) 0 or 1
    lengths: OffsetArray  # (n,) tokens of each bin
    seq_starts: Ragged  # n lists of starts

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def width(self) -> int:
        """Places of each, with padding: no more than the pack size."""
        return int(self.input_ids.shape[1])

    def bin(self, index: int) -> PackedBin:
        """One of them, as views."""
        length = int(self.lengths[index])
        return PackedBin(
            input_ids=self.input_ids[index, :length],
            loss_mask=self.loss_mask[index, :length],
            seq_starts=self.seq_starts[index].astype(np.int64, copy=False),
        )


@runtime_checkable
class PackedShard(Protocol):
    """Some bins that can be read in any order."""

    @property
    def pack_size(self) -> int:
        """The most tokens a bin holds."""

    @property
    def loss_mask_alignment(self) -> str:
        """ "label" or "roll_right"."""

    def __len__(self) -> int: ...

    def read_bin(self, bin_id: int) -> PackedBin: ...

    def close(self) -> None: ...


@runtime_checkable
class PackedShardWriter(Protocol):
    """Takes bins one by one; nothing is there until `finalize`."""

    def write_bin(
        self, bin_id: int, input_ids: IntArray, loss_mask: IntArray, seq_start_id: IntArray
    ) -> None: ...

    def finalize(self) -> dict[str, Any]: ...


def check_bin(bin: PackedBin, pack_size: int, where: str) -> None:
    """The invariant of every packed format. `where` names the file and the bin."""
    problem = bin_problem(bin.input_ids, bin.loss_mask, bin.seq_starts, pack_size)
    if problem is not None:
        raise DamagedStoreError(f"{where}: {problem}; write the shard again")


def bin_problem(
    input_ids: IntArray, loss_mask: IntArray, seq_starts: IntArray, pack_size: int
) -> str | None:
    """What breaks the invariant, found and wanted; None when nothing does."""
    for name, array in (("input_ids", input_ids), ("loss_mask", loss_mask)):
        if array.ndim != 1:
            return f"{name} of shape {array.shape}, wanted one dimension"
    length = len(input_ids)
    if not 1 <= length <= pack_size:
        return f"{length:,} tokens, wanted 1 to pack_size={pack_size:,}"
    if len(loss_mask) != length:
        return f"a loss_mask of {len(loss_mask):,} for {length:,} tokens"
    if loss_mask.dtype.kind not in "biu" or loss_mask.max() > 1 or loss_mask.min() < 0:
        return "a loss_mask with other values than 0 and 1"
    return starts_problem(seq_starts, length)


def block_problem(block: PackedBlock, pack_size: int) -> str | None:
    """What breaks the invariant in any bin of a block; None when nothing does."""
    shape = (len(block), pack_size)
    for name, rows in (("input_ids", block.input_ids), ("loss_mask", block.loss_mask)):
        if isinstance(rows, np.ma.MaskedArray):
            return f"{name} is a numpy masked array, whose mask would be lost"
        if rows.shape != shape:
            return f"{name} of shape {rows.shape}, wanted {shape}"
    if len(block.lengths) != len(block) or len(block.seq_starts) != len(block):
        return f"{len(block.lengths):,} lengths, {len(block.seq_starts):,} lists of starts"
    if not len(block):
        return None
    if block.lengths.min() < 1 or block.lengths.max() > pack_size:
        return f"a bin outside 1 to pack_size={pack_size:,} tokens"
    if block.loss_mask.dtype != np.uint8 or block.loss_mask.max() > 1:
        return "a loss_mask with other values than 0 and 1"
    starts, offsets = block.seq_starts.values, block.seq_starts.offsets
    if (np.diff(offsets) < 1).any() or (starts[offsets[:-1]] != 0).any():
        return "a bin whose first start is not 0"
    rises = np.diff(starts.astype(np.int64, copy=False)) > 0
    rises[offsets[1:-1] - 1] = True  # from one bin to the next
    if not rises.all() or (starts[offsets[1:] - 1] >= block.lengths).any():
        return "a bin whose starts do not rise, or end behind its tokens"
    return None


def starts_problem(seq_starts: IntArray, length: int) -> str | None:
    """What is wrong with the starts of the sequences in a bin of `length` tokens."""
    if seq_starts.ndim != 1 or seq_starts.dtype.kind not in "iu":
        return f"starts of shape {seq_starts.shape} and dtype {seq_starts.dtype}"
    if not len(seq_starts) or seq_starts[0] != 0:
        return f"starts {_shown(seq_starts)}, wanted the first to be 0"
    if (seq_starts[1:] <= seq_starts[:-1]).any():
        return f"starts {_shown(seq_starts)}, wanted strictly increasing ones"
    if seq_starts[-1] >= length:
        return f"the last start is {seq_starts[-1]:,}, wanted less than the {length:,} tokens"
    return None


def without_end(seq_starts: IntArray, length: int) -> IntArray:
    """The starts of the sequences that have tokens: a last start at the end of a bin has none.

    [0 1 2] in a bin of 2 tokens -> [0 1]. Other writers of this format leave such starts.
    """
    if seq_starts.ndim == 1 and len(seq_starts) > 1 and seq_starts[-1] == length:
        return seq_starts[:-1]
    return seq_starts


def checked_alignment(alignment: str) -> Alignment:
    """One of the two, or an error that says what they mean."""
    for known in get_args(Alignment):
        if alignment == known:
            return known  # type: ignore[no-any-return]
    raise OptionError(
        f"loss_mask_alignment={alignment!r}: wanted 'label' (mask[j] says whether ids[j + 1] is "
        "trained) or 'roll_right' (the token mask moved right by one over the whole bin)"
    )


def _shown(array: IntArray) -> str:
    few = array[:8].tolist()
    return f"{few}" if len(array) <= 8 else f"{few[:-1]} and {len(array) - 7:,} more"


MOST_PACKED = 2**32 - 1
"""No bin is longer: starts are 32 bits wide."""

WRITE_INSTEAD = (
    "shardmill.remote.process_chat_sft_pack_from_spool_core packs a spool to a file system"
)
"""What can be done for a file at a URL."""

Arrays = tuple[IntArray, IntArray, IntArray]


def given_pack_size(pack_size: SupportsIndex) -> int:
    """A length that bins can have."""
    size = whole_number(pack_size, "pack_size")
    if size > MOST_PACKED:
        raise OptionError(f"pack_size={size:,}: wanted at most {MOST_PACKED:,}")
    return size


def given_array(part: npt.ArrayLike, name: str, where: str) -> npt.NDArray[Any]:
    """A plain array of what was given, not copied if it is one."""
    if isinstance(part, np.ma.MaskedArray):
        raise OptionError(
            f"{where}: {name} is a numpy masked array, whose mask would be lost; fill it, or leave "
            "out what it hides"
        )
    try:
        return np.asarray(part)
    except (ValueError, TypeError, OverflowError) as error:
        raise OptionError(
            f"{where}: {name} is no array of whole numbers: {error!s:.200}"
        ) from error


def given_bin(
    parts: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    pack_size: int,
    dtype: np.dtype[Any],
    where: str,
) -> Arrays:
    """Ids, mask and starts of one bin that keeps the invariant and fits `dtype`.

    A last start at the end of the bin, an empty sequence, is left out.
    """
    names = ("input_ids", "loss_mask", "seq_start_id")
    ids, mask, starts = (
        given_array(part, name, where) for part, name in zip(parts, names, strict=True)
    )
    starts = without_end(starts, len(ids) if ids.ndim else 0)
    problem = bin_problem(ids, mask, starts, pack_size)
    if problem is not None:
        raise OptionError(f"{where}: {problem}")
    check_ids(ids, dtype, where)
    return ids, mask, starts


def check_ids(ids: IntArray, dtype: np.dtype[Any], where: str) -> None:
    """Refuse ids that are no whole numbers or do not fit: numpy would wrap them without a word."""
    if ids.dtype.kind not in "iu":
        raise OptionError(f"{where}: ids are {ids.dtype}, wanted ints")
    if not ids.size:
        return
    low, high, most = int(ids.min()), int(ids.max()), int(np.iinfo(dtype).max)
    if low < 0 or high > most:
        raise TokenRangeError(
            f"{where}: token id {low if low < 0 else high:,} does not fit {dtype.name}, which "
            f"holds 0 to {most:,}"
        )


def given_path(path: str | Path, what: str, *, instead: str) -> Path:
    """An absolute local path to write to. `what` and `instead` as in `refuse_url`."""
    refuse_url(path, what, instead=instead)
    try:
        found = Path(path).absolute()
        found.resolve().exists()  # raises for names that no file can have, and for loops of links
        return found
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise OptionError(f"{str(path)!r:.300}: no path to write to: {words}") from error


def path_to_read(path: str | Path, what: str = "path") -> Path:
    """A local path to read from; a URL is refused."""
    refuse_url(path, what, instead="copy the folder with shardmill.remote.pull, or the file, first")
    return Path(path)


def spread(starts: OffsetArray, stops: OffsetArray) -> tuple[OffsetArray, OffsetArray]:
    """starts [5 0], stops [7 3] -> [5 6 0 1 2], [0 2 5]"""
    lengths = stops - starts
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths), offsets
