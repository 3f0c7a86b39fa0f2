"""memmap_padded_v1 on disk: names, headers, and the manifest that makes a folder a shard.

In: a folder.  Out: a `ShardManifest` that agrees with itself, and `ArrayFile`s that agree with it.
Promise: five plain `.npy` arrays, little endian, C order, of exactly the size that their header
and the manifest say; a manifest with a seal is what was written, to the byte; no pickle is read.
Not here: bins (memmap_reader, memmap_writer), hashes of the arrays (memmap_verify).
"""

from __future__ import annotations

import ast
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError, ManifestError, OptionError
from shardmill.interop.packed.records import Alignment
from shardmill.interop.packed.seals import SEAL, check_plain, is_sealed, read_json
from shardmill.interop.packed.staging import MANIFEST
from shardmill.records import JSON

FORMAT = "memmap_padded_v1"
VERSION = "1.0"
DTYPES = ("<u2", "<i4", "<u4", "<i8")
INDEX = "<u4"
MASK = "|u1"
MOST_INDEX = 2**32 - 1
_MAX_HEADER = 10_000
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
_AGAIN = "copy the shard again or write it again"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
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
    files: dict[str, FileEntry] | None = None
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
