"""Pack a spool or chat store into one packed shard, and return a receipt.

Same spool and options, same bytes. Every token is in one bin, or the receipt says what became of
it; bins that train nothing are counted and reported. Nothing is published until all is written.
`pack_from_spool` refuses sequences that do not fit, unless `long` says otherwise; `pack_with` takes
any packer and cuts them, as specified for Nemotron, and counts what it cut.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import refuse_url
from shardmill.errors import OptionError
from shardmill.formats.packed.formats import packed_writer
from shardmill.formats.packed.records import (
    WRITE_INSTEAD,
    checked_alignment,
    given_pack_size,
    token_dtype,
)
from shardmill.formats.packed.spool import SequenceSpoolReader, Spool, plan_blocks
from shardmill.packing import (
    PACKERS,
    BinAssignment,
    Long,
    PackPlan,
    packer_named,
    plan_of_bins,
    takes_seed,
)
from shardmill.records import JSON, OffsetArray

logger = logging.getLogger(__name__)

_NEMOTRON = {
    "first_fit_decreasing": "first-fit",
    "first_fit_shuffle": "first-fit-shuffle",
    "concatenative": "concatenate",
}
"""Nemotron's names for our packers."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}", re.ASCII)
_STORAGES = {  # name -> format, and the suffix of its path
    "memmap_v1": ("memmap", ""),
    "legacy_npy_pickle": ("legacy", ".npy"),
    "parquet": ("parquet", ".parquet"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOptions:
    """How `pack_from_spool` packs, and the form in which it writes."""

    algorithm: str = "best-fit"
    seed: int | None = None
    max_per_row: SupportsIndex | None = None  # the most sequences of a bin
    align_to: SupportsIndex = 1  # every sequence starts at a multiple of it
    long: Long = "error"  # what becomes of sequences over the pack size
    packed_storage: str = "memmap_v1"  # or "parquet", "legacy_npy_pickle"
    dtype: npt.DTypeLike = np.int32  # of the ids
    loss_mask_alignment: str = "label"  # or "roll_right"; see `Alignment`

    def __post_init__(self) -> None:
        if self.packed_storage not in _STORAGES:
            storages = (*_STORAGES,)
            raise OptionError(f"packed_storage={self.packed_storage!r}: wanted one of {storages}")
        token_dtype(self.dtype)
        checked_alignment(self.loss_mask_alignment)


def pack_from_spool(
    spool: str | Path | Spool,
    output_dir: str | Path,
    *,
    shard_id: str,
    pack_size: SupportsIndex,
    options: PackedOptions | None = None,
) -> dict[str, JSON]:
    """Pack all sequences of `spool` into bins of `pack_size` tokens; the receipt is JSON.

    The shard is `output_dir/shard_id`, with `.npy` or `.parquet` for the other storages.
    """
    given = options or PackedOptions()
    size, path = given_pack_size(pack_size), _path(output_dir, shard_id, given)
    reader = SequenceSpoolReader(spool) if isinstance(spool, str | Path) else spool
    limits = {"max_per_row": given.max_per_row, "align_to": given.align_to, "long": given.long}
    plan = packer_named(given.algorithm, given.seed)(reader.lengths(), size, **limits)
    choices: dict[str, JSON] = {
        "algorithm": given.algorithm,
        "seed": given.seed,
        "max_per_row": None if given.max_per_row is None else int(given.max_per_row),
        "align_to": plan.align_to,
        "long": given.long,
    }
    return {"shard_id": shard_id, **_write(reader, plan, path, given, choices)}


def pack_with(
    packer: object,
    spool: str | Path,
    shard_id: str,
    pack_size: SupportsIndex,
    form: PackedOptions,
    output_dir: Path,
) -> dict[str, JSON]:
    """As `pack_from_spool`, with any packer; what does not fit into a bin is cut and counted.

    `packer`: the name of one of ours, or Nemotron's name for it; a function of lengths and pack
    size; or an object whose `pack` takes a list of lengths. It returns a `PackPlan`, an assignment
    (`num_bins` and `bin_indices`), or a list of sequence numbers for each bin, with every sequence
    in exactly one bin. Lengths are given to it as they are after the cut. `form`: storage, dtype
    and alignment; the rest of these options is for packers that are chosen by name alone.
    """
    size, path = given_pack_size(pack_size), _path(output_dir, shard_id, form)
    reader = SequenceSpoolReader(spool)
    plan = _plan_by(packer, reader.lengths(), size)
    metrics = plan.metrics
    num_cut = metrics.num_truncated + metrics.num_dropped
    if num_cut:
        logger.warning(
            "%s: %s of %s sequences do not fit into bins of pack_size=%s: %s tokens were cut off, "
            "and %s sequences with %s tokens left out; pack_from_spool can split them instead",
            *(shard_id, f"{num_cut:,}", f"{metrics.num_examples:,}", f"{size:,}"),
            *(f"{metrics.truncated_tokens:,}", f"{metrics.num_dropped:,}"),
            f"{metrics.dropped_tokens:,}",
        )
    choices: dict[str, JSON] = {
        "algorithm": packer if isinstance(packer, str) else _name_of(packer),
        "align_to": plan.align_to,
        "long": "truncate",
    }
    return {"shard_id": shard_id, **_write(reader, plan, path, form, choices)}


def shard_name(shard_id: str, options: PackedOptions) -> str:
    """What a shard is called in its folder."""
    if not isinstance(shard_id, str) or not _NAME.fullmatch(shard_id):
        raise OptionError(
            f"shard_id={shard_id!r:.120}: wanted 1 to 200 letters, digits, '_', '.' or "
            "'-', beginning with a letter or digit"
        )
    return shard_id + _STORAGES[options.packed_storage][1]


def _path(folder: str | Path, shard_id: str, options: PackedOptions) -> Path:
    refuse_url(folder, "output_dir", instead=WRITE_INSTEAD)
    return Path(folder) / shard_name(shard_id, options)


def _plan_by(packer: Any, lengths: OffsetArray, size: int) -> PackPlan:
    """The plan of any kind of packer, with what is cut in its metrics."""
    capacity = getattr(packer, "bin_capacity", size)
    if capacity != size:
        raise OptionError(f"packer: its bin_capacity is {capacity}, but pack_size={size:,}")
    cut = np.minimum(lengths, size)
    if isinstance(packer, str):
        name = _NEMOTRON.get(packer, packer)
        if name not in PACKERS:
            raise OptionError(f"packer={packer!r}: wanted one of {', '.join(PACKERS)}")
        if takes_seed(name):
            raise OptionError(
                f"packer={packer!r} needs a seed: pass functools.partial(first_fit_shuffle, seed=7)"
            )
        found: Any = PACKERS[name](cut, size)
    elif hasattr(packer, "pack"):
        found = packer.pack(cut.tolist())
        found = found[0] if isinstance(found, tuple) else found  # bins and metrics
    elif callable(packer):
        found = packer(cut, size)
    else:
        raise OptionError(f"packer={packer!r:.100}: wanted a name, a function, or one with `pack`")
    if not isinstance(found, PackPlan):
        return plan_of_bins(_bins_of(found, len(lengths)), lengths, size)
    metrics = found.metrics
    if (metrics.capacity, metrics.num_examples) != (size, len(lengths)):
        raise OptionError(
            f"the packer gave rows of {metrics.capacity:,} tokens and a plan of "
            f"{metrics.num_examples:,} sequences, wanted {size:,} and {len(lengths):,}"
        )
    long = np.flatnonzero(lengths > size)
    num_cut = int((lengths[long] - size).sum())
    return replace(
        found, metrics=replace(metrics, num_truncated=len(long), truncated_tokens=num_cut)
    )


def _bins_of(found: Any, num_sequences: int) -> BinAssignment:
    if hasattr(found, "bin_indices"):
        found = [found.bin_indices(bin_id) for bin_id in range(found.num_bins)]
    if isinstance(found, str) or not isinstance(found, Sequence | np.ndarray):
        raise OptionError(
            f"the packer gave {type(found).__name__}, wanted a PackPlan, a BinAssignment, or a "
            "list of sequence numbers for each bin"
        )
    return BinAssignment.from_bins(found, num_sequences)


def _name_of(packer: object) -> str:
    if isinstance(packer, partial):
        options = ", ".join(f"{name}={value!r}" for name, value in packer.keywords.items())
        return f"{_name_of(packer.func)}({options})"
    return getattr(packer, "__name__", type(packer).__name__)


def _write(
    reader: Spool, plan: PackPlan, path: Path, options: PackedOptions, choices: dict[str, JSON]
) -> dict[str, JSON]:
    """Write all rows of the plan; the receipt."""
    trained_labels = untrained_bins = first = 0
    metrics, dtype = plan.metrics, token_dtype(options.dtype)
    alignment = checked_alignment(options.loss_mask_alignment)
    sizes = (metrics.num_rows, metrics.capacity, len(plan.pieces))
    name = _STORAGES[options.packed_storage][0]
    with packed_writer(path, name, sizes, dtype, alignment) as writer:
        for block in plan_blocks(reader, plan, dtype, alignment):
            writer.write_block(first, block)
            labels = np.count_nonzero(block.loss_mask, axis=1)
            trained_labels += int(labels.sum())
            untrained_bins += int(np.count_nonzero(labels == 0))
            first += len(block)
        writer.finalize()
    if untrained_bins:
        logger.warning(
            "%s: %s of %s bins train no token: their sequences have no trained label",
            *(path, f"{untrained_bins:,}", f"{first:,}"),
        )
    return {
        "output_path": str(path),
        "format": options.packed_storage,
        "pack_size": metrics.capacity,
        **choices,
        "dtype": dtype.name,
        "loss_mask_alignment": alignment,
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
        "split_labels_lost": _labels_lost(reader, plan),
        "trained_labels": trained_labels,
        "untrained_bins": untrained_bins,
    }


def _labels_lost(reader: Spool, plan: PackPlan) -> int:
    """Trained tokens that begin a later piece of a split sequence: the token that predicts them is
    in another bin."""
    inner = np.flatnonzero(plan.pieces.start > 0)
    if not len(inner):
        return 0
    start = plan.pieces.start[inner]
    _, mask = reader.read_pieces(plan.pieces.example[inner], start, start + 1)
    return int(np.count_nonzero(mask))
