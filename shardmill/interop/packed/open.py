"""Any packed shard, recognised by what lies at its place.

In: a path.  Out: a `PackedShard`.
Promise: a memmap folder, Parquet, a legacy `.npy` and the plan of a chat store are told apart by
name and manifest, never by trying; anything else is refused; nothing is unpickled but by the
restricted reader.
Not here: datasets (pytorch).
"""

from __future__ import annotations

import logging
from pathlib import Path

from shardmill.errors import OptionError, StoreError, StoreNotFoundError
from shardmill.interop.packed.memmap_reader import MemmapShard
from shardmill.interop.packed.memory import MemoryShard
from shardmill.interop.packed.planned import PlanShard
from shardmill.interop.packed.records import PackedShard
from shardmill.interop.packed.staging import MANIFEST
from shardmill.shards import list_plans
from shardmill.shards.plans import PACKS, SUFFIX

logger = logging.getLogger(__name__)


def packed_format(path: str | Path) -> str:
    """ "memmap", "parquet", "legacy" or "plan": what `open_packed` takes this for."""
    path = Path(path)
    if not path.exists():
        raise StoreNotFoundError(f"{path}: nothing is here")
    if path.is_dir():
        if (path / MANIFEST).exists():
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


def open_packed(path: str | Path, *, loss_mask_alignment: str | None = None) -> PackedShard:
    """The packed shard at `path`.

    `loss_mask_alignment`: for formats that do not say it; see `Alignment`.
    """
    path, found = Path(path).absolute(), packed_format(path)
    if found == "memmap":
        return MemmapShard(path, loss_mask_alignment=loss_mask_alignment)
    if found == "plan":
        return PlanShard(path, loss_mask_alignment=loss_mask_alignment)
    if found == "parquet":
        from shardmill.interop.packed.parquet import ParquetShard

        return ParquetShard(path, loss_mask_alignment=loss_mask_alignment)
    return _open_legacy(path, loss_mask_alignment)


def _open_legacy(path: Path, given: str | None) -> MemoryShard:
    """What the record beside the file does not say: labels, and the length of the longest bin."""
    from shardmill.interop.packed.legacy import iter_legacy_bins, read_record

    logger.warning(
        "%s: a legacy file is read into memory as a whole, in every process that opens it; "
        "convert_legacy_to_memmap makes a shard that is mapped",
        path,
    )
    record = read_record(path)
    stored = record.loss_mask_alignment if record is not None else None
    if given is not None and stored not in (None, given):
        raise OptionError(f"{path}: its masks are aligned {stored!r}, not {given!r}")
    return MemoryShard(
        iter_legacy_bins(path),
        str(path),
        pack_size=record.pack_size if record is not None else None,
        loss_mask_alignment=stored or given or "label",
    )
