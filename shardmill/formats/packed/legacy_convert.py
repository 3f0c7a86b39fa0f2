"""Legacy packed shards: a pickle of dicts in a `.npy`, read without unpickling.

In: a path, or bins.  Out: bins, a file, or a memmap shard.
Promise: that of the parts, whose names these are.
Not here: the parts: legacy_reader, legacy_writer, legacy_convert, unpickle.

Turn a legacy packed shard into a memmap one.

Two passes (sizes, then bins) in the memory of one bin. A file with a record is compared with its
sha256 first. When all is written both sides are read again and compared token for token, and only
then the shard gets its name.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np

from shardmill.errors import DamagedStoreError, OptionError
from shardmill.formats.packed.legacy import (
    LegacyPickleWriter,
    check_record,
    iter_legacy_bins,
    num_legacy_bins,
    read_record,
    record_path,
)
from shardmill.formats.packed.memmap import open_memmap_shard
from shardmill.formats.packed.memmap_writer import MemmapShardWriter
from shardmill.formats.packed.records import (
    Alignment,
    checked_alignment,
    given_pack_size,
    given_path,
    path_to_read,
)
from shardmill.formats.parity import Parity, check_bins, shard_bins

logger = logging.getLogger(__name__)

PackSizeRule = Literal["longest_bin"]
"""How a pack size was found that nothing said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacySizes:
    """What one reading of a legacy shard finds."""

    num_bins: int
    num_tokens: int
    num_sequences: int
    longest: int  # tokens of the longest bin
    longest_bin: int
    largest_id: int


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
    sizes = measure_legacy(path)
    wanted, rule = legacy_pack_size(path, pack_size, sizes)
    alignment = legacy_alignment(path, loss_mask_alignment)
    dtype = np.int32 if sizes.largest_id < 2**31 else np.uint32
    with MemmapShardWriter(
        target,
        sizes.num_bins,
        wanted,
        sizes.num_sequences,
        dtype,
        loss_mask_alignment=alignment,
        pack_size_rule=rule,
    ) as writer:
        for number, found in enumerate(iter_legacy_bins(path)):
            writer.write_bin(number, found.input_ids, found.loss_mask, found.seq_starts)
        parity: list[Parity] = []

        def compare(staged: Path) -> None:
            with open_memmap_shard(staged) as shard:
                where = f"{path} and {output_dir}"
                parity.append(check_bins(iter_legacy_bins(path), shard_bins(shard), where))

        manifest = writer.finalize(check=compare)
    return manifest | {"parity": parity[0].to_json()}


def measure_legacy(path: Path) -> LegacySizes:
    """Read every bin once; what is not the file that a record beside it knows is refused."""
    num_bins = num_tokens = num_sequences = longest = longest_bin = largest = 0
    for number, found in enumerate(iter_legacy_bins(path)):
        num_bins += 1
        num_tokens += len(found)
        num_sequences += len(found.seq_starts)
        largest = max(largest, int(found.input_ids.max()))
        if len(found) > longest:
            longest, longest_bin = len(found), number
    check_record(path)
    return LegacySizes(
        num_bins=num_bins,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        longest=longest,
        longest_bin=longest_bin,
        largest_id=largest,
    )


def legacy_pack_size(
    path: Path, given: SupportsIndex | None, sizes: LegacySizes
) -> tuple[int, PackSizeRule | None]:
    """The pack size that the caller says, or the record, or else the longest bin, announced.

    Refused when a bin does not fit it.
    """
    record = read_record(path)
    recorded = None if record is None else record.pack_size
    pack_size = recorded if given is None else given_pack_size(given)
    rule: PackSizeRule | None = None
    if pack_size is None:
        pack_size, rule = max(sizes.longest, 1), "longest_bin"
        logger.warning(
            "%s: nothing says its pack size: taking pack_size=%s, the length of its longest bin "
            "(bin %s); it may have been packed with more: if you know its size, pass pack_size=",
            *(path, f"{pack_size:,}", f"{sizes.longest_bin:,}"),
        )
    if recorded is not None and recorded != pack_size:
        raise OptionError(f"{path}: pack_size={pack_size:,}, but its record says {recorded:,}")
    if sizes.longest > pack_size:
        raise OptionError(
            f"{path}: pack_size={pack_size:,}, but bin {sizes.longest_bin:,} has "
            f"{sizes.longest:,} tokens"
        )
    if record is not None and record.num_bins != sizes.num_bins:
        raise DamagedStoreError(
            f"{path}: {sizes.num_bins:,} bins, but its record says {record.num_bins:,}; copy both"
        )
    return pack_size, rule


def legacy_alignment(path: Path, given: str | None) -> Alignment:
    """What the masks mean: as recorded, as the caller says, or else the usual, announced."""
    record = read_record(path)
    chosen = None if given is None else checked_alignment(given)
    if record is not None:
        recorded = checked_alignment(record.loss_mask_alignment)
        if chosen not in (None, recorded):
            raise OptionError(f"{path}: its record says {recorded!r} masks, not {given!r}")
        return recorded
    if chosen is None:
        logger.warning(
            "%s: nothing says how its loss masks are aligned: taken as 'label' (mask[j] says "
            "whether ids[j + 1] is trained); pass loss_mask_alignment='roll_right' if they were "
            "rolled right",
            path,
        )
    return chosen or "label"


__all__ = [
    "LegacyPickleWriter",
    "convert_legacy_to_memmap",
    "iter_legacy_bins",
    "num_legacy_bins",
    "read_record",
    "record_path",
]
