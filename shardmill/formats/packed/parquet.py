"""Packed shards as Parquet: one row per bin, three columns of lists.

Written in order, a row group at a time, and read in any order; memory is that of a row group. The
file's metadata states the pack size, the alignment of the masks, a digest of every row group, and a
seal over all that. Page checksums leave out the footer and the headers of pages (which column,
which encoding, how many values), so the digest is over the numbers as they come out of Parquet. For
a file of others the caller gives the pack size.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.formats.packed.files import FileShardWriter, check_plain, writing
from shardmill.formats.packed.records import PackedBin, PackedShard, check_bin
from shardmill.records import IntArray, Ragged

VERSION = "1"
COLUMNS = {"input_ids": "int32", "loss_mask": "uint8", "seq_start_id": "int32"}
"""The columns of lists, and the dtypes that we write."""

_PREFIX = b"shardmill_"
_SEAL, _DIGESTS = b"shardmill_seal", b"shardmill_row_groups"
_KEYS = tuple(
    _PREFIX + name for name in (b"packed", b"pack_size", b"loss_mask_alignment", b"num_bins")
)
_DIGITS = 64
_KEPT = 4  # row groups
_ROW_GROUP = 1000  # bins
# pyarrow has its own exception for most damage, and raises a built-in one for some
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, TypeError)


class _Stated(NamedTuple):
    """What a file's metadata states. None: the file is not ours."""

    pack_size: int | None = None
    loss_mask_alignment: str | None = None
    num_bins: int | None = None
    digests: tuple[str, ...] | None = None  # of each row group


def _group_digest(columns: Sequence[Ragged]) -> str:
    """sha256 over the lists of a row group, as dtypes of `COLUMNS`."""
    digest = hashlib.sha256()
    for column, dtype in zip(columns, COLUMNS.values(), strict=True):
        for array, kind in ((column.offsets, "int64"), (column.values, dtype)):
            wanted = np.dtype(kind).newbyteorder("<")
            digest.update(np.ascontiguousarray(array, wanted).view(np.uint8).data)
    return digest.hexdigest()


def _read_metadata(metadata: Mapping[bytes, bytes], path: Path) -> _Stated:
    """What a file states, checked against its seal."""
    ours = {key: value for key, value in metadata.items() if key.startswith(_PREFIX)}
    if not ours:
        return _Stated()
    if ours.keys() != {*_KEYS, _DIGESTS, _SEAL} or ours.pop(_SEAL) != _seal(ours):
        raise DamagedStoreError(
            f"{path}: its metadata is not as shardmill wrote it: damaged, changed, or of another "
            "version; copy it again, or write it again with this one"
        )
    version, pack_size, alignment, num_bins = (ours[key].decode() for key in _KEYS)
    if version != VERSION:
        raise DamagedStoreError(f"{path}: packed version {version!r}, wanted {VERSION!r}")
    digests = ours[_DIGESTS].decode()
    groups = tuple(digests[at : at + _DIGITS] for at in range(0, len(digests), _DIGITS))
    return _Stated(int(pack_size), alignment, int(num_bins), groups)


def _seal(plain: Mapping[bytes, bytes]) -> bytes:
    """sha256 over keys and values, each with its length."""
    digest = hashlib.sha256()
    for key in sorted(plain):
        for part in (key, plain[key]):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest().encode()


class ParquetShard(PackedShard):
    """A `.parquet` file, or a folder of them.

    A bin costs its row group; the last few row groups are kept.
    """

    def _open(self) -> tuple[int | None, str | None]:
        # of each row group: file, number in it, bins, digest
        self._groups: list[tuple[Path, int, int, str | None]] = []
        self._firsts = [0]  # the first bin of each, and the number of all
        self._columns = lru_cache(_KEPT)(_read_group)
        stated = [self._open_file(file) for file in _files(self.path)]
        sizes = {one.pack_size for one in stated if one.pack_size is not None}
        alignments = {one.loss_mask_alignment for one in stated if one.loss_mask_alignment}
        if len(sizes) > 1 or len(alignments) > 1:
            raise OptionError(
                f"{self.path}: its files state the pack sizes {sorted(sizes)} and the alignments "
                f"{sorted(alignments)}; wanted files of one shard"
            )
        return min(sizes, default=None), min(alignments, default=None)

    def __len__(self) -> int:
        return self._firsts[-1]

    def _read(self, number: int) -> PackedBin:
        """Neighbours are quick: they share a row group."""
        group = bisect_right(self._firsts, number) - 1
        columns, row = self._columns(*self._groups[group]), number - self._firsts[group]
        ids, mask, starts = (column[row] for column in columns)
        where = f"{self._groups[group][0]}, bin {number:,}"
        # files of others may have wider integers
        if len(ids) and (ids.min() < 0 or ids.max() >= 2**31):
            raise DamagedStoreError(f"{where}: ids {ids.min():,}..{ids.max():,}, wanted 0..2**31-1")
        if len(mask) and (mask.min() < 0 or mask.max() > 1):
            raise DamagedStoreError(f"{where}: a loss_mask with other values than 0 and 1")
        found = PackedBin(
            input_ids=ids.astype(np.int32, copy=False),
            loss_mask=mask.astype(np.uint8, copy=False),
            seq_starts=starts.astype(np.int64, copy=False),
        )
        check_bin(found, self.pack_size, where)
        return found

    def close(self) -> None:
        """Release the row groups that are kept; may be called again."""
        self._columns.cache_clear()

    def _open_file(self, path: Path) -> _Stated:
        """Note the row groups of a file; what it states."""
        rows, stated = _read_footer(path)
        digests = stated.digests or (None,) * len(rows)
        if len(digests) != len(rows) or stated.num_bins not in (None, sum(rows)):
            raise DamagedStoreError(
                f"{path}: {sum(rows):,} bins in {len(rows):,} row groups, wanted "
                f"{stated.num_bins or 0:,} in {len(digests):,}; copy it again"
            )
        for group, (count, digest) in enumerate(zip(rows, digests, strict=True)):
            if count:
                self._groups.append((path, group, count, digest))
                self._firsts.append(self._firsts[-1] + count)
        return stated


def _read_group(path: Path, group: int, rows: int, digest: str | None) -> list[Ragged]:
    """The columns of one row group, as they were written."""
    try:
        with _open_file(path) as file:
            table = file.read_row_group(group, columns=list(COLUMNS), use_threads=False)
        table.validate(full=True)
    except _UNREADABLE as error:
        raise _damaged(path, error) from error
    columns = [_ragged(table.column(name), path, rows) for name in COLUMNS]
    if digest is not None and _group_digest(columns) != digest:
        raise DamagedStoreError(
            f"{path}: row group {group:,} is not what was written; copy it again"
        )
    return columns


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise StoreNotFoundError(f"{path}: nothing is here; check the path")
    found = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not found:
        raise StoreNotFoundError(f"{path}: no *.parquet in this folder; check the path")
    return found


def _open_file(path: Path) -> Any:
    check_plain(path)
    return pq.ParquetFile(str(path), page_checksum_verification=True)


def _read_footer(path: Path) -> tuple[list[int], _Stated]:
    """Bins of each row group, and what the metadata states, if the columns are those of a shard."""
    try:
        with _open_file(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            kinds = {name: schema.field(name).type for name in COLUMNS if name in schema.names}
            stated = _read_metadata(metadata.metadata or {}, path)
            rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    except _UNREADABLE as error:
        if isinstance(error, StoreError):
            raise
        raise _damaged(path, error) from error
    for name, dtype in COLUMNS.items():
        if name not in kinds or not _holds_lists(kinds[name]):
            raise StoreError(
                f"{path}: column {name} is {kinds.get(name)}, wanted lists of whole numbers; this "
                "is no packed shard"
            )
        # a wider type could hide other numbers behind the same digest
        if stated.digests is not None and kinds[name] != pa.list_(pa.from_numpy_dtype(dtype)):
            raise DamagedStoreError(
                f"{path}: column {name} is {kinds[name]}, wanted lists of {dtype}; copy it again"
            )
    return rows, stated


def _holds_lists(kind: Any) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    return bool(pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type))


def _ragged(column: Any, path: Path, rows: int) -> Ragged:
    """A column of lists as numpy arrays, without nulls."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # some versions give one back when it is empty
        array = pa.concat_arrays(array.chunks)
    flat = array.flatten()
    if len(array) != rows or array.null_count or flat.null_count:
        raise DamagedStoreError(f"{path}: {len(array):,} rows with nulls, wanted {rows:,} without")
    if pa.types.is_boolean(flat.type):
        flat = flat.cast(pa.uint8())
    lengths = np.diff(array.offsets.to_numpy())
    return Ragged.from_lengths(flat.to_numpy(), lengths)


def _damaged(path: Path, error: Exception) -> DamagedStoreError:
    return DamagedStoreError(f"{path}: cannot be read as Parquet ({error!s:.200}); copy it again")


class ParquetShardWriter(FileShardWriter):
    """Writes a row group of bins at a time."""

    pack_size: int

    def __init__(
        self,
        output_path: str | Path,
        pack_size: SupportsIndex,
        *,
        loss_mask_alignment: str = "label",
        row_group_size: SupportsIndex = _ROW_GROUP,
        compression: str = "zstd",
    ) -> None:
        self.num_tokens = self.num_sequences = 0
        self._group = whole_number(row_group_size, "row_group_size")
        self._bins: list[tuple[npt.NDArray[Any], ...]] = []
        self._digests: list[str] = []
        self._schema = pa.schema(
            [(name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in COLUMNS.items()]
        )
        super().__init__(output_path, pack_size, loss_mask_alignment)
        with writing(self.target):
            options = {"compression": compression, "write_page_checksum": True}
            self._file: Any = pq.ParquetWriter(str(self._temporary), self._schema, **options)

    def _add(self, ids: IntArray, mask: IntArray, starts: IntArray) -> None:
        parts = zip((ids, mask, starts), COLUMNS.values(), strict=True)
        self._bins.append(tuple(part.astype(dtype) for part, dtype in parts))  # copies
        self.num_tokens += len(ids)
        self.num_sequences += len(starts)
        if len(self._bins) == self._group:
            self._flush()

    def _flush(self) -> None:
        if not self._bins:
            return
        columns = [
            Ragged.from_lengths(np.concatenate(parts), [len(part) for part in parts])
            for parts in zip(*self._bins, strict=True)
        ]
        table = pa.table([_lists(column) for column in columns], schema=self._schema)
        self._file.write_table(table, row_group_size=len(self._bins))
        self._digests.append(_group_digest(columns))
        self._bins = []

    def _complete(self) -> dict[str, Any]:
        self._flush()
        values = (VERSION, self.pack_size, self.loss_mask_alignment, self.num_bins)
        plain = {key: str(value).encode() for key, value in zip(_KEYS, values, strict=True)}
        plain[_DIGESTS] = "".join(self._digests).encode()
        self._file.add_key_value_metadata({**plain, _SEAL: _seal(plain)})
        self._file.close()
        with self._temporary.open("rb+") as file:
            os.fsync(file.fileno())
        return {
            "format": "packed_parquet",
            "version": VERSION,
            "num_bins": self.num_bins,
            "pack_size": self.pack_size,
            "loss_mask_alignment": self.loss_mask_alignment,
            "num_tokens": self.num_tokens,
            "num_sequences": self.num_sequences,
        }

    def _close(self) -> None:
        if self._file.is_open:
            self._file.close()


def _lists(column: Ragged) -> Any:
    if column.offsets[-1] >= 2**31:
        raise OptionError(
            f"{len(column):,} bins of {column.offsets[-1]:,} tokens in a row group: Parquet lists "
            "end at 2,147,483,647: pass a smaller row_group_size"
        )
    offsets = pa.array(column.offsets.astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(column.values))
