"""Packed shards as Parquet: one row per bin, three columns of lists.

In: bins, in order; or a `.parquet` file, or a folder of them.  Out: a file; or bins in any order.
Promise: the file appears whole or not at all and never over another one; memory is that of one row
group, written or read; ids and borders are checked as they are read. The pack size and the meaning
of the masks stand in the file's metadata, and so does a digest of every row group; for a file of
others the caller says the pack size.
Not here: what a bin must look like (records.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.arguments import whole_number
from shardmill.atomic import cannot_write, sync_folder, temporary_name
from shardmill.errors import OptionError, StoreExistsError
from shardmill.interop.packed.given import (
    WRITE_INSTEAD,
    given_bin,
    given_pack_size,
    given_path,
)
from shardmill.interop.packed.parquet_reader import ParquetShard
from shardmill.interop.packed.parquet_seals import (
    COLUMNS,
    VERSION,
    ParquetSays,
    group_digest,
    write_metadata,
)
from shardmill.interop.packed.records import Check, checked_alignment
from shardmill.records import Ragged

_ROW_GROUP = 1000  # bins

__all__ = ["ParquetShard", "ParquetShardWriter"]


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
