"""Open any packed shard, recognised by its name and manifest, never by trying; or write one.

Two kinds of shard are here: `PlanShard` reads the plan of a chat store, without a copy on disk, and
`MemoryShard` holds the bins of a format that can only be read front to back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.formats.packed.files import MANIFEST, read_json
from shardmill.formats.packed.memmap import MemmapShard
from shardmill.formats.packed.memmap_writer import MemmapShardWriter
from shardmill.formats.packed.records import (
    Alignment,
    PackedBin,
    PackedShard,
    agreed_alignment,
    check_bin,
    checked_alignment,
    given_pack_size,
    path_to_read,
)
from shardmill.formats.packed.spool import SPOOL
from shardmill.protocols import Closing
from shardmill.store import list_plans, refuse_excluded
from shardmill.store.plans import PACKS, SUFFIX
from shardmill.store.readers import PackedRows, PackSpace, open_pack

logger = logging.getLogger(__name__)

_BLOCK = 2**18  # tokens of plan rows that are made together


def open_packed(
    path: str | Path,
    *,
    pack_size: SupportsIndex | None = None,
    loss_mask_alignment: str | None = None,
) -> PackedShard:
    """The packed shard at `path`: memmap, Parquet, a plan or a legacy `.npy`.

    `pack_size` and `loss_mask_alignment`: for formats that do not state them (Parquet of others,
    legacy files without a record); where one is stated, another is refused. See `Alignment`.
    """
    name = packed_format(path)
    return open_format(Path(path).absolute(), name, pack_size, loss_mask_alignment)


def packed_format(path: str | Path) -> str:
    """ "memmap", "parquet", "legacy" or "plan": the format that `open_packed` recognises."""
    path = path_to_read(path)
    if not path.exists():
        raise StoreNotFoundError(f"{path}: nothing is here")
    if path.is_dir():
        if (path / MANIFEST).exists():
            refuse_spool(path)
            return "memmap"
        if any(path.glob("*.parquet")):
            return "parquet"
    elif path.suffix in (".parquet", ".npy", SUFFIX):
        return {".parquet": "parquet", ".npy": "legacy", SUFFIX: "plan"}[path.suffix]
    plans = [str(path / PACKS / f"{name}{SUFFIX}") for name in list_plans(path)]
    raise StoreError(
        f"{path}: no packed shard: wanted a folder with {MANIFEST} or *.parquet, a .parquet file, "
        f"a {SUFFIX} file of a chat store, or a legacy .npy file"
        + (f"; this store has {', '.join(plans)}" if plans else "")
    )


def refuse_spool(folder: Path) -> None:
    """A spool has a manifest too, but its sequences are not packed yet."""
    fields, _ = read_json(folder, "packed shard")
    if fields.get("format") == SPOOL:
        raise StoreError(
            f"{folder}: a spool, whose sequences are not packed yet: pack it with pack_from_spool, "
            "and open what that writes"
        )


def open_format(
    path: Path,
    name: str,
    pack_size: SupportsIndex | None = None,
    loss_mask_alignment: str | None = None,
) -> PackedShard:
    """The packed shard of a known format, whatever its path is called."""
    if name == "parquet":
        from shardmill.formats.packed.parquet import ParquetShard

        return ParquetShard(path, pack_size=pack_size, loss_mask_alignment=loss_mask_alignment)
    if name == "legacy":
        shard: PackedShard = _open_legacy(path, pack_size, loss_mask_alignment)
    elif name == "memmap":
        shard = MemmapShard(path, loss_mask_alignment=loss_mask_alignment)
    else:
        shard = PlanShard(path, loss_mask_alignment=loss_mask_alignment)
    return check_pack_size(shard, pack_size)


def check_pack_size(shard: PackedShard, given: SupportsIndex | None) -> PackedShard:
    """The same shard; refused if the caller gave another pack size than it has."""
    if given is not None and given_pack_size(given) != shard.pack_size:
        raise OptionError(f"{shard!r}: its pack_size is {shard.pack_size:,}, not {given!r}")
    return shard


def packed_writer(
    target: Path, name: str, sizes: tuple[int, int, int], dtype: npt.DTypeLike, alignment: str
) -> Any:
    """A writer of a format; `sizes`: bins, pack size, and the most sequences there will be."""
    num_bins, pack_size, num_sequences = sizes
    if name == "memmap":
        return MemmapShardWriter(
            target, num_bins, pack_size, num_sequences, dtype, loss_mask_alignment=alignment
        )
    if name == "parquet":
        from shardmill.formats.packed.parquet import ParquetShardWriter

        return ParquetShardWriter(target, pack_size, loss_mask_alignment=alignment)
    from shardmill.formats.packed.legacy import LegacyPickleWriter

    return LegacyPickleWriter(target, pack_size=pack_size, loss_mask_alignment=alignment)


def _open_legacy(path: Path, size: SupportsIndex | None, given: str | None) -> MemoryShard:
    from shardmill.formats.packed.legacy import check_record, iter_legacy_bins

    logger.warning(
        "%s: a legacy file is read into memory as a whole, in every process that opens it; "
        "convert_legacy_to_memmap makes a shard that is mapped",
        path,
    )
    record = check_record(path)
    recorded = None if record is None else record.pack_size
    if recorded is None and size is not None:
        recorded = given_pack_size(size)
    stored = None if record is None else record.loss_mask_alignment
    alignment = agreed_alignment(stored, given, path) or "label"
    return MemoryShard(iter_legacy_bins(path), str(path), recorded, alignment)


class MemoryShard:
    """All bins of an iterator, read once. Without `pack_size` it is that of the longest bin."""

    def __init__(
        self,
        bins: Iterable[PackedBin],
        where: str,
        pack_size: int | None = None,
        loss_mask_alignment: Alignment = "label",
    ) -> None:
        self._bins, self._where = list(bins), where
        longest = max(map(len, self._bins), default=1)
        self.pack_size = longest if pack_size is None else pack_size
        self.loss_mask_alignment = loss_mask_alignment

    def __len__(self) -> int:
        return len(self._bins)

    def read_bin(self, bin_id: int) -> PackedBin:
        if not 0 <= bin_id < len(self):
            raise IndexError(f"bin {bin_id:,} of {len(self):,}")
        check_bin(self._bins[bin_id], self.pack_size, f"{self._where}, bin {bin_id:,}")
        return self._bins[bin_id]

    def close(self) -> None:
        """Nothing is open."""

    def __repr__(self) -> str:
        return f"MemoryShard({self._where!r}, bins={len(self):,})"


class PlanShard(Closing):
    """The plan file of a chat store: row `i` is bin `i`, without the padding after its last piece.

    Ids are of the store's dtype. The first token of a later piece of a split example repeats a
    token of the piece before, where its label is.
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
        """Release the token files; the next bin opens them again. May be called again."""
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
