"""A spool becomes one packed shard.

In: a spool or chat store, a row length, an algorithm, a storage.  Out: the shard and its receipt.
Promise: same spool and options, same bytes; every token is in one bin, or the receipt says what
became of it; bins that train nothing are counted and told; nothing is there until all is there.
Not here: the algorithms (packing), the formats (memmap, parquet, legacy).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.interop.packed.given import given_pack_size
from shardmill.interop.packed.layout import token_dtype
from shardmill.interop.packed.materialize import Spool, plan_blocks
from shardmill.interop.packed.memmap_writer import MemmapShardWriter
from shardmill.interop.packed.records import PackedShardWriter, checked_alignment
from shardmill.interop.packed.spool import SequenceSpoolReader
from shardmill.interop.packed.staging import cannot_write
from shardmill.packing import PACKERS, Long, PackPlan
from shardmill.records import JSON

logger = logging.getLogger(__name__)

Packer = Callable[..., PackPlan]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}", re.ASCII)
STORAGES = ("memmap_v1", "legacy_npy_pickle", "parquet")


def pack_from_spool(
    spool: str | Path | Spool,
    output_dir: str | Path,
    *,
    shard_id: str,
    pack_size: SupportsIndex,
    algorithm: str = "best-fit",
    seed: int | None = None,
    max_per_row: SupportsIndex | None = None,
    align_to: SupportsIndex = 1,
    long: Long = "error",
    packed_storage: str = "memmap_v1",
    dtype: npt.DTypeLike = np.int32,
    loss_mask_alignment: str = "label",
) -> dict[str, JSON]:
    """Pack all sequences of `spool` into bins of `pack_size` tokens; the receipt is JSON.

    The shard is `output_dir/shard_id`, `.npy` or `.parquet` behind it for the other storages.
    `long` says what becomes of sequences over `pack_size`.
    """
    size = given_pack_size(pack_size)
    target = _Target(output_dir, shard_id, packed_storage, token_dtype(dtype), loss_mask_alignment)
    reader = SequenceSpoolReader(spool) if isinstance(spool, str | Path) else spool
    packer = _packer(algorithm, seed)
    plan = packer(reader.lengths(), size, max_per_row=max_per_row, align_to=align_to, long=long)
    written = _write(reader, plan, target)
    return {
        "shard_id": shard_id,
        "output_path": str(target.path),
        "format": packed_storage,
        "pack_size": plan.metrics.capacity,
        "algorithm": algorithm,
        "seed": seed,
        "max_per_row": None if max_per_row is None else int(max_per_row),
        "align_to": plan.align_to,
        "long": long,
        "dtype": target.dtype.name,
        "loss_mask_alignment": loss_mask_alignment,
        **_account(plan),
        "split_labels_lost": _labels_lost(reader, plan),
        **written,
    }


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a shard goes, and as what."""

    output_dir: str | Path
    shard_id: str
    storage: str
    dtype: np.dtype[Any]
    alignment: str

    def __post_init__(self) -> None:
        checked_alignment(self.alignment)
        if self.storage not in STORAGES:
            raise OptionError(f"packed_storage={self.storage!r}: wanted one of {STORAGES}")
        if not isinstance(self.shard_id, str) or not _NAME.fullmatch(self.shard_id):
            raise OptionError(
                f"shard_id={self.shard_id!r:.120}: wanted 1 to 200 letters, digits, '_', '.' or "
                "'-', beginning with a letter or digit"
            )

    @property
    def path(self) -> Path:
        ending = {"memmap_v1": "", "legacy_npy_pickle": ".npy", "parquet": ".parquet"}
        return Path(self.output_dir) / (self.shard_id + ending[self.storage])

    def writer(self, plan: PackPlan) -> PackedShardWriter:
        if self.storage == "memmap_v1":
            sizes = (plan.metrics.num_rows, plan.metrics.capacity, len(plan.pieces))
            return MemmapShardWriter(
                self.path, *sizes, self.dtype, loss_mask_alignment=self.alignment
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.path.parent, error) from error
        if self.storage == "parquet":
            from shardmill.interop.packed.parquet import ParquetShardWriter

            return ParquetShardWriter(
                self.path, plan.metrics.capacity, loss_mask_alignment=self.alignment
            )
        from shardmill.interop.packed.legacy import LegacyPickleWriter

        return LegacyPickleWriter(
            self.path, pack_size=plan.metrics.capacity, loss_mask_alignment=self.alignment
        )


def _packer(algorithm: str, seed: int | None) -> Packer:
    if algorithm not in PACKERS:
        raise OptionError(f"algorithm={algorithm!r}: wanted one of {', '.join(PACKERS)}")
    if (algorithm == "first-fit-shuffle") != (seed is not None):
        needs = "needs a seed" if seed is None else "takes no seed: it shuffles nothing"
        raise OptionError(f"algorithm={algorithm!r} {needs}")
    if seed is None:
        return PACKERS[algorithm]
    return partial(PACKERS[algorithm], seed=seed)


def _write(reader: Spool, plan: PackPlan, target: _Target) -> dict[str, JSON]:
    trained_labels = untrained_bins = first = 0
    writer = target.writer(plan)
    with writer if isinstance(writer, AbstractContextManager) else nullcontext():
        for block in plan_blocks(reader, plan, target.dtype, target.alignment):
            if isinstance(writer, MemmapShardWriter) and block.width == writer.pack_size:
                writer.write_block(first, block)
            else:
                for index in range(len(block)):
                    row = block.bin(index)
                    starts = block.seq_starts[index]
                    writer.write_bin(first + index, row.input_ids, row.loss_mask, starts)
            labels = np.count_nonzero(block.loss_mask, axis=1)
            trained_labels += int(labels.sum())
            untrained_bins += int(np.count_nonzero(labels == 0))
            first += len(block)
        writer.finalize()
    if untrained_bins:
        logger.warning(
            "%s: %s of %s bins train no token: their sequences have no trained label",
            *(target.path, f"{untrained_bins:,}", f"{first:,}"),
        )
    return {"trained_labels": trained_labels, "untrained_bins": untrained_bins}


def _account(plan: PackPlan) -> dict[str, JSON]:
    metrics = plan.metrics
    return {
        "num_bins": metrics.num_rows,
        "lower_bound": metrics.lower_bound,
        "num_sequences": metrics.num_examples,
        "num_pieces": metrics.num_items,
        "tokens": metrics.num_tokens,
        "padding": metrics.padding,
        "utilisation": metrics.utilisation,
        "empty": metrics.num_empty,
        "split": metrics.num_split,
        "truncated": metrics.num_truncated,
        "truncated_tokens": metrics.truncated_tokens,
        "dropped": metrics.num_dropped,
        "dropped_tokens": metrics.dropped_tokens,
    }


def _labels_lost(reader: Spool, plan: PackPlan) -> int:
    """Trained tokens that begin a later piece of a split sequence: what predicts them is in
    another bin."""
    inner = np.flatnonzero(plan.pieces.start > 0)
    if not len(inner):
        return 0
    start = plan.pieces.start[inner]
    _, mask = reader.read_pieces(plan.pieces.example[inner], start, start + 1)
    return int(np.count_nonzero(mask))
