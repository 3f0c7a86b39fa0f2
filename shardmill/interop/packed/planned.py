"""A plan read as a packed shard: nothing is copied to disk.

In: a spool or chat store and a plan of its lengths, or the plan file of a store.
Out: a `PackedShard`.
Promise: bin for bin what `pack_from_spool` would write with the same plan.
Not here: making plans (packing, build), rows of a plan file (mapped).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from shardmill.arguments import whole_number
from shardmill.closing import Closing
from shardmill.errors import DamagedStoreError, OptionError
from shardmill.interop.packed.given import path_to_read
from shardmill.interop.packed.materialize import Spool, make_block
from shardmill.interop.packed.records import Alignment, PackedBin, checked_alignment
from shardmill.mapped import PackedRows, PackSpace, open_pack
from shardmill.packing import PackPlan
from shardmill.records import Ragged
from shardmill.shards import refuse_excluded

_BLOCK = 2**18  # places of rows made together


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


class PlanShard(Closing):
    """The plan file of a chat store: row `i` is bin `i`, without the padding behind its last piece.

    Ids are of the store's dtype. The first token of a later piece of a split example is a token of
    the piece before, repeated; its label is there.
    """

    loss_mask_alignment: Alignment = "label"

    def __init__(self, path: str | Path, *, loss_mask_alignment: str | None = None) -> None:
        if loss_mask_alignment is not None and checked_alignment(loss_mask_alignment) != "label":
            raise OptionError(f"{path}: masks of a plan are aligned 'label', not 'roll_right'")
        rows = open_pack(path_to_read(path))
        self.path, self.fingerprint = rows.plan.path, rows.plan.fingerprint
        self._facts = rows.plan.facts
        self._rows: PackSpace | None = rows

    @property
    def pack_size(self) -> int:
        return self._facts.options.capacity

    def __len__(self) -> int:
        return self._facts.metrics.num_rows

    def read_bin(self, bin_id: SupportsIndex) -> PackedBin:
        """Bin `bin_id`, made now."""
        number = whole_number(bin_id, "bin_id", least=None)
        if not 0 <= number < len(self):
            raise IndexError(f"bin {number:,} of {len(self):,}")
        return _bin(self._opened().rows([number]), 0)

    def bins(self) -> Iterator[PackedBin]:
        """All bins in order, many made at a time; none may have an excluded token."""
        space = self._opened()
        refuse_excluded(space.store, space.split, "a conversion")
        step = max(1, _BLOCK // self.pack_size)
        for first in range(0, len(self), step):
            rows = self._opened().rows(np.arange(first, min(first + step, len(self))))
            yield from (_bin(rows, number) for number in range(len(rows.used)))

    def close(self) -> None:
        """Let go of the token files; the next bin opens them again. May be called again."""
        if self._rows is not None:
            self._rows.close()
        self._rows = None

    def __repr__(self) -> str:
        return f"PlanShard({self.path.name!r}, bins={len(self):,}, pack_size={self.pack_size:,})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.fingerprint)

    def _opened(self) -> PackSpace:
        if self._rows is None:
            self._rows = _reopen(self.path, self.fingerprint)._rows
        assert self._rows is not None
        return self._rows


def _bin(rows: PackedRows, number: int) -> PackedBin:
    used = int(rows.used[number])
    mask = np.zeros(used, np.uint8)
    mask[:-1] = rows.trained[number, 1:used]  # the first token of a piece is never trained
    return PackedBin(
        input_ids=rows.ids[number, :used],
        loss_mask=mask,
        seq_starts=rows.starts[number].astype(np.int64, copy=False),
    )


def _reopen(path: Path, fingerprint: str) -> PlanShard:
    shard = PlanShard(path)
    if shard.fingerprint != fingerprint:
        raise DamagedStoreError(f"{path}: was packed again since it was opened; open it again")
    return shard
