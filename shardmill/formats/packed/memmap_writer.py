"""Write memmap_padded_v1, bin by bin, in any order.

Nothing is written through a map, so a full disk is an error and never a signal. Memory is 16 bytes
per bin and the bin at hand; starts wait on disk until their order is known.
"""

from __future__ import annotations

import io
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import BuildError, OptionError
from shardmill.formats.packed.files import StagedFolder, file_sha256, write_manifest, writing
from shardmill.formats.packed.memmap import INDEX, MASK
from shardmill.formats.packed.records import (
    Check,
    PackedBlock,
    checked_alignment,
    given_bin,
    given_pack_size,
    given_path,
    token_dtype,
)
from shardmill.records import JSON, IntArray, OffsetArray

_CHUNK = 2**16  # bins whose starts are moved at a time
_WAITING = "starts.waiting"
_INSTEAD = "shardmill.compat.nemotron.write_memmap_to_cloud writes a shard to a file system"


class MemmapShardWriter:
    """Bins of up to `pack_size` tokens; `total_seq_starts` is the most starts there will be.

    Every bin must be written exactly once. A context manager: leaving the block with an error, or
    without `finalize`, removes everything.
    """

    pack_size_rule: str | None = None
    """How the pack size was found, if nothing stated it; recorded in the manifest."""

    def __init__(
        self,
        output_dir: str | Path,
        num_bins: SupportsIndex,
        pack_size: SupportsIndex,
        total_seq_starts: SupportsIndex,
        dtype: npt.DTypeLike = np.int32,
        *,
        loss_mask_alignment: str = "label",
    ) -> None:
        """`loss_mask_alignment` says what the masks mean that will be written; see `Alignment`."""
        path = given_path(output_dir, "output_dir", instead=_INSTEAD)
        self.num_bins = whole_number(num_bins, "num_bins", least=0)
        self.pack_size = given_pack_size(pack_size)
        self.total_seq_starts = whole_number(total_seq_starts, "total_seq_starts", least=0)
        self.dtype = token_dtype(dtype)
        self.loss_mask_alignment = checked_alignment(loss_mask_alignment)
        self._num_starts = self._num_trained = 0
        self._check_disk(path)
        self._lengths, self._counts, self._first = _tables(self.num_bins)
        self._staged = StagedFolder(path, "packed shard")
        self.output_dir = self._staged.target
        rows = (self.num_bins, self.pack_size)
        self._ids = _RowFile(self._staged.folder / "input_ids.npy", self.dtype.str, rows)
        self._masks = _RowFile(self._staged.folder / "loss_mask.npy", MASK, rows)
        self._waiting = io.BufferedWriter(io.FileIO(self._staged.folder / _WAITING, "xb"), _CHUNK)
        self._done = False

    def write_bin(
        self,
        bin_id: SupportsIndex,
        input_ids: npt.ArrayLike,
        loss_mask: npt.ArrayLike,
        seq_start_id: npt.ArrayLike,
    ) -> None:
        """One bin: (L,) ids, (L,) mask of 0 and 1, (S,) starts from 0, rising, below L.

        A last start of L, an empty sequence, is left out.
        """
        number = whole_number(bin_id, "bin_id", least=0)
        where = f"{self.output_dir}, bin {number:,}"
        given = (input_ids, loss_mask, seq_start_id)
        ids, mask, starts = given_bin(given, self.pack_size, self.dtype, where)
        self._write(number, (ids, mask), (np.array([len(ids)]), np.array([len(starts)]), starts))

    def write_block(self, first_bin: int, block: PackedBlock) -> None:
        """Bins `first_bin` and on, in two writes. The block must be as wide as a row, and sound."""
        starts = block.seq_starts
        rows = (block.input_ids, block.loss_mask)
        self._write(first_bin, rows, (block.lengths, starts.lengths, starts.values))

    def finalize(self, *, check: Check | None = None) -> dict[str, Any]:
        """Publish the shard and return its manifest. Every bin must have been written. `check` as
        in `Check`."""
        self._check_open()
        missing = np.flatnonzero(self._lengths == 0)
        if len(missing):
            raise OptionError(
                f"{self.output_dir}: {len(missing):,} of {self.num_bins:,} bins were not written, "
                f"the first is {missing[0]:,}: write them, then finalize"
            )
        self._done = True
        with writing(self._staged.folder):
            manifest = self._finish()
        if check is not None:
            check(self._staged.folder)
        self._staged.publish()
        return manifest

    def abort(self) -> None:
        """Remove what was written; may be called again. A finished shard stays."""
        self._done = True
        self._ids.close()
        self._masks.close()
        self._waiting.raw.close()
        self._staged.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def __repr__(self) -> str:
        return (
            f"MemmapShardWriter({str(self.output_dir)!r}, num_bins={self.num_bins:,}, "
            f"pack_size={self.pack_size:,}, dtype={self.dtype.name})"
        )

    def _check_disk(self, target: Path) -> None:
        """Refuse what the disk of `target` cannot hold, before anything is written."""
        path, num_bytes = target.resolve(), self.num_bins * self.pack_size
        num_bytes *= self.dtype.itemsize + 1
        existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
        free = shutil.disk_usage(existing).free
        if num_bytes > free:
            raise BuildError(
                f"{path}: {self.num_bins:,} bins take {num_bytes:,} bytes there, but {free:,} are "
                "free; nothing was written: free some space, write to another disk, or check the "
                "numbers"
            )

    def _check_open(self) -> None:
        if self._done:
            raise OptionError(f"{self.output_dir}: this writer is finished; make another one")

    def _write(
        self,
        first: int,
        rows: tuple[IntArray, IntArray],
        index: tuple[IntArray, IntArray, IntArray],
    ) -> None:
        """Bins `first` and on: ids and masks; lengths, numbers of starts, and the starts."""
        self._check_open()
        lengths, counts, starts = index
        if first + len(lengths) > self.num_bins:
            raise OptionError(
                f"{self.output_dir}: bin {max(first, self.num_bins):,} of {self.num_bins:,} bins"
            )
        bins = slice(first, first + len(lengths))
        written = np.flatnonzero(self._lengths[bins])
        if len(written):
            raise OptionError(f"{self.output_dir}: bin {first + written[0]:,} is written twice")
        num_starts = self._num_starts + len(starts)
        if num_starts > self.total_seq_starts:
            raise OptionError(
                f"{self.output_dir}, bin {first:,}: {num_starts:,} starts of sequences, but "
                f"total_seq_starts={self.total_seq_starts:,}"
            )
        with writing(self._staged.folder):
            self._ids.write(first, np.ascontiguousarray(rows[0], self.dtype))
            self._masks.write(first, np.ascontiguousarray(rows[1], np.uint8))
            self._waiting.write(np.ascontiguousarray(starts, INDEX).data)
        self._first[bins] = self._num_starts + np.cumsum(counts) - counts
        self._counts[bins] = counts
        self._lengths[bins] = lengths
        self._num_starts = num_starts
        self._num_trained += int(np.count_nonzero(rows[1]))

    def _finish(self) -> dict[str, JSON]:
        folder = self._staged.folder
        self._waiting.close()
        offsets = np.zeros(self.num_bins + 1, np.int64)
        np.cumsum(self._counts, out=offsets[1:])
        wide = offsets_dtype(self._num_starts)
        _write_array(folder / "packed_len.npy", self._lengths.astype(INDEX, copy=False))
        _write_array(folder / "seq_offsets.npy", offsets.astype(wide))
        self._write_starts(offsets)
        self._ids.finish()
        self._masks.finish()
        names = sorted(path.name for path in folder.iterdir())
        with ThreadPoolExecutor(2) as pool:
            hashes = list(pool.map(file_sha256, (folder / name for name in names)))
        files: dict[str, JSON] = {
            name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
            for name, digest in zip(names, hashes, strict=True)
        }
        manifest: dict[str, JSON] = {
            "version": "1.0",
            "format": "memmap_padded_v1",
            "num_bins": self.num_bins,
            "pack_size": self.pack_size,
            "dtype": self.dtype.str,
            "loss_mask_dtype": "<u1",
            "index_dtype": INDEX,
            "bins_written": self.num_bins,
            "seq_offsets_dtype": wide,
            "loss_mask_alignment": self.loss_mask_alignment,
            "num_sequences": self._num_starts,
            "num_tokens": int(self._lengths.sum(dtype=np.int64)),
            "trained_labels": self._num_trained,
            "files": files,
        }
        if self.pack_size_rule is not None:
            manifest["pack_size_rule"] = self.pack_size_rule
        return write_manifest(folder, manifest)

    def _write_starts(self, offsets: OffsetArray) -> None:
        """Put the starts, which wait in the order of writing, into the order of the bins."""
        waiting = self._staged.folder / _WAITING
        path = self._staged.folder / "seq_starts.npy"
        came = np.memmap(waiting, INDEX, "r") if self._num_starts else np.empty(0, INDEX)
        with path.open("xb") as file:
            file.write(npy_header(INDEX, (self._num_starts,)))
            for start in range(0, self.num_bins, _CHUNK):
                bins = slice(start, start + _CHUNK)
                counts = self._counts[bins].astype(np.int64)
                shift = self._first[bins] - offsets[:-1][bins]
                stop = int(offsets[min(start + _CHUNK, self.num_bins)])
                places = np.arange(offsets[start], stop) + np.repeat(shift, counts)
                file.write(np.ascontiguousarray(came[places]).data)
            file.flush()
            os.fsync(file.fileno())
        del came
        waiting.unlink()


class _RowFile:
    """A two-dimensional `.npy` file, written row by row; rows that were not written are zero."""

    def __init__(self, path: Path, dtype: str, shape: tuple[int, int]) -> None:
        header = npy_header(dtype, shape)
        self._start = len(header)
        self._row_bytes = shape[1] * np.dtype(dtype).itemsize
        with writing(path):
            self._file = path.open("xb", buffering=0)
            self._put(memoryview(header), 0)
            self._file.truncate(self._start + shape[0] * self._row_bytes)

    def write(self, row: int, values: npt.NDArray[Any]) -> None:
        """`values`, contiguous and of the file's dtype, from the start of `row` on."""
        self._put(values.reshape(-1).view(np.uint8).data, self._start + row * self._row_bytes)

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _put(self, data: memoryview, position: int) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, position)
            data, position = data[count:], position + count


def offsets_dtype(num_starts: int) -> str:
    """64 bits only when 32 do not suffice, since others read 32."""
    return INDEX if num_starts < 2**32 else "<u8"


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What comes before the data of a `.npy` file."""
    file = io.BytesIO()
    fields = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue()


def _write_array(path: Path, values: npt.NDArray[Any]) -> None:
    """A new file with all of `values`, durable."""
    with path.open("xb") as file:
        file.write(npy_header(values.dtype.str, values.shape))
        file.write(np.ascontiguousarray(values).data)
        file.flush()
        os.fsync(file.fileno())


def _tables(num_bins: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Of each bin: its tokens (0: not written), how many starts it has, and where they wait."""
    try:
        lengths, counts = np.zeros((2, num_bins), np.uint32)
        return lengths, counts, np.zeros(num_bins, np.int64)
    except (MemoryError, ValueError) as error:  # numpy raises either, by size
        raise OptionError(
            f"num_bins={num_bins:,}: a writer takes 16 bytes of memory per bin, more than there "
            "is; write several shards"
        ) from error
