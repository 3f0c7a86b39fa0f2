"""Check every byte of a memmap_padded_v1 shard.

In: a folder.  Out: a list of sentences, empty when all is well.
Promise: a changed, truncated or missing file is found by its hash; every bin is held against the
invariant, padding included; memory stays at a few MiB. Damage is a sentence, never an exception;
no finished shard at all is an error.
Not here: repair.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardmill.errors import DamagedStoreError, ManifestError
from shardmill.interop.packed.arrays import file_sha256
from shardmill.interop.packed.given import path_to_read
from shardmill.interop.packed.layout import (
    MOST_INDEX,
    ArrayFile,
    ShardManifest,
    check_array,
    read_manifest,
)
from shardmill.interop.packed.records import LossMask, PackedBlock, block_problem
from shardmill.records import IntArray, OffsetArray, Ragged

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
