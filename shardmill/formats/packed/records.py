"""Bins, the packed shards that hold them, and the checks that every packed format shares.

A bin holds whole sequences one after another. One function checks its invariant, for every format,
when it is written and when it is read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardmill.arguments import refuse_url, whole_number
from shardmill.errors import DamagedStoreError, OptionError, TokenRangeError
from shardmill.protocols import Closing
from shardmill.records import IntArray, OffsetArray, Ragged

LossMask: TypeAlias = npt.NDArray[np.uint8]
Alignment: TypeAlias = Literal["label", "roll_right"]
"""What `loss_mask[j]` means. "label": whether the label `ids[j + 1]` is trained; the last position
of every sequence is 0. "roll_right": the mask of the tokens, shifted right by one over the bin.
"""

Check: TypeAlias = Callable[[Path], object]
"""Called with a complete shard before it gets its name: if it raises, nothing is published."""

TOKEN_DTYPES = ("<u2", "<i4", "<u4", "<i8")
MAX_PACK_SIZE = 2**32 - 1
"""The length of the longest bin: starts are 32 bits wide."""

WRITE_INSTEAD = (
    "shardmill.compat.nemotron.process_chat_sft_pack_from_spool_core packs a spool to a file system"
)
"""What a user can do who wants a file at a URL."""


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
    """Consecutive bins, padded with zeros to one width, which is at most the pack size."""

    input_ids: IntArray  # (n, width)
    loss_mask: LossMask  # (n, width) 0 or 1
    lengths: OffsetArray  # (n,) tokens of each bin
    seq_starts: Ragged  # n lists of starts

    def __len__(self) -> int:
        return len(self.input_ids)

    def bins(self) -> Iterator[PackedBin]:
        """Each of them, as views."""
        for index, length in enumerate(self.lengths.tolist()):
            yield PackedBin(
                input_ids=self.input_ids[index, :length],
                loss_mask=self.loss_mask[index, :length],
                seq_starts=self.seq_starts[index].astype(np.int64, copy=False),
            )


class PackedShard(Closing):
    """Bins that can be read in any order, whatever their format.

    A pickled shard opens its files again, and refuses one that was written again meanwhile.
    """

    fingerprint: str | None = None  # of all that is stored; not every format has one

    def __init__(
        self,
        path: str | Path,
        *,
        pack_size: SupportsIndex | None = None,
        loss_mask_alignment: str | None = None,
    ) -> None:
        """`pack_size` (the most tokens a bin holds) and `loss_mask_alignment` are for formats that
        do not state them; where one is stated, another is refused."""
        self.path = path_to_read(path).absolute()
        stated_size, stated_alignment = self._open()
        size = agreed_pack_size(stated_size, pack_size, self.path)
        alignment = agreed_alignment(stated_alignment, loss_mask_alignment, self.path)
        self.pack_size = self._usual_pack_size() if size is None else size
        self.loss_mask_alignment = alignment or self._usual_alignment()

    @abstractmethod
    def _open(self) -> tuple[int | None, str | None]:
        """Open `path`; the pack size and the alignment that are stated there."""

    def _usual_pack_size(self) -> int:
        """The pack size if neither the file nor the caller states it."""
        raise OptionError(
            f"{self.path}: does not say its pack size: pass {{pack_size}}, or turn the file into a "
            "shard that says it, with `shardmill convert --from parquet --to memmap --pack-size "
            "N`",
            pack_size=...,
        )

    def _usual_alignment(self) -> Alignment:
        """As other programs write it."""
        return "label"

    @abstractmethod
    def __len__(self) -> int: ...

    def read_bin(self, bin_id: SupportsIndex) -> PackedBin:
        """Bin `bin_id`, 0 to len - 1."""
        number = whole_number(bin_id, "bin_id", least=None)
        if not 0 <= number < len(self):
            raise IndexError(f"bin {number:,} of {len(self):,}")
        return self._read(number)

    @abstractmethod
    def _read(self, number: int) -> PackedBin:
        """A bin that exists."""

    def bins(self) -> Iterator[PackedBin]:
        """All bins, in order."""
        return map(self.read_bin, range(len(self)))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.path.name!r}, bins={len(self):,}, "
            f"pack_size={self.pack_size:,})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self.pack_size, self.loss_mask_alignment)
        return _reopen, (type(self), self.path, options, (len(self), self.fingerprint))


def _reopen(
    kind: Any, path: Path, options: tuple[int, Alignment], wanted: tuple[int, str | None]
) -> PackedShard:
    try:
        shard: PackedShard = kind(path, pack_size=options[0], loss_mask_alignment=options[1])
        if (len(shard), shard.fingerprint) == wanted:
            return shard
    except OptionError:  # it states another pack size or alignment
        pass
    raise DamagedStoreError(f"{path}: was written again since it was opened; open it again")


@runtime_checkable
class PackedShardWriter(Protocol):
    """Takes bins one by one; nothing is published before `finalize`."""

    def write_bin(
        self, bin_id: int, input_ids: IntArray, loss_mask: IntArray, seq_start_id: IntArray
    ) -> None: ...

    def finalize(self) -> dict[str, Any]: ...


def check_bin(bin: PackedBin, pack_size: int, where: str) -> None:
    """Raise if a stored bin breaks the invariant. `where` names the file and the bin."""
    problem = bin_problem(bin.input_ids, bin.loss_mask, bin.seq_starts, pack_size)
    if problem is not None:
        raise DamagedStoreError(f"{where}: {problem}; write the shard again")


def bin_problem(
    input_ids: IntArray, loss_mask: IntArray, seq_starts: IntArray, pack_size: int
) -> str | None:
    """How a bin breaks the invariant: what was found and what was wanted. None: it keeps it."""
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
    if seq_starts.ndim != 1 or seq_starts.dtype.kind not in "iu":
        return f"starts of shape {seq_starts.shape} and dtype {seq_starts.dtype}"
    wanted = None
    if not len(seq_starts) or seq_starts[0] != 0:
        wanted = "the first to be 0"
    elif (seq_starts[1:] <= seq_starts[:-1]).any():
        wanted = "strictly increasing ones"
    if wanted is not None:
        more = ", ..." if len(seq_starts) > 8 else ""
        return f"starts {seq_starts[:8].tolist()}{more}, wanted {wanted}"
    if seq_starts[-1] >= length:
        return f"the last start is {seq_starts[-1]:,}, wanted less than the {length:,} tokens"
    return None


def without_end(seq_starts: IntArray, length: int) -> IntArray:
    """The starts without a last one at the end of the bin, whose sequence is empty.

    [0 1 2] in a bin of 2 tokens -> [0 1]. Other writers of this format leave such starts.
    """
    if seq_starts.ndim == 1 and len(seq_starts) > 1 and seq_starts[-1] == length:
        return seq_starts[:-1]
    return seq_starts


def checked_alignment(alignment: str) -> Alignment:
    """One of the two alignments, or an error that explains them."""
    for known in get_args(Alignment):
        if alignment == known:
            return known  # type: ignore[no-any-return]
    raise OptionError(
        "{loss_mask_alignment}: wanted 'label' (mask[j] says whether ids[j + 1] is trained) or "
        "'roll_right' (the token mask moved right by one over the whole bin)",
        loss_mask_alignment=alignment,
    )


def agreed_alignment(stored: str | None, given: str | None, where: object) -> Alignment | None:
    """The alignment that a file states, else the caller's; refused if they differ."""
    chosen = None if given is None else checked_alignment(given)
    if stored is None:
        return chosen
    if chosen not in (None, stored):
        raise OptionError(f"{where}: its masks are aligned {stored!r}, not {given!r}")
    return checked_alignment(stored)


def agreed_pack_size(stored: int | None, given: SupportsIndex | None, where: object) -> int | None:
    """The pack size that a file states, else the caller's; refused if they differ."""
    chosen = None if given is None else given_pack_size(given)
    if stored is not None and chosen not in (None, stored):
        raise OptionError(f"{where}: its pack_size is {stored:,}, not {chosen:,}")
    return chosen if stored is None else given_pack_size(stored)


def given_pack_size(pack_size: SupportsIndex) -> int:
    """A pack size that a caller gave."""
    size = whole_number(pack_size, "pack_size")
    if size > MAX_PACK_SIZE:
        raise OptionError(f"{{pack_size}}: wanted at most {MAX_PACK_SIZE:,}", pack_size=size)
    return size


def given_array(part: npt.ArrayLike, name: str, where: str) -> npt.NDArray[Any]:
    """What a caller gave, as a plain array; an array is not copied."""
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
    dtype: npt.DTypeLike,
    where: str,
) -> tuple[IntArray, IntArray, IntArray]:
    """Ids, mask and starts that a caller gave, if they keep the invariant and fit `dtype`.

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
    check_ids(ids, np.dtype(dtype), where)
    return ids, mask, starts


def check_ids(ids: IntArray, dtype: np.dtype[Any], where: str) -> None:
    """Refuse ids that are not whole numbers or do not fit: numpy would wrap them silently."""
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


def given_path(path: str | Path, what: str, *, instead: str = WRITE_INSTEAD) -> Path:
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


def token_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """A dtype that packed tokens can have, little endian."""
    wanted = "wanted uint16, int32, uint32 or int64"
    try:
        found = np.dtype(dtype).newbyteorder("<")
    except (TypeError, ValueError, SyntaxError) as error:
        raise OptionError(f"dtype={dtype!r:.100}: {wanted}") from error
    if found.str not in TOKEN_DTYPES:
        raise OptionError(f"dtype={found}: {wanted}")
    return found
