"""Read packed Parquet shards, bin by bin, in any order.

In: a `.parquet` file or a folder of them.  Out: `PackedBin`s.
Promise: a bin costs its row group, and the last few row groups are kept; every list is checked:
three columns, no nulls, whole numbers, ids that fit, the invariant of packed bins. Damage that
Parquet itself finds becomes an error of ours with the file's name. A file of ours is checked
against its seal when it is opened, and each row group against its digest when it is read.
Not here: writing (parquet.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.arguments import whole_number
from shardmill.closing import Closing
from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.interop.packed.given import given_pack_size, path_to_read
from shardmill.interop.packed.parquet_seals import (
    COLUMNS,
    ParquetSays,
    group_digest,
    read_metadata,
)
from shardmill.interop.packed.records import Alignment, PackedBin, check_bin, checked_alignment
from shardmill.interop.packed.seals import check_plain
from shardmill.records import Ragged

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
