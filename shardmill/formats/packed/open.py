"""Any packed shard, recognised by what lies at its place.

In: a path.  Out: a `PackedShard`.
Promise: a memmap folder, Parquet, a legacy `.npy` and the plan of a chat store are told apart by
name and manifest, never by trying; anything else is refused; nothing is unpickled but by the
restricted reader.
Not here: datasets (pytorch).

A packed shard whose bins lie in memory.

In: bins, one after another.  Out: a `PackedShard` over three flat arrays.
Promise: one dtype's width a token and one byte for its mask, not a Python object for each.
Not here: files. For formats that can only be read front to back.

A plan read as a packed shard: nothing is copied to disk.

In: a spool or chat store and a plan of its lengths, or the plan file of a store.
Out: a `PackedShard`.
Promise: bin for bin what `pack_from_spool` would write with the same plan.
Not here: making plans (packing, build), rows of a plan file (mapped).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.formats.packed.files import MANIFEST, read_json
from shardmill.formats.packed.memmap import MemmapShard
from shardmill.formats.packed.records import (
    Alignment,
    LossMask,
    PackedBin,
    PackedShard,
    check_bin,
    checked_alignment,
    given_pack_size,
    path_to_read,
)
from shardmill.formats.packed.spool import SPOOL, Spool, make_block
from shardmill.packing import PackPlan
from shardmill.protocols import Closing
from shardmill.records import IntArray, OffsetArray, Ragged
from shardmill.store import list_plans, refuse_excluded
from shardmill.store.plans import PACKS, SUFFIX
from shardmill.store.readers import PackedRows, PackSpace, open_pack


class MemoryShard:
    """All bins of an iterator, read once. Without `pack_size` it is that of the longest bin."""

    def __init__(
        self,
        bins: Iterable[PackedBin],
        where: str,
        *,
        pack_size: int | None = None,
        loss_mask_alignment: str = "label",
    ) -> None:
        self.loss_mask_alignment: Alignment = checked_alignment(loss_mask_alignment)
        self._ids, self._masks, self._starts = _flat(bins)
        longest = int(self._ids.lengths.max(initial=1))
        self.pack_size = longest if pack_size is None else pack_size
        self._where = where

    def __len__(self) -> int:
        return len(self._ids)

    def read_bin(self, bin_id: int) -> PackedBin:
        """Bin `bin_id`, as views."""
        if not 0 <= bin_id < len(self):
            raise IndexError(f"bin {bin_id:,} of {len(self):,}")
        first, last = self._ids.offsets[bin_id : bin_id + 2]
        found = PackedBin(
            input_ids=self._ids.values[first:last],
            loss_mask=self._masks[first:last],
            seq_starts=self._starts[bin_id].astype(np.int64, copy=False),
        )
        check_bin(found, self.pack_size, f"{self._where}, bin {bin_id:,}")
        return found

    def close(self) -> None:
        """Nothing is open."""

    def __repr__(self) -> str:
        return f"MemoryShard({self._where!r}, bins={len(self):,})"


def _flat(bins: Iterable[PackedBin]) -> tuple[Ragged, LossMask, Ragged]:
    ids, masks, starts = _Growing(np.int32), _Growing(np.uint8), _Growing(np.int64)
    for found in bins:
        ids.add(found.input_ids)
        masks.add(found.loss_mask)
        starts.add(found.seq_starts)
    return ids.ragged(), masks.ragged().values, starts.ragged()  # type: ignore[return-value]


class _Growing:
    """Arrays behind one another in one that doubles when it is full."""

    def __init__(self, dtype: type[np.integer[Any]]) -> None:
        self._values: IntArray = np.empty(1024, dtype)
        self._lengths: list[int] = []
        self._used = 0

    def add(self, part: IntArray) -> None:
        stop = self._used + len(part)
        if part.dtype != self._values.dtype and not np.can_cast(part.dtype, self._values.dtype):
            most = np.iinfo(self._values.dtype).max
            if len(part) and part.max() > most:
                self._values = self._values.astype(np.int64)
        if stop > len(self._values):
            grown = np.empty(max(stop, 2 * len(self._values)), self._values.dtype)
            grown[: self._used] = self._values[: self._used]
            self._values = grown
        self._values[self._used : stop] = part
        self._lengths.append(len(part))
        self._used = stop

    def ragged(self) -> Ragged:
        lengths: OffsetArray = np.array(self._lengths, np.int64)
        return Ragged.from_lengths(self._values[: self._used], lengths)


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


logger = logging.getLogger(__name__)


def packed_format(path: str | Path) -> str:
    """ "memmap", "parquet", "legacy" or "plan": what `open_packed` takes this for."""
    path = path_to_read(path)
    if not path.exists():
        raise StoreNotFoundError(f"{path}: nothing is here")
    if path.is_dir():
        if (path / MANIFEST).exists():
            refuse_spool(path)
            return "memmap"
        if any(path.glob("*.parquet")):
            return "parquet"
    elif path.suffix == ".parquet":
        return "parquet"
    elif path.suffix == ".npy":
        return "legacy"
    elif path.suffix == SUFFIX:
        return "plan"
    plans = [str(path / PACKS / f"{name}{SUFFIX}") for name in list_plans(path)]
    raise StoreError(
        f"{path}: no packed shard: wanted a folder with {MANIFEST} or *.parquet, a .parquet file, "
        f"a {SUFFIX} file of a chat store, or a legacy .npy file"
        + (f"; this store has {', '.join(plans)}" if plans else "")
    )


def refuse_spool(folder: Path) -> None:
    """A spool has a manifest too, but its sequences are in no bins yet."""
    fields, _ = read_json(folder, "packed shard")
    if fields.get("format") == SPOOL:
        raise StoreError(
            f"{folder}: a spool, whose sequences are not packed yet: pack it with pack_from_spool, "
            "and open what that writes"
        )


def open_packed(
    path: str | Path,
    *,
    pack_size: SupportsIndex | None = None,
    loss_mask_alignment: str | None = None,
) -> PackedShard:
    """The packed shard at `path`.

    `pack_size` and `loss_mask_alignment`: for formats that do not say them (Parquet of others,
    legacy files without a record); where one is said, another is refused. See `Alignment`.
    """
    path, found = Path(path).absolute(), packed_format(path)
    if found == "parquet":
        from shardmill.formats.packed.parquet import ParquetShard

        return ParquetShard(path, pack_size=pack_size, loss_mask_alignment=loss_mask_alignment)
    if found == "legacy":
        return check_pack_size(_open_legacy(path, pack_size, loss_mask_alignment), pack_size)
    kind = MemmapShard if found == "memmap" else PlanShard
    return check_pack_size(kind(path, loss_mask_alignment=loss_mask_alignment), pack_size)


def check_pack_size(shard: PackedShard, given: SupportsIndex | None) -> PackedShard:
    """The same shard, if it has the pack size that a caller says, or the caller says none."""
    if given is not None and given_pack_size(given) != shard.pack_size:
        raise OptionError(f"{shard!r}: its pack_size is {shard.pack_size:,}, not {given!r}")
    return shard


def _open_legacy(path: Path, size: SupportsIndex | None, given: str | None) -> MemoryShard:
    """What the record beside the file does not say: labels, and the length of the longest bin."""
    from shardmill.formats.packed.legacy import check_record, iter_legacy_bins

    logger.warning(
        "%s: a legacy file is read into memory as a whole, in every process that opens it; "
        "convert_legacy_to_memmap makes a shard that is mapped",
        path,
    )
    record = check_record(path)
    recorded = record.pack_size if record is not None else None
    stored = record.loss_mask_alignment if record is not None else None
    if given is not None and stored not in (None, given):
        raise OptionError(f"{path}: its masks are aligned {stored!r}, not {given!r}")
    return MemoryShard(
        iter_legacy_bins(path),
        str(path),
        pack_size=given_pack_size(size) if recorded is None and size is not None else recorded,
        loss_mask_alignment=stored or given or "label",
    )
