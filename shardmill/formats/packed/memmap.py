"""memmap_padded_v1 on disk: names, headers, and the manifest that makes a folder a shard.

In: a folder.  Out: a `ShardManifest` that agrees with itself, and `ArrayFile`s that agree with it.
Promise: five plain `.npy` arrays, little endian, C order, of exactly the size that their header
and the manifest say; a manifest with a seal is what was written, to the byte; no pickle is read.
Not here: bins (memmap_reader, memmap_writer), hashes of the arrays (memmap_verify).

Plain `.npy` files, written at once or row by row.

In: arrays.  Out: files that are durable, with their sha256.
Promise: a full disk is an error, never a signal: nothing is written through a map. Rows never
written are zero.
Not here: names and shapes (layout), when a folder is finished (staging).

Read a memmap_padded_v1 shard, bin by bin, in any order.

In: the folder of a finished shard.  Out: `PackedBin`s that are views of the mapped files.
Promise: opening reads the manifest and five headers, whatever the size; a bin costs what it holds;
every bin is checked against the invariant as it is read; a copy that was pickled opens its files
anew and refuses a shard that was written again.
Not here: hashes (memmap_verify), padding and batches (pytorch).

Check every byte of a memmap_padded_v1 shard.

In: a folder.  Out: a list of sentences, empty when all is well.
Promise: a changed, truncated or missing file is found by its hash; every bin is held against the
invariant, padding included; memory stays at a few MiB. Damage is a sentence, never an exception;
no finished shard at all is an error.
Not here: repair.
"""

from __future__ import annotations

import ast
import hashlib
import io
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, ManifestError, OptionError
from shardmill.formats.packed.files import (
    MANIFEST,
    SEAL,
    cannot_write,
    check_plain,
    is_sealed,
    read_json,
)
from shardmill.formats.packed.records import (
    Alignment,
    LossMask,
    PackedBin,
    PackedBlock,
    block_problem,
    check_bin,
    checked_alignment,
    path_to_read,
)
from shardmill.protocols import Closing
from shardmill.records import JSON, IntArray, OffsetArray, Ragged

FORMAT = "memmap_padded_v1"
VERSION = "1.0"
DTYPES = ("<u2", "<i4", "<u4", "<i8")
INDEX = "<u4"
MASK = "|u1"
MOST_INDEX = 2**32 - 1
_MAX_HEADER = 10_000
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
_AGAIN = "copy the shard again or write it again"


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One array on disk."""

    bytes: int
    sha256: str


class ShardManifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json. The optional keys are all there, or none: then it is an old shard."""

    version: str
    format: str
    num_bins: int
    pack_size: int
    dtype: str
    loss_mask_dtype: str
    index_dtype: str
    bins_written: int
    seq_offsets_dtype: str = INDEX
    loss_mask_alignment: Alignment | None = None
    num_sequences: int | None = None
    num_tokens: int | None = None
    trained_labels: int | None = None
    files: dict[str, ArrayEntry] | None = None
    manifest_sha256: str | None = None
    pack_size_rule: str | None = None  # "longest_bin": nothing said the pack size

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
class ArrayFile:
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


def offsets_dtype(num_starts: int) -> str:
    """64 bits only when 32 do not suffice, since others read 32."""
    return INDEX if num_starts <= MOST_INDEX else "<u8"


def token_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """A dtype that a shard can have, little endian."""
    wanted = "wanted uint16, int32, uint32 or int64"
    try:
        found = np.dtype(dtype).newbyteorder("<")
    except (TypeError, ValueError, SyntaxError) as error:
        raise OptionError(f"dtype={dtype!r:.100}: {wanted}") from error
    if found.str not in DTYPES:
        raise OptionError(f"dtype={found}: {wanted}")
    return found


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What stands before the data of a `.npy` file."""
    file = io.BytesIO()
    fields = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue()


def read_manifest(folder: Path) -> tuple[ShardManifest, str]:
    """The manifest of a finished shard, and the sha256 of the file."""
    path = folder / MANIFEST
    plain, data = read_json(folder, "packed shard")
    try:
        manifest = msgspec.convert(plain, type=ShardManifest)
    except msgspec.ValidationError as error:
        raise ManifestError(f"{path}: no manifest of a packed shard: {error}") from error
    problem = _problem(manifest, plain)
    if problem is not None:
        raise ManifestError(f"{path}: {problem}; {_AGAIN}")
    return manifest, hashlib.sha256(data).hexdigest()


def check_array(folder: Path, name: str, dtype: str, shape: tuple[int, ...]) -> ArrayFile:
    """The file of one array, if header and size are as the manifest says."""
    path = folder / f"{name}.npy"
    check_plain(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_MAX_HEADER)
    except OSError as error:
        raise DamagedStoreError(f"{path}: cannot be read: {error.strerror}; {_AGAIN}") from error
    fields, offset = _parse(path, head)
    found = fields["shape"]
    if shape == (-1,) and isinstance(found, tuple) and len(found) == 1:
        shape = found if type(found[0]) is int and found[0] >= 0 else (0,)
    wanted = {"descr": dtype, "fortran_order": False, "shape": shape}
    if fields != wanted:
        raise DamagedStoreError(f"{path}: found {fields!r:.200}, wanted {wanted}; {_AGAIN}")
    num_bytes = offset + int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    if size != num_bytes:
        raise DamagedStoreError(f"{path}: found {size:,} bytes, wanted {num_bytes:,}; {_AGAIN}")
    return ArrayFile(path=path, dtype=dtype, shape=shape, offset=offset)


def _problem(manifest: ShardManifest, plain: dict[str, JSON]) -> str | None:
    if manifest.format != FORMAT or manifest.version != VERSION:
        return f"format {manifest.format!r} {manifest.version!r}, wanted {FORMAT!r} {VERSION!r}"
    if set(plain) & (_KEYS - _OLD_KEYS):
        if not set(plain) >= _KEYS or not is_sealed(plain):
            return f"{SEAL} does not match: the manifest was changed or damaged"
        if set(manifest.files or ()) != {f"{name}.npy" for name in manifest.arrays}:
            return f"lists the files {sorted(manifest.files or ())}"
    if not (0 <= manifest.num_bins <= 2**40 and 1 <= manifest.pack_size <= MOST_INDEX):
        return f"num_bins={manifest.num_bins:,} and pack_size={manifest.pack_size:,}"
    if manifest.bins_written != manifest.num_bins:
        return f"{manifest.bins_written:,} of {manifest.num_bins:,} bins were written"
    dtypes = (manifest.loss_mask_dtype.lstrip("<|"), manifest.index_dtype)
    if manifest.dtype not in DTYPES or dtypes != ("u1", INDEX):
        return f"dtypes {manifest.dtype!r}, {dtypes}; wanted one of {DTYPES}, u1, {INDEX}"
    if manifest.seq_offsets_dtype not in (INDEX, "<u8"):
        return f"seq_offsets_dtype={manifest.seq_offsets_dtype!r}, wanted {INDEX} or <u8"
    return None


def _parse(path: Path, head: bytes) -> tuple[dict[str, Any], int]:
    """The dictionary of a `.npy` header, and where the data begins."""
    size = _LENGTH_BYTES.get((head[6], head[7])) if len(head) > 7 else None
    if not head.startswith(b"\x93NUMPY") or size is None:
        raise DamagedStoreError(f"{path}: begins with {head[:8]!r}, so no .npy file; {_AGAIN}")
    start = 8 + size
    stop = start + int.from_bytes(head[8:start], "little")
    try:
        fields = ast.literal_eval(head[start:stop].decode("latin-1"))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise DamagedStoreError(f"{path}: its header is damaged ({error}); {_AGAIN}") from error
    if len(head) < stop or not isinstance(fields, dict) or "shape" not in fields:
        raise DamagedStoreError(f"{path}: its header is damaged: {fields!r:.200}; {_AGAIN}")
    return fields, stop


_BUFFER = 2**20


class RowFile:
    """A two-dimensional array on disk, all zero at first."""

    def __init__(self, path: Path, dtype: str, shape: tuple[int, int]) -> None:
        self.path = path
        header = npy_header(dtype, shape)
        self._start = len(header)
        self._row_bytes = shape[1] * np.dtype(dtype).itemsize
        try:
            self._file = path.open("xb", buffering=0)
            self._put(memoryview(header), 0)
            self._file.truncate(self._start + shape[0] * self._row_bytes)
        except OSError as error:
            raise cannot_write(path, error) from error

    def write(self, row: int, values: npt.NDArray[Any]) -> None:
        """`values`, contiguous and of the file's dtype, from the start of `row` on."""
        try:
            self._put(values.reshape(-1).view(np.uint8).data, self._start + row * self._row_bytes)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _put(self, data: memoryview, position: int) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, position)
            data, position = data[count:], position + count


def write_array(path: Path, values: npt.NDArray[Any]) -> None:
    """One new file with all of `values`, durable."""
    with path.open("xb") as file:
        file.write(npy_header(values.dtype.str, values.shape))
        file.write(np.ascontiguousarray(values).data)
        file.flush()
        os.fsync(file.fileno())


def file_sha256(path: Path) -> str:
    """sha256 of a whole file, in little memory."""
    digest, buffer = hashlib.sha256(), bytearray(_BUFFER)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Maps:
    """The five arrays of a shard, mapped."""

    input_ids: IntArray
    loss_mask: LossMask
    packed_len: npt.NDArray[np.uint32]
    seq_offsets: IntArray
    seq_starts: npt.NDArray[np.uint32]


class MemmapShard(Closing):
    """A read-only sequence of bins. Files are mapped at the first bin that is read.

    `loss_mask_alignment`: for an old shard, whose manifest does not say it.
    """

    def __init__(self, folder: str | Path, *, loss_mask_alignment: str | None = None) -> None:
        self.folder = path_to_read(folder).absolute()
        self.manifest, self.fingerprint = read_manifest(self.folder)
        self._files: dict[str, ArrayFile] = {
            name: check_array(self.folder, name, dtype, shape)
            for name, (dtype, shape) in self.manifest.arrays.items()
        }
        self.loss_mask_alignment: Alignment = self._alignment(loss_mask_alignment)
        self._maps: _Maps | None = None

    @property
    def pack_size(self) -> int:
        return self.manifest.pack_size

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
        maps = self._opened()
        length = int(maps.packed_len[number])
        first, last = (int(place) for place in maps.seq_offsets[number : number + 2])
        if not first < last <= len(maps.seq_starts):
            raise DamagedStoreError(
                f"{self.folder}, bin {number:,}: its starts are {first:,}..{last:,} of "
                f"{len(maps.seq_starts):,}; copy the shard again or write it again"
            )
        found = PackedBin(
            input_ids=maps.input_ids[number, :length],
            loss_mask=maps.loss_mask[number, :length],
            seq_starts=maps.seq_starts[first:last].astype(np.int64),
        )
        if length > self.pack_size:  # a slice would hide it
            raise DamagedStoreError(
                f"{self.folder}, bin {number:,}: {length:,} tokens, wanted at most "
                f"pack_size={self.pack_size:,}; copy the shard again or write it again"
            )
        check_bin(found, self.pack_size, f"{self.folder}, bin {number:,}")
        return found

    def close(self) -> None:
        """Let go of the maps; bins that were read stay. May be called again."""
        self._maps = None

    def __repr__(self) -> str:
        return (
            f"MemmapShard({self.folder.name!r}, bins={len(self):,}, pack_size={self.pack_size:,})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.folder, self.loss_mask_alignment, self.fingerprint)

    def _opened(self) -> _Maps:
        if self._maps is None:
            self._maps = _Maps(**{name: file.map() for name, file in self._files.items()})
        return self._maps

    def _alignment(self, given: str | None) -> Alignment:
        stored = self.manifest.loss_mask_alignment
        chosen = None if given is None else checked_alignment(given)
        if stored is not None:
            if chosen not in (None, stored):
                raise OptionError(f"{self.folder}: its masks are aligned {stored!r}, not {given!r}")
            return stored
        if chosen is None:
            logger.warning(
                "%s: an old shard, without hashes, whose manifest does not say how its loss masks "
                "are aligned: taken as 'roll_right', which is what the code that writes such "
                "manifests does; give loss_mask_alignment='label' if you know better",
                self.folder,
            )
        return chosen or "roll_right"


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


_BLOCK = 2**20  # tokens looked at together


def verify_memmap_shard(folder: str | Path) -> list[str]:
    """Everything that is wrong with the shard at `folder`, each problem with its file or bin."""
    folder = path_to_read(folder).absolute()
    try:
        manifest, _ = read_manifest(folder)
    except ManifestError as error:
        return [str(error)]
    problems: list[str] = []
    for name, (dtype, shape) in manifest.arrays.items():
        try:
            check_array(folder, name, dtype, shape)
        except DamagedStoreError as error:
            problems.append(str(error))
    if problems:
        return problems
    for name, entry in (manifest.files or {}).items():
        if file_sha256(folder / name) != entry.sha256:
            problems.append(f"{folder / name}: its sha256 is not the one in the manifest")
    return problems or _bin_problems(folder, manifest)


def _bin_problems(folder: Path, manifest: ShardManifest) -> list[str]:
    files = {
        name: check_array(folder, name, dtype, shape)
        for name, (dtype, shape) in manifest.arrays.items()
    }
    offsets, num_starts = files["seq_offsets"].map(), files["seq_starts"].shape[0]
    if offsets[0] != 0 or (offsets[1:] <= offsets[:-1]).any() or offsets[-1] > num_starts:
        return [f"{folder / 'seq_offsets.npy'}: wanted to rise from 0 to {num_starts:,}"]
    step = max(_BLOCK // manifest.pack_size, 1)
    for first in range(0, manifest.num_bins, step):
        places = offsets[first : first + step + 1].astype(np.int64)
        block = _block(files, slice(first, first + step), places)
        problem = block_problem(block, manifest.pack_size) or _row_problem(block)
        if problem is not None:
            return [f"{folder}, bins {first:,} to {first + len(block) - 1:,}: {problem}"]
    return []


def _block(files: dict[str, ArrayFile], bins: slice, places: OffsetArray) -> PackedBlock:
    """Some bins, mapped for themselves: pages that were read before are not resident any more."""
    arrays = {name: file.map() for name, file in files.items()}
    return PackedBlock(
        input_ids=arrays["input_ids"][bins],
        loss_mask=arrays["loss_mask"][bins],
        lengths=arrays["packed_len"][bins].astype(np.int64),
        seq_starts=Ragged(arrays["seq_starts"][places[0] : places[-1]], places - places[0]),
    )


def _row_problem(block: PackedBlock) -> str | None:
    if block.input_ids.min() < 0 or block.input_ids.max() > MOST_INDEX:
        return "a token id that is negative or too large"
    padding = np.arange(block.input_ids.shape[1]) >= block.lengths[:, None]
    rows: tuple[IntArray, LossMask] = (block.input_ids, block.loss_mask)
    if any(values[padding].any() for values in rows):
        return "padding that is not zero"
    return None
