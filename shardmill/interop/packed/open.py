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
from typing import SupportsIndex

from shardmill.errors import OptionError, StoreError, StoreNotFoundError
from shardmill.interop.packed.given import given_pack_size, path_to_read
from shardmill.interop.packed.memmap_reader import MemmapShard
from shardmill.interop.packed.memory import MemoryShard
from shardmill.interop.packed.planned import PlanShard
from shardmill.interop.packed.records import PackedShard
from shardmill.interop.packed.seals import read_json
from shardmill.interop.packed.spool import SPOOL
from shardmill.interop.packed.staging import MANIFEST
from shardmill.shards import list_plans
from shardmill.shards.plans import PACKS, SUFFIX

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
        from shardmill.interop.packed.parquet import ParquetShard

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
    from shardmill.interop.packed.legacy_reader import check_record, iter_legacy_bins

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
