"""A plan over a spool, read as a packed shard: nothing is copied to disk.

In: a spool or chat store, and a plan of its lengths.  Out: a `PackedShard`.
Promise: bin for bin what `pack_from_spool` would write with the same plan.
Not here: making and storing plans.
"""

from __future__ import annotations

import numpy as np

from shardmill.errors import OptionError
from shardmill.interop.packed.materialize import Spool, make_block
from shardmill.interop.packed.records import Alignment, PackedBin, checked_alignment
from shardmill.packing import PackPlan
from shardmill.records import Ragged


class PlannedShard:
    """Row `i` of the plan is bin `i`; its tokens are read from the spool when asked for."""

    def __init__(self, spool: Spool, plan: PackPlan, *, loss_mask_alignment: str = "label") -> None:
        if plan.metrics.num_examples != len(spool):
            raise OptionError(
                f"a plan of {plan.metrics.num_examples:,} examples, but {spool!r} has "
                f"{len(spool):,}: the plan belongs to other data; pack again"
            )
        self._spool, self._plan = spool, plan
        self.loss_mask_alignment: Alignment = checked_alignment(loss_mask_alignment)

    @property
    def pack_size(self) -> int:
        return self._plan.metrics.capacity

    def __len__(self) -> int:
        return len(self._plan)

    def read_bin(self, bin_id: int) -> PackedBin:
        """Bin `bin_id`, made now: ids are int64."""
        plan = self._plan
        numbers = plan.rows.bin_indices(bin_id)
        pieces = (
            plan.pieces.example[numbers],
            plan.pieces.start[numbers],
            plan.pieces.stop[numbers],
        )
        sizes = -(-(pieces[2] - pieces[1]).astype(np.int64) // plan.align_to) * plan.align_to
        starts = Ragged(np.cumsum(sizes) - sizes, np.array([0, len(sizes)]))
        shape = (self.pack_size, plan.align_to, np.dtype(np.int64), self.loss_mask_alignment)
        return make_block(self._spool, pieces, starts, shape).bin(0)

    def close(self) -> None:
        """The spool belongs to whoever opened it."""

    def __repr__(self) -> str:
        return f"PlannedShard({self._spool!r}, bins={len(self):,}, pack_size={self.pack_size:,})"
