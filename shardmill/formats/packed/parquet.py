"""Packed shards as Parquet: one row per bin, three columns of lists.

In: bins, in order; or a `.parquet` file, or a folder of them.  Out: a file; or bins in any order.
Promise: the file appears whole or not at all and never over another one; memory is that of one row
group, written or read; ids and borders are checked as they are read. The pack size and the meaning
of the masks stand in the file's metadata, and so does a digest of every row group; for a file of
others the caller says the pack size.
Not here: what a bin must look like (records.py).

Read packed Parquet shards, bin by bin, in any order.

In: a `.parquet` file or a folder of them.  Out: `PackedBin`s.
Promise: a bin costs its row group, and the last few row groups are kept; every list is checked:
three columns, no nulls, whole numbers, ids that fit, the invariant of packed bins. Damage that
Parquet itself finds becomes an error of ours with the file's name. A file of ours is checked
against its seal when it is opened, and each row group against its digest when it is read.
Not here: writing (parquet.py).

What a packed Parquet file of ours says of itself, so that damage never becomes tokens.

In: bins of a row group, and the keys of a file's metadata.  Out: digests and a seal, or checked.
Promise: a file of ours gives the bins that were written, or an error. Page checksums leave out the
footer and the headers of pages (which column, which encoding, how many values), so the digest is
over the numbers as they come out of Parquet, and the seal over all that is said of them.
Not here: reading and writing Parquet.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.arguments import whole_number
from shardmill.errors import (
    DamagedStoreError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from shardmill.formats.packed.files import check_plain
from shardmill.formats.packed.records import (
    WRITE_INSTEAD,
    Alignment,
    Check,
    PackedBin,
    check_bin,
    checked_alignment,
    given_bin,
    given_pack_size,
    given_path,
    path_to_read,
)
from shardmill.protocols import Closing
from shardmill.records import Ragged
from shardmill.storage.atomic import cannot_write, sync_folder, temporary_name

VERSION = "1"
COLUMNS = {"input_ids": "int32", "loss_mask": "uint8", "seq_start_id": "int32"}
"""The columns of lists, and the dtypes that we write."""

_PREFIX = b"shardmill_"
_SEAL = b"shardmill_seal"
_KEYS = tuple(
    _PREFIX + name for name in (b"packed", b"pack_size", b"loss_mask_alignment", b"num_bins")
)
_DIGESTS = b"shardmill_row_groups"
_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSays:
    """What a file's metadata says. None: the file is somebody else's."""

    pack_size: int | None = None
    loss_mask_alignment: str | None = None
    num_bins: int | None = None
    digests: tuple[str, ...] | None = None  # of each row group


def group_digest(columns: Sequence[Ragged]) -> str:
    """sha256 over the lists of a row group, as dtypes of `COLUMNS`."""
    digest = hashlib.sha256()
    for column, dtype in zip(columns, COLUMNS.values(), strict=True):
        for array, kind in ((column.offsets, "int64"), (column.values, dtype)):
            wanted = np.dtype(kind).newbyteorder("<")
            digest.update(np.ascontiguousarray(array, wanted).view(np.uint8).data)
    return digest.hexdigest()


def write_metadata(said: ParquetSays) -> dict[bytes, bytes]:
    """The keys of a file of ours, with their seal."""
    values = (VERSION, said.pack_size, said.loss_mask_alignment, said.num_bins)
    plain = {key: str(value).encode() for key, value in zip(_KEYS, values, strict=True)}
    plain[_DIGESTS] = "".join(said.digests or ()).encode()
    return {**plain, _SEAL: _seal(plain)}


def read_metadata(metadata: Mapping[bytes, bytes], path: Path) -> ParquetSays:
    """What a file says, checked against its seal."""
    ours = {key: value for key, value in metadata.items() if key.startswith(_PREFIX)}
    if not ours:
        return ParquetSays()
    if ours.keys() != {*_KEYS, _DIGESTS, _SEAL} or ours.pop(_SEAL) != _seal(ours):
        raise DamagedStoreError(
            f"{path}: its metadata is not as shardmill wrote it: damaged, changed, or of another "
            "version; copy it again, or write it again with this one"
        )
    version, pack_size, alignment, num_bins = (ours[key].decode() for key in _KEYS)
    if version != VERSION:
        raise DamagedStoreError(f"{path}: packed version {version!r}, wanted {VERSION!r}")
    digests = ours[_DIGESTS].decode()
    return ParquetSays(
        pack_size=int(pack_size),
        loss_mask_alignment=alignment,
        num_bins=int(num_bins),
        digests=tuple(digests[at : at + _DIGITS] for at in range(0, len(digests), _DIGITS)),
    )


def _seal(plain: Mapping[bytes, bytes]) -> bytes:
    """sha256 over keys and values, each with its length."""
    digest = hashlib.sha256()
    for key in sorted(plain):
        for part in (key, plain[key]):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest().encode()


_KEPT = 4  # row groups
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, TypeError)
# pyarrow has an exception of its own for most damage, and a built-in one for some


class ParquetShard(Closing):
    """A read-only sequence of bins. Pickles as its path.

    `pack_size` and `loss_mask_alignment`: for files of others, whose metadata does not say them.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        pack_size: SupportsIndex | None = None,
        loss_mask_alignment: str | None = None,
    ) -> None:
        self.path = path_to_read(path).absolute()
        self._paths = _files(self.path)
        self._groups: list[tuple[Path, int, str | None]] = []  # file, number in it, digest
        self._firsts = [0]  # the first bin of each, and the number of all
        said = [self._open(path) for path in self._paths]
        sizes = [one.pack_size for one in said]
        self.pack_size = _agreed(sizes, _given(pack_size), self.path)
        self.loss_mask_alignment: Alignment = _alignment(
            [one.loss_mask_alignment for one in said], loss_mask_alignment, self.path
        )
        self._said = (pack_size, loss_mask_alignment)
        self._cache: OrderedDict[int, tuple[Ragged, Ragged, Ragged]] = OrderedDict()

    def __len__(self) -> int:
        return self._firsts[-1]

    def read_bin(self, bin_id: SupportsIndex) -> PackedBin:
        """Bin `bin_id`, 0 to len - 1. Neighbours are quick: they share a row group."""
        number = whole_number(bin_id, "bin_id", least=None)
        if not 0 <= number < len(self):
            raise IndexError(f"bin {number:,} of {len(self):,}")
        group = bisect_right(self._firsts, number) - 1
        ids, mask, starts = (column[number - self._firsts[group]] for column in self._group(group))
        where = f"{self._groups[group][0]}, bin {number:,}"
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
        """Let go of the row groups that are kept; may be called again."""
        self._cache.clear()

    def __repr__(self) -> str:
        return f"ParquetShard({self.path.name!r}, bins={len(self):,}, pack_size={self.pack_size:,})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, *self._said)

    def _open(self, path: Path) -> ParquetSays:
        """Note the row groups of a file; what it says of itself."""
        metadata, said = _checked(path)
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        digests = said.digests or (None,) * len(rows)
        if len(digests) != len(rows) or said.num_bins not in (None, sum(rows)):
            raise DamagedStoreError(
                f"{path}: {sum(rows):,} bins in {len(rows):,} row groups, wanted "
                f"{said.num_bins or 0:,} in {len(digests):,}; copy it again"
            )
        for group, (count, digest) in enumerate(zip(rows, digests, strict=True)):
            if count:
                self._groups.append((path, group, digest))
                self._firsts.append(self._firsts[-1] + count)
        return said

    def _group(self, number: int) -> tuple[Ragged, Ragged, Ragged]:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        path, group, digest = self._groups[number]
        rows = self._firsts[number + 1] - self._firsts[number]
        try:
            with _open_file(path) as file:
                table = file.read_row_group(group, columns=list(COLUMNS), use_threads=False)
            table.validate(full=True)
        except _UNREADABLE as error:
            raise _damaged(path, error) from error
        ids, mask, starts = (_ragged(table.column(name), path, rows) for name in COLUMNS)
        if digest is not None and group_digest((ids, mask, starts)) != digest:
            raise DamagedStoreError(
                f"{path}: row group {group:,} is not what was written; copy it again"
            )
        self._cache[number] = ids, mask, starts
        while len(self._cache) > _KEPT:
            self._cache.popitem(last=False)
        return self._cache[number]


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


def _checked(path: Path) -> tuple[Any, ParquetSays]:
    """The metadata of the file, if its columns are those of a packed shard."""
    try:
        with _open_file(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            kinds = {name: schema.field(name).type for name in COLUMNS if name in schema.names}
            said = read_metadata(metadata.metadata or {}, path)
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
        if said.digests is not None and kinds[name] != pa.list_(pa.from_numpy_dtype(dtype)):
            raise DamagedStoreError(
                f"{path}: column {name} is {kinds[name]}, wanted lists of {dtype}; copy it again"
            )
    return metadata, said


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


def _given(pack_size: SupportsIndex | None) -> int | None:
    return None if pack_size is None else given_pack_size(pack_size)


def _agreed(said: list[int | None], given: int | None, path: Path) -> int:
    sizes = {given_pack_size(size) for size in (*said, given) if size is not None}
    if len(sizes) > 1:
        raise OptionError(f"{path}: pack_size is said to be {sorted(sizes)}; wanted one of them")
    if given is None and None in said:
        raise OptionError(
            f"{path}: does not say its pack_size: pass it (pack_size=N), or turn the file "
            "into a shard that says it, with `shardmill convert --from parquet --to memmap "
            "--pack-size N`"
        )
    return sizes.pop()


def _alignment(said: list[str | None], given: str | None, path: Path) -> Alignment:
    found = {text for text in (*said, given) if text is not None}
    if len(found) > 1:
        raise OptionError(f"{path}: its masks are said to be {sorted(found)}; wanted one of them")
    return checked_alignment(found.pop()) if found else "label"  # what others who write it do


def _damaged(path: Path, error: Exception) -> DamagedStoreError:
    return DamagedStoreError(f"{path}: cannot be read as Parquet ({error!s:.200}); copy it again")


def _reopen(path: Path, pack_size: int | None, alignment: str | None) -> ParquetShard:
    return ParquetShard(path, pack_size=pack_size, loss_mask_alignment=alignment)


_ROW_GROUP = 1000  # bins


class ParquetShardWriter:
    """Bins go to the file a row group at a time; `finalize` gives it its name."""

    def __init__(
        self,
        output_path: str | Path,
        pack_size: SupportsIndex,
        *,
        loss_mask_alignment: str = "label",
        row_group_size: SupportsIndex = _ROW_GROUP,
        compression: str = "zstd",
    ) -> None:
        self.output_path = given_path(output_path, "output_path", instead=WRITE_INSTEAD)
        self.pack_size = given_pack_size(pack_size)
        self.loss_mask_alignment = checked_alignment(loss_mask_alignment)
        self.num_bins = self.num_tokens = self.num_sequences = 0
        self._group = whole_number(row_group_size, "row_group_size")
        self._bins: list[tuple[npt.NDArray[Any], ...]] = []
        self._digests: list[str] = []
        self._refuse_existing()
        self._temporary = temporary_name(self.output_path)
        self._schema = _schema()
        try:
            self.output_path.parent.mkdir(parents=True, exist_ok=True)
            self._file: Any = pq.ParquetWriter(
                str(self._temporary),
                self._schema,
                compression=compression,
                write_page_checksum=True,
            )
        except OSError as error:
            raise cannot_write(self.output_path, error) from error

    def write_bin(
        self,
        bin_id: SupportsIndex,
        input_ids: npt.ArrayLike,
        loss_mask: npt.ArrayLike,
        seq_start_id: npt.ArrayLike,
    ) -> None:
        """The next bin: its number must be the number of bins written so far."""
        number = whole_number(bin_id, "bin_id", least=0)
        where = f"{self.output_path}, bin {number:,}"
        given = (input_ids, loss_mask, seq_start_id)
        ids, mask, starts = given_bin(given, self.pack_size, np.dtype(np.int32), where)
        if number != self.num_bins or self._file is None:
            state = f"the next is {self.num_bins:,}" if self._file else "the writer is finished"
            raise OptionError(
                f"{self.output_path}: bin {number:,}, but {state}; Parquet is written in order "
                "(memmap takes any order)"
            )
        parts = zip((ids, mask, starts), COLUMNS.values(), strict=True)
        self._bins.append(tuple(part.astype(dtype) for part, dtype in parts))  # copies
        self.num_bins += 1
        self.num_tokens += len(ids)
        self.num_sequences += len(starts)
        if len(self._bins) == self._group:
            self._flush()

    def finalize(self, *, check: Check | None = None) -> dict[str, Any]:
        """Publish the file; returns what it holds. `check` as in `Check`."""
        if self._file is None:
            raise OptionError(f"{self.output_path}: this writer is finished; make another one")
        self._flush()
        try:
            self._file.add_key_value_metadata(self._says())
            self._file.close()
            with self._temporary.open("rb+") as file:
                os.fsync(file.fileno())
            if check is not None:
                check(self._temporary)
            self._refuse_existing()
            self._temporary.rename(self.output_path)
            sync_folder(self.output_path.parent)
        except OSError as error:
            raise cannot_write(self.output_path, error) from error
        finally:
            self.abort()
        return {
            "format": "packed_parquet",
            "version": VERSION,
            "num_bins": self.num_bins,
            "pack_size": self.pack_size,
            "loss_mask_alignment": self.loss_mask_alignment,
            "num_tokens": self.num_tokens,
            "num_sequences": self.num_sequences,
        }

    def abort(self) -> None:
        """Remove what was written; may be called again. A finished file stays."""
        file, self._file = self._file, None
        if file is not None and file.is_open:
            file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> ParquetShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def _flush(self) -> None:
        if not self._bins:
            return
        columns = [
            Ragged.from_lengths(np.concatenate(parts), [len(part) for part in parts])
            for parts in zip(*self._bins, strict=True)
        ]
        arrays = [_lists(column) for column in columns]
        try:
            self._file.write_table(
                pa.table(arrays, schema=self._schema), row_group_size=len(self._bins)
            )
        except OSError as error:
            raise cannot_write(self.output_path, error) from error
        self._digests.append(group_digest(columns))
        self._bins = []

    def _says(self) -> dict[bytes, bytes]:
        return write_metadata(
            ParquetSays(
                pack_size=self.pack_size,
                loss_mask_alignment=self.loss_mask_alignment,
                num_bins=self.num_bins,
                digests=tuple(self._digests),
            )
        )

    def _refuse_existing(self) -> None:
        if self.output_path.exists():
            raise StoreExistsError(
                f"{self.output_path}: is here already; remove it or choose another name"
            )


def _schema() -> Any:
    return pa.schema(
        [(name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in COLUMNS.items()]
    )


def _lists(column: Ragged) -> Any:
    if column.offsets[-1] >= 2**31:
        raise OptionError(
            f"{len(column):,} bins of {column.offsets[-1]:,} tokens in a row group: Parquet lists "
            "end at 2,147,483,647: pass a smaller row_group_size"
        )
    offsets = pa.array(column.offsets.astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(column.values))


__all__ = ["ParquetShard", "ParquetShardWriter"]
