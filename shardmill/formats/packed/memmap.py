"""Read memmap_padded_v1: five plain `.npy` arrays and a manifest, mapped and read in any order.

Opening reads the manifest and five headers, whatever the size of the shard; each array must have
exactly the dtype, shape and bytes that the manifest says. Every bin is checked as it is read.
`verify_memmap_shard` checks every byte in a few MiB of memory.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, SupportsIndex

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import (
    DamagedStoreError,
    ManifestError,
    ShardmillError,
    StoreError,
    StoreNotFoundError,
)
from shardmill.formats.packed.files import (
    MANIFEST,
    SEAL,
    FileEntry,
    file_sha256,
    is_sealed,
    read_manifest_as,
    reading,
)
from shardmill.formats.packed.records import (
    MAX_PACK_SIZE,
    Alignment,
    PackedBin,
    agreed_alignment,
    check_bin,
    path_to_read,
)
from shardmill.protocols import Closing
from shardmill.records import JSON, OffsetArray
from shardmill.store.readers.foreign import parse_npy

logger = logging.getLogger(__name__)

ARRAYS = ("input_ids", "loss_mask", "packed_len", "seq_offsets", "seq_starts")
INDEX: Final = "<u4"
MASK = "|u1"
_MAX_HEADER = 10_000
_AGAIN = "copy the shard again or write it again"
_BLOCK = 2**20  # tokens that `verify_memmap_shard` reads at a time


class ShardManifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json. An old shard has none of the optional keys; any other has all of them."""

    version: Literal["1.0"]
    format: Literal["memmap_padded_v1"]
    num_bins: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    pack_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_PACK_SIZE)]
    dtype: Literal["<u2", "<i4", "<u4", "<i8"]
    loss_mask_dtype: Literal["<u1", "|u1", "u1"]
    index_dtype: Literal["<u4"]
    bins_written: int
    seq_offsets_dtype: Literal["<u4", "<u8"] = INDEX
    loss_mask_alignment: Alignment | None = None
    num_sequences: int | None = None
    num_tokens: int | None = None
    trained_labels: int | None = None
    files: dict[str, FileEntry] | None = None
    manifest_sha256: str | None = None
    pack_size_rule: str | None = None  # "longest_bin": nothing stated the pack size

    @property
    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> dtype and shape; the length of `seq_starts` of an old shard is -1: unknown."""
        num_starts = -1 if self.num_sequences is None else self.num_sequences
        rows = (self.num_bins, self.pack_size)
        return {
            "input_ids": (self.dtype, rows),
            "loss_mask": (MASK, rows),
            "packed_len": (INDEX, (self.num_bins,)),
            "seq_offsets": (self.seq_offsets_dtype, (self.num_bins + 1,)),
            "seq_starts": (INDEX, (num_starts,)),
        }


_KEYS = frozenset(ShardManifest.__struct_fields__) - {"pack_size_rule"}
_OLD_KEYS = frozenset(ShardManifest.__struct_fields__[:8])  # all that an old shard has


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArrayFile:
    """One array whose header and size have been checked."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes of the header

    def map(self) -> npt.NDArray[Any]:
        """The array, read-only, without reading it."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        try:
            return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, self.shape))
        except (OSError, ValueError) as error:
            raise DamagedStoreError(f"{self.path}: cannot be mapped: {error}; {_AGAIN}") from error


class MemmapShard(Closing):
    """A read-only sequence of bins. Files are mapped when the first bin is read.

    `loss_mask_alignment`: for an old shard, whose manifest does not state it. A pickled shard opens
    its files again, and refuses a shard that was written again meanwhile.
    """

    def __init__(self, folder: str | Path, *, loss_mask_alignment: str | None = None) -> None:
        self.folder = path_to_read(folder).absolute()
        self.manifest, self.fingerprint = _read_manifest(self.folder)
        self._files = {name: _check_array(self.folder, self.manifest, name) for name in ARRAYS}
        self.pack_size = self.manifest.pack_size
        self.loss_mask_alignment = self._alignment(loss_mask_alignment)
        self._maps: dict[str, npt.NDArray[Any]] = {}

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.manifest.dtype)

    def __len__(self) -> int:
        return self.manifest.num_bins

    def read_bin(self, bin_id: SupportsIndex) -> PackedBin:
        """Bin `bin_id`, 0 to len - 1; its ids and mask are views of the files."""
        number = whole_number(bin_id, "bin_id", least=None)
        if not 0 <= number < len(self):
            raise IndexError(f"bin {number:,} of {len(self):,}")
        if not self._maps:
            self._maps = {name: file.map() for name, file in self._files.items()}
        maps, where = self._maps, f"{self.folder}, bin {number:,}"
        length = int(maps["packed_len"][number])
        if length > self.pack_size:  # a slice would hide it
            raise DamagedStoreError(
                f"{where}: {length:,} tokens, wanted at most pack_size={self.pack_size:,}; {_AGAIN}"
            )
        starts = maps["seq_starts"]
        first, last = map(int, maps["seq_offsets"][number : number + 2])
        if not first < last <= len(starts):
            raise DamagedStoreError(
                f"{where}: its starts are {first:,}..{last:,} of {len(starts):,}; {_AGAIN}"
            )
        found = PackedBin(
            input_ids=maps["input_ids"][number, :length],
            loss_mask=maps["loss_mask"][number, :length],
            seq_starts=starts[first:last].astype(np.int64),
        )
        check_bin(found, self.pack_size, where)
        return found

    def close(self) -> None:
        """Release the maps; bins that were read stay valid. May be called again."""
        self._maps = {}

    def __repr__(self) -> str:
        return (
            f"MemmapShard({self.folder.name!r}, bins={len(self):,}, pack_size={self.pack_size:,})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.folder, self.loss_mask_alignment, self.fingerprint)

    def _alignment(self, given: str | None) -> Alignment:
        found = agreed_alignment(self.manifest.loss_mask_alignment, given, self.folder)
        if found is None:
            logger.warning(
                "%s: an old shard, without hashes, whose manifest does not say how its loss masks "
                "are aligned: taken as 'roll_right', which is what the code that writes such "
                "manifests does; pass the alignment 'label' if you know better",
                self.folder,
            )
        return found or "roll_right"


def open_memmap_shard(folder: str | Path, *, loss_mask_alignment: str | None = None) -> MemmapShard:
    """The finished shard at `folder`, or an error that says what is wrong with it."""
    return MemmapShard(folder, loss_mask_alignment=loss_mask_alignment)


def _reopen(folder: Path, alignment: str, fingerprint: str) -> MemmapShard:
    shard = MemmapShard(folder, loss_mask_alignment=alignment)
    if shard.fingerprint != fingerprint:
        raise DamagedStoreError(
            f"{folder}: the shard was written again since it was opened; open it again"
        )
    return shard


def verify_memmap_shard(folder: str | Path) -> list[str]:
    """Everything that is wrong with the shard at `folder`, each problem with its file or bin.

    Damage is reported, never raised; a folder without a finished shard is an error.
    """
    folder = path_to_read(folder).absolute()
    try:
        manifest, _ = _read_manifest(folder)
    except StoreNotFoundError:
        raise
    except StoreError as error:
        return [str(error)]
    problems: list[str] = []
    files: dict[str, _ArrayFile] = {}
    for name in ARRAYS:
        try:
            files[name] = _check_array(folder, manifest, name)
        except ShardmillError as error:
            problems.append(str(error))
    if problems:
        return problems
    for name, entry in (manifest.files or {}).items():
        if file_sha256(folder / name) != entry.sha256:
            problems.append(f"{folder / name}: its sha256 is not the one in the manifest")
    return problems or _bin_problems(folder, manifest, files)


def _bin_problems(folder: Path, manifest: ShardManifest, files: dict[str, _ArrayFile]) -> list[str]:
    offsets, num_starts = files["seq_offsets"].map(), files["seq_starts"].shape[0]
    if offsets[0] != 0 or (offsets[1:] <= offsets[:-1]).any() or offsets[-1] > num_starts:
        return [f"{folder / 'seq_offsets.npy'}: wanted to rise from 0 to {num_starts:,}"]
    step = max(_BLOCK // manifest.pack_size, 1)
    for first in range(0, manifest.num_bins, step):
        # mapped again for each block: pages of earlier blocks do not stay resident
        maps = {name: file.map() for name, file in files.items()}
        bins = slice(first, first + step)
        problem = _block_problem(maps, bins, offsets[first : first + step + 1].astype(np.int64))
        if problem is not None:
            last = min(first + step, manifest.num_bins) - 1
            return [f"{folder}, bins {first:,} to {last:,}: {problem}"]
    return []


def _block_problem(
    maps: dict[str, npt.NDArray[Any]], bins: slice, offsets: OffsetArray
) -> str | None:
    """How any of these bins breaks the invariant; `offsets`: their starts in `seq_starts`."""
    ids, mask = maps["input_ids"][bins], maps["loss_mask"][bins]
    lengths = maps["packed_len"][bins].astype(np.int64)
    if lengths.min() < 1 or lengths.max() > ids.shape[1]:
        return f"a bin outside 1 to pack_size={ids.shape[1]:,} tokens"
    if mask.max() > 1:
        return "a loss_mask with other values than 0 and 1"
    starts = maps["seq_starts"][offsets[0] : offsets[-1]].astype(np.int64)
    edges = offsets - offsets[0]
    if (starts[edges[:-1]] != 0).any():
        return "a bin whose first start is not 0"
    rises = np.diff(starts) > 0
    rises[edges[1:-1] - 1] = True  # from one bin to the next
    if not rises.all() or (starts[edges[1:] - 1] >= lengths).any():
        return "a bin whose starts do not rise, or end after its tokens"
    if ids.min() < 0 or ids.max() > 2**32 - 1:
        return "a token id that is negative or too large"
    padding = np.arange(ids.shape[1]) >= lengths[:, None]
    return "padding that is not zero" if ids[padding].any() or mask[padding].any() else None


def _read_manifest(folder: Path) -> tuple[ShardManifest, str]:
    """The manifest of a finished shard, and the sha256 of the file."""
    manifest, fields, data = read_manifest_as(folder, ShardManifest, "packed shard")
    problem = _manifest_problem(manifest, fields)
    if problem is not None:
        raise ManifestError(f"{folder / MANIFEST}: {problem}; {_AGAIN}")
    return manifest, hashlib.sha256(data).hexdigest()


def _manifest_problem(manifest: ShardManifest, fields: dict[str, JSON]) -> str | None:
    if set(fields) & (_KEYS - _OLD_KEYS):
        if not set(fields) >= _KEYS or not is_sealed(fields):
            return f"{SEAL} does not match: the manifest was changed or damaged"
        if set(manifest.files or ()) != {f"{name}.npy" for name in ARRAYS}:
            return f"lists the files {sorted(manifest.files or ())}"
    if manifest.bins_written != manifest.num_bins:
        return f"{manifest.bins_written:,} of {manifest.num_bins:,} bins were written"
    return None


def _check_array(folder: Path, manifest: ShardManifest, name: str) -> _ArrayFile:
    """The file of one array, if its header and size are as the manifest says."""
    path, (dtype, shape) = folder / f"{name}.npy", manifest.arrays[name]
    try:
        with reading(path), path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(_MAX_HEADER)
    except StoreError as error:
        raise DamagedStoreError(f"{error}; {_AGAIN}") from error
    fields, offset = parse_npy(path, head)
    found = fields["shape"]
    if shape == (-1,) and isinstance(found, tuple) and len(found) == 1:
        shape = found if type(found[0]) is int and found[0] >= 0 else (0,)
    wanted = {"descr": dtype, "fortran_order": False, "shape": shape}
    if fields != wanted:
        raise DamagedStoreError(f"{path}: found {fields!r:.200}, wanted {wanted}; {_AGAIN}")
    num_bytes = offset + int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    if size != num_bytes:
        raise DamagedStoreError(f"{path}: found {size:,} bytes, wanted {num_bytes:,}; {_AGAIN}")
    return _ArrayFile(path=path, dtype=dtype, shape=shape, offset=offset)
