"""Write a memmap_padded_v1 shard, bin by bin, in any order.

In: bins of token ids, loss masks and starts of sequences.  Out: a finished folder of six files.
Promise: every bin exactly once and by the invariant, or an error and nothing at the place; ids fit
the dtype; the manifest is written last, with the sha256 of every file; a full disk is an error.
Memory: 16 bytes a bin, and the bin at hand. Starts wait on disk until their order is known.
Not here: which sequences share a bin (packing), making bins (materialize).

memmap_padded_v1: fixed rows on disk, read without a byte of pickle.

In: bins, one by one.  Out: a folder of five `.npy` arrays and a manifest, and its reader.
Promise: what was written is read; what does not match its manifest is refused.
Not here: anything but the names of the parts: layout, memmap_writer, memmap_reader, memmap_verify.
"""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.formats.packed.files import (
    StagedFolder,
    cannot_write,
    check_room,
    sealed,
    write_manifest,
)
from shardmill.formats.packed.memmap import (
    FORMAT,
    INDEX,
    MASK,
    VERSION,
    MemmapShard,
    RowFile,
    file_sha256,
    npy_header,
    offsets_dtype,
    open_memmap_shard,
    token_dtype,
    verify_memmap_shard,
    write_array,
)
from shardmill.formats.packed.records import (
    Check,
    PackedBlock,
    block_problem,
    check_ids,
    checked_alignment,
    given_bin,
    given_pack_size,
    given_path,
)
from shardmill.records import JSON, IntArray

_CHUNK = 2**16  # bins whose starts are moved at a time
_WAITING = "starts.waiting"
_INSTEAD = "shardmill.remote.write_memmap_to_cloud writes a shard to a file system"


class MemmapShardWriter:
    """Bins of up to `pack_size` tokens; `total_seq_starts` is the most starts there will be.

    A context manager: leaving the block with an error removes everything, and so does leaving it
    without `finalize`.
    """

    def __init__(
        self,
        output_dir: str | Path,
        num_bins: SupportsIndex,
        pack_size: SupportsIndex,
        total_seq_starts: SupportsIndex,
        dtype: npt.DTypeLike = np.int32,
        *,
        loss_mask_alignment: str = "label",
        pack_size_rule: str | None = None,
    ) -> None:
        """`loss_mask_alignment` says what the masks mean that will be written; see `Alignment`.

        `pack_size_rule` is recorded in the manifest: how the pack size was found, if nothing said
        it.
        """
        path = given_path(output_dir, "output_dir", instead=_INSTEAD)
        self.num_bins = whole_number(num_bins, "num_bins", least=0)
        self.pack_size = given_pack_size(pack_size)
        self.total_seq_starts = whole_number(total_seq_starts, "total_seq_starts", least=0)
        self.dtype = token_dtype(dtype)
        self.loss_mask_alignment = checked_alignment(loss_mask_alignment)
        self._pack_size_rule = pack_size_rule
        self._num_starts = self._num_trained = 0
        row_bytes = self.pack_size * (self.dtype.itemsize + 1)
        check_room(path, self.num_bins * row_bytes, f"{self.num_bins:,} bins")
        self._lengths, self._counts, self._first = _tables(self.num_bins)
        self._staged = StagedFolder(path, "packed shard")
        self.output_dir = self._staged.target
        rows = (self.num_bins, self.pack_size)
        self._ids = RowFile(self._staged.folder / "input_ids.npy", self.dtype.str, rows)
        self._masks = RowFile(self._staged.folder / "loss_mask.npy", MASK, rows)
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
        parts = (input_ids, loss_mask, seq_start_id)
        ids, mask, starts = given_bin(parts, self.pack_size, self.dtype, where)
        self._check_new(number, 1, len(starts))
        self._ids.write(number, np.ascontiguousarray(ids, self.dtype))
        self._masks.write(number, np.ascontiguousarray(mask, np.uint8))
        self._book(slice(number, number + 1), np.array([len(ids)]), np.array([len(starts)]), starts)
        self._num_trained += int(np.count_nonzero(mask))

    def write_block(self, first_bin: SupportsIndex, block: PackedBlock) -> None:
        """Bins `first_bin` and on, in two writes."""
        first = whole_number(first_bin, "first_bin", least=0)
        problem = block_problem(block, self.pack_size)
        if problem is not None:
            raise OptionError(f"{self.output_dir}, from bin {first:,} on: {problem}")
        check_ids(block.input_ids, self.dtype, f"{self.output_dir}, from bin {first:,} on")
        self._check_new(first, len(block), len(block.seq_starts.values))
        self._ids.write(first, np.ascontiguousarray(block.input_ids, self.dtype))
        self._masks.write(first, np.ascontiguousarray(block.loss_mask))
        counts, bins = block.seq_starts.lengths, slice(first, first + len(block))
        self._book(bins, block.lengths, counts, block.seq_starts.values)
        self._num_trained += int(np.count_nonzero(block.loss_mask))

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
        try:
            manifest = self._finish()
        except OSError as error:
            raise cannot_write(self._staged.folder, error) from error
        if check is not None:
            check(self._staged.folder)
        self._staged.publish()
        return manifest

    def abort(self) -> None:
        """Remove what was written; may be called again. A finished shard stays."""
        self._done = True
        for file in (self._ids, self._masks):
            file.close()
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

    def _check_open(self) -> None:
        if self._done:
            raise OptionError(f"{self.output_dir}: this writer is finished; make another one")

    def _check_new(self, first: int, count: int, num_starts: int) -> None:
        self._check_open()
        if first + count > self.num_bins:
            raise OptionError(
                f"{self.output_dir}: bin {max(first, self.num_bins):,} of {self.num_bins:,} bins"
            )
        written = np.flatnonzero(self._lengths[first : first + count])
        if len(written):
            raise OptionError(f"{self.output_dir}: bin {first + written[0]:,} is written twice")
        if self._num_starts + num_starts > self.total_seq_starts:
            raise OptionError(
                f"{self.output_dir}, bin {first:,}: {self._num_starts + num_starts:,} starts of "
                f"sequences, but total_seq_starts={self.total_seq_starts:,}"
            )

    def _book(self, bins: slice, lengths: IntArray, counts: IntArray, starts: IntArray) -> None:
        try:
            self._waiting.write(np.ascontiguousarray(starts, INDEX).data)
        except OSError as error:
            raise cannot_write(self._staged.folder, error) from error
        self._first[bins] = self._num_starts + np.cumsum(counts) - counts
        self._counts[bins] = counts
        self._num_starts += len(starts)
        self._lengths[bins] = lengths

    def _finish(self) -> dict[str, Any]:
        folder = self._staged.folder
        self._waiting.close()
        offsets = np.zeros(self.num_bins + 1, np.int64)
        np.cumsum(self._counts, out=offsets[1:])
        wide = offsets_dtype(self._num_starts)
        write_array(folder / "packed_len.npy", self._lengths.astype(INDEX, copy=False))
        write_array(folder / "seq_offsets.npy", offsets.astype(wide))
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
        manifest = sealed(self._manifest(wide, files))
        write_manifest(folder, manifest)
        return manifest

    def _manifest(self, wide: str, files: dict[str, JSON]) -> dict[str, JSON]:
        manifest: dict[str, JSON] = {
            "version": VERSION,
            "format": FORMAT,
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
        if self._pack_size_rule is not None:
            manifest["pack_size_rule"] = self._pack_size_rule
        return manifest

    def _write_starts(self, offsets: npt.NDArray[np.int64]) -> None:
        """The starts in the order of the bins, as they came in the order of writing."""
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


def _tables(num_bins: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Of each bin: its tokens (0: not written), how many starts it has, and where they wait."""
    try:
        lengths, counts = np.zeros((2, num_bins), np.uint32)
        return lengths, counts, np.zeros(num_bins, np.int64)
    except (MemoryError, ValueError) as error:  # numpy says either, by size
        raise OptionError(
            f"num_bins={num_bins:,}: a writer takes 16 bytes of memory a bin, and so many are not "
            "there; write several shards"
        ) from error


__all__ = ["MemmapShard", "MemmapShardWriter", "open_memmap_shard", "verify_memmap_shard"]
