"""Make bins of the sequences of a spool: ids, aligned loss masks and starts.

"label": `mask[j]` says whether `ids[j + 1]` is trained, and the last place of a sequence is 0, so
the trained labels of a bin are exactly those of its sequences. `plan_blocks` makes the rows of a
plan, many at a time. `materialize_bin_arrays` makes one bin of an assignment, by the prescribed
signature; it is the only one that cuts, and it says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.interop.packed.given import check_ids
from shardmill.interop.packed.records import Alignment, LossMask, PackedBlock, checked_alignment
from shardmill.interop.packed.spans import spread
from shardmill.packing import BinAssignment, PackPlan
from shardmill.records import IntArray, OffsetArray, Ragged

logger = logging.getLogger(__name__)

_BLOCK = 2**20  # places of rows made together: 8 bytes each for indices, three times


class SequenceReader(Protocol):
    """Sequences by number; masks are per token."""

    def read_sequence(self, index: int, /) -> tuple[IntArray, LossMask]: ...


class Spool(SequenceReader, Protocol):
    """What a plan is made of and read through: a spool, or a chat store."""

    def __len__(self) -> int: ...

    def lengths(self) -> OffsetArray: ...

    def read_pieces(
        self, sequences: IntArray, start: IntArray, stop: IntArray, /
    ) -> tuple[IntArray, LossMask]: ...


def materialize_bin_arrays(
    spool_reader: SequenceReader,
    assignment: BinAssignment,
    bin_id: int,
    pack_size: SupportsIndex,
    scratch_input_ids: IntArray,
    scratch_loss_mask: LossMask,
    *,
    loss_mask_alignment: str = "label",
) -> tuple[int, npt.NDArray[np.uint32]]:
    """Fill the scratch arrays, (pack_size,) each, with bin `bin_id`; the rest becomes zero.

    Returns how many tokens there are, and where sequences start: from 0, rising. A sequence
    without tokens has no start. Tokens over `pack_size` are cut off, with a warning: the end of the
    sequence that does not fit, and all sequences after it.
    """
    size, alignment = whole_number(pack_size, "pack_size"), checked_alignment(loss_mask_alignment)
    for name, scratch in (("input_ids", scratch_input_ids), ("loss_mask", scratch_loss_mask)):
        if scratch.shape != (size,):
            raise OptionError(f"scratch_{name} of shape {scratch.shape}, wanted ({size},)")
    scratch_input_ids[:] = 0
    scratch_loss_mask[:] = 0
    starts: list[int] = []
    stop = num_cut = 0
    for sequence in map(int, assignment.bin_indices(bin_id)):
        ids, mask = spool_reader.read_sequence(sequence)
        num_cut += max(len(ids) - (size - stop), 0)
        ids, mask = ids[: size - stop], mask[: size - stop]
        if not len(ids):
            continue
        start, stop = stop, stop + len(ids)
        starts.append(start)
        _check_fit(ids, scratch_input_ids.dtype, f"sequence {sequence:,}")
        scratch_input_ids[start:stop] = ids
        if alignment == "label":
            scratch_loss_mask[start : stop - 1] = mask[1:]
        else:
            scratch_loss_mask[start:stop] = mask
    if alignment == "roll_right":
        scratch_loss_mask[1:stop] = scratch_loss_mask[: max(stop - 1, 0)].copy()
        scratch_loss_mask[:1] = 0
    if num_cut:
        logger.warning(
            "bin %s: %s tokens were cut off, since its sequences are longer than pack_size=%s",
            *(f"{bin_id:,}", f"{num_cut:,}", f"{size:,}"),
        )
    return stop, np.array(starts, dtype=np.uint32)


def plan_blocks(
    spool: Spool, plan: PackPlan, dtype: npt.DTypeLike, loss_mask_alignment: str
) -> Iterator[PackedBlock]:
    """All rows of a plan, some thousand at a time: one gather, one scatter each.

    A piece that was aligned owns the places up to the next one; they hold id 0 and are not trained.
    Blocks are as wide as the capacity, or, where that is larger than any block, as the fullest row:
    memory is that of the tokens that are there, not of those there is room for.
    """
    alignment, width = checked_alignment(loss_mask_alignment), plan.metrics.capacity
    positions = plan.positions()
    if width > _BLOCK:
        width = min(width, _fullest(plan, positions))
    step = max(_BLOCK // width, 1)
    for first in range(0, len(plan), step):
        offsets = plan.rows.offsets[first : first + step + 1]
        items = slice(int(offsets[0]), int(offsets[-1]))
        pieces = plan.rows.indices[items]
        yield make_block(
            spool,
            (plan.pieces.example[pieces], plan.pieces.start[pieces], plan.pieces.stop[pieces]),
            Ragged(positions[items], offsets - offsets[0]),
            (width, plan.align_to, np.dtype(dtype), alignment),
        )


def _fullest(plan: PackPlan, positions: IntArray) -> int:
    """Places of the row that takes most of them, at least one."""
    ends = positions + plan.pieces.lengths[plan.rows.indices]
    most = int(ends.max(initial=1))
    return -(-most // plan.align_to) * plan.align_to


def make_block(
    spool: Spool,
    pieces: tuple[IntArray, IntArray, IntArray],
    starts: Ragged,
    shape: tuple[int, int, np.dtype[Any], Alignment],
) -> PackedBlock:
    """Some rows at once. `pieces`: example, start and stop of each, row after row; `starts`: where
    in its row each goes; `shape`: places of a row, align_to, dtype of the ids, alignment."""
    capacity, align_to, dtype, alignment = shape
    ids, mask = spool.read_pieces(*pieces)
    lengths = (pieces[2] - pieces[1]).astype(np.int64)
    if len(ids) != lengths.sum():
        raise OptionError(f"{spool!r}: gave {len(ids):,} tokens for pieces of {lengths.sum():,}")
    _check_fit(ids, dtype, repr(spool))
    row_starts = np.repeat(np.arange(len(starts)), starts.lengths) * capacity + starts.values
    places, ends = spread(row_starts, row_starts + lengths)
    rows = np.zeros(len(starts) * capacity, dtype)
    rows[places] = ids
    masks = np.zeros(len(starts) * capacity, np.uint8)
    if alignment == "label":
        trained = np.zeros_like(mask)
        trained[:-1] = mask[1:]
        trained[ends[1:] - 1] = 0
        masks[places] = trained
    else:
        masks[places] = mask
    last = starts.offsets[1:] - 1
    used = starts.values[last] + lengths[last]
    used = -(-used // align_to) * align_to
    block = PackedBlock(
        input_ids=rows.reshape(-1, capacity),
        loss_mask=masks.reshape(-1, capacity),
        lengths=used,
        seq_starts=Ragged(starts.values.astype(np.uint32), starts.offsets),
    )
    if alignment == "roll_right":
        _roll_right(block.loss_mask, used)
    return block


def _roll_right(masks: LossMask, used: OffsetArray) -> None:
    """Every row one to the right over its used places; the first place becomes 0."""
    masks[:, 1:] = masks[:, :-1].copy()
    masks[:, 0] = 0
    full = np.flatnonzero(used < masks.shape[1])
    masks[full, used[full]] = 0


def _check_fit(ids: IntArray, dtype: np.dtype[Any], where: str) -> None:
    if not np.can_cast(ids.dtype, dtype):
        check_ids(ids, dtype, where)
