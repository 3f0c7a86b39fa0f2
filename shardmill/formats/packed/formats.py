"""The packed formats: recognised by name and manifest, never by trying; opened, written, converted.

A conversion makes two passes in the memory of one bin: sizes, then bins. Afterwards both sides are
read again and compared token for token, and only then does the new shard get its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.formats.packed.files import MANIFEST, read_json
from shardmill.formats.packed.legacy import (
    LegacyPickleWriter,
    LegacyShard,
    check_record,
    iter_legacy_bins,
)
from shardmill.formats.packed.memmap import MemmapShard, MemmapShardWriter
from shardmill.formats.packed.records import (
    Alignment,
    PackedBin,
    PackedBlock,
    PackedShard,
    agreed_alignment,
    agreed_pack_size,
    given_path,
    path_to_read,
)
from shardmill.formats.packed.spool import SPOOL
from shardmill.formats.stores import Parity, difference
from shardmill.records import OffsetArray
from shardmill.store import list_plans, refuse_excluded
from shardmill.store.plans import PACKS, SUFFIX
from shardmill.store.readers import PackSpace, open_pack

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
    shards: dict[str, type[PackedShard]] = {
        "memmap": MemmapShard,
        "legacy": LegacyShard,
        "plan": PlanShard,
    }
    if name == "parquet":
        from shardmill.formats.packed.parquet import ParquetShard  # pyarrow takes a while

        shards[name] = ParquetShard
    return shards[name](path, pack_size=pack_size, loss_mask_alignment=loss_mask_alignment)


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
    return LegacyPickleWriter(target, pack_size=pack_size, loss_mask_alignment=alignment)


class PlanShard(PackedShard):
    """The plan file of a chat store: row `i` is bin `i`, without the padding after its last piece.

    Ids are of the store's dtype. The first token of a later piece of a split example repeats a
    token of the piece before, where its label is.
    """

    fingerprint: str

    def _open(self) -> tuple[int, str]:
        rows = open_pack(self.path)
        self.path, self.fingerprint = rows.plan.path, rows.plan.fingerprint
        self._num_rows = len(rows)
        self._rows: PackSpace | None = rows
        return rows.plan.facts.options.capacity, "label"

    def __len__(self) -> int:
        return self._num_rows

    def _read(self, number: int) -> PackedBin:
        return next(self._bins(np.array([number])))

    def bins(self) -> Iterator[PackedBin]:
        """All bins in order, many made at a time; none may have an excluded token."""
        space = self._opened()
        refuse_excluded(space.store, space.split, "a conversion")
        step = max(1, _BLOCK // self.pack_size)
        for first in range(0, len(self), step):
            yield from self._bins(np.arange(first, min(first + step, len(self))))

    def close(self) -> None:
        """Release the token files; the next bin opens them again. May be called again."""
        if self._rows is not None:
            self._rows.close()
        self._rows = None

    def _bins(self, numbers: OffsetArray) -> Iterator[PackedBin]:
        rows = self._opened().rows(numbers)
        mask = np.zeros(rows.ids.shape, np.uint8)
        mask[:, :-1] = rows.trained[:, 1:]  # the first token of a piece is never trained
        return PackedBlock(
            input_ids=rows.ids, loss_mask=mask, lengths=rows.used, seq_starts=rows.starts
        ).bins()

    def _opened(self) -> PackSpace:
        if self._rows is None:
            self._rows = copy(self)._rows  # opens the plan again, and refuses another one
        assert self._rows is not None
        return self._rows


def convert_legacy_to_memmap(
    legacy_npy_path: str | Path,
    output_dir: str | Path,
    *,
    pack_size: SupportsIndex | None = None,
    loss_mask_alignment: str | None = None,
) -> dict[str, Any]:
    """The manifest of the new shard, with the result of the comparison under "parity".

    The pack size is `pack_size`, else the one recorded beside the file, else the length of the
    longest bin: then a warning says so, and so does "pack_size_rule" in the manifest.
    """
    path = path_to_read(legacy_npy_path, "legacy_npy_path")
    instead = "convert to a local folder; shardmill.remote.push copies it"
    target = given_path(output_dir, "output_dir", instead=instead)
    manifest, parity = convert_packed(
        path, target, "legacy", "memmap", pack_size, loss_mask_alignment
    )
    return manifest | {"parity": parity.to_json()}


def convert_packed(
    source: Path,
    target: Path,
    from_format: str,
    to_format: str,
    pack_size: SupportsIndex | None,
    loss_mask_alignment: str | None,
) -> tuple[dict[str, Any], Parity]:
    """What the writer of the new shard reports, and what was compared.

    The report has "pack_size_rule" if nothing stated the pack size. `pack_size` and
    `loss_mask_alignment` are for sources that do not state them.
    """
    size: int | None
    if from_format == "legacy":  # front to back, never in memory as a whole
        read: Callable[[], Iterator[PackedBin]] = partial(iter_legacy_bins, source)
    else:
        shard = open_format(source, from_format, pack_size, loss_mask_alignment)
        read, size, alignment = shard.bins, shard.pack_size, shard.loss_mask_alignment
    num_bins = num_sequences = longest = longest_bin = largest_id = 0
    for number, found in enumerate(read()):
        num_bins += 1
        num_sequences += len(found.seq_starts)
        largest_id = max(largest_id, int(found.input_ids.max()))
        if len(found) > longest:
            longest, longest_bin = len(found), number
    if from_format == "legacy":
        size, alignment = _stated_by_record(source, num_bins, pack_size, loss_mask_alignment)
    rule = None
    if size is None:
        size, rule = max(longest, 1), "longest_bin"
        logger.warning(
            "%s: nothing says its pack size: taking %s, the length of its longest bin (bin %s); it "
            "may have been packed with more: if you know better, pass pack_size",
            *(source, f"{size:,}", f"{longest_bin:,}"),
        )
    if longest > size:
        raise OptionError(
            f"{source}: {{pack_size}}, but bin {longest_bin:,} has {longest:,} tokens",
            pack_size=size,
        )
    dtype = np.int32 if largest_id < 2**31 else np.uint32
    writer = packed_writer(target, to_format, (num_bins, size, num_sequences), dtype, alignment)
    if isinstance(writer, MemmapShardWriter):
        writer.pack_size_rule = rule
    parity: list[Parity] = []

    def compare(staged: Path) -> None:
        is_legacy = to_format == "legacy"
        written = iter_legacy_bins(staged) if is_legacy else open_format(staged, to_format).bins()
        parity.append(check_bins(read(), written, f"{source} and {target}"))

    with writer:
        for number, found in enumerate(read()):
            writer.write_bin(number, found.input_ids, found.loss_mask, found.seq_starts)
        report: dict[str, Any] = writer.finalize(check=compare)
    return report | ({} if rule is None else {"pack_size_rule": rule}), parity[0]


def _stated_by_record(
    path: Path, num_bins: int, pack_size: SupportsIndex | None, loss_mask_alignment: str | None
) -> tuple[int | None, Alignment]:
    """The pack size of a legacy file and what its masks mean: as recorded, as the caller says, or
    else the usual alignment, with a warning."""
    record, where = check_record(path), f"{path} (by its record)"
    if record is not None and record.num_bins != num_bins:
        raise DamagedStoreError(
            f"{path}: {num_bins:,} bins, but its record says {record.num_bins:,}; copy both"
        )
    stated = (None, None) if record is None else (record.pack_size, record.loss_mask_alignment)
    alignment = agreed_alignment(stated[1], loss_mask_alignment, where)
    if alignment is None:
        logger.warning(
            "%s: nothing says how its loss masks are aligned: taken as 'label' (mask[j] says "
            "whether ids[j + 1] is trained); if they were rolled right, pass "
            "loss_mask_alignment='roll_right'",
            path,
        )
    return agreed_pack_size(stated[0], pack_size, where), alignment or "label"


def check_bins(first: Iterable[PackedBin], second: Iterable[PackedBin], where: str) -> Parity:
    """Compare ids, masks and starts of every bin. `where` names both sides."""
    num_bins = num_tokens = 0
    for number, (one, other) in enumerate(zip_longest(first, second)):
        if one is None or other is None:
            raise difference(where, f"one has {number:,} bins, the other more")
        for name in ("input_ids", "loss_mask", "seq_starts"):
            left, right = getattr(one, name), getattr(other, name)
            if not np.array_equal(left, right):
                raise difference(where, f"bin {number:,}: {name}", left, right)
        num_bins += 1
        num_tokens += len(one)
    return Parity(unit="bins", num_units=num_bins, num_tokens=num_tokens)
