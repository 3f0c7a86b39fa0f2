"""Copy a packed shard into another packed format, and prove that the copy is equal.

Two passes in the memory of one bin: sizes, then bins. Afterwards both sides are read again and
compared token for token, and only then does the new shard get its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from shardmill.errors import DamagedStoreError, OptionError
from shardmill.formats.packed.legacy import LegacyRecord, check_record, iter_legacy_bins
from shardmill.formats.packed.memmap_writer import MemmapShardWriter
from shardmill.formats.packed.open import PlanShard, open_format, packed_writer
from shardmill.formats.packed.records import (
    PackedBin,
    agreed_alignment,
    given_pack_size,
    given_path,
    path_to_read,
)
from shardmill.formats.parity import Parity, check_bins, shard_bins

logger = logging.getLogger(__name__)

Read = Callable[[], Iterator[PackedBin]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BinSizes:
    """What one reading of all bins finds."""

    num_bins: int
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
    rule = None
    if from_format == "legacy":
        read: Read = lambda: iter_legacy_bins(source)  # noqa: E731
        sizes = measure_bins(read())
        record = check_record(source)
        size, rule = _legacy_pack_size(source, record, pack_size, sizes)
        alignment = _legacy_alignment(source, record, loss_mask_alignment)
    else:
        shard = open_format(source, from_format, pack_size, loss_mask_alignment)
        read = shard.bins if isinstance(shard, PlanShard) else lambda: shard_bins(shard)
        sizes = measure_bins(read())
        size, alignment = shard.pack_size, shard.loss_mask_alignment
    dtype = np.int32 if sizes.largest_id < 2**31 else np.uint32
    counts = (sizes.num_bins, size, sizes.num_sequences)
    writer = packed_writer(target, to_format, counts, dtype, alignment)
    if isinstance(writer, MemmapShardWriter):
        writer.pack_size_rule = rule
    parity: list[Parity] = []

    def compare(staged: Path) -> None:
        if to_format == "legacy":
            written = iter_legacy_bins(staged)
        else:
            written = shard_bins(open_format(staged, to_format))
        parity.append(check_bins(read(), written, f"{source} and {target}"))

    with writer:
        for number, found in enumerate(read()):
            writer.write_bin(number, found.input_ids, found.loss_mask, found.seq_starts)
        report: dict[str, Any] = writer.finalize(check=compare)
    return report | ({} if rule is None else {"pack_size_rule": rule}), parity[0]


def measure_bins(bins: Iterable[PackedBin]) -> BinSizes:
    """Read every bin once."""
    num_bins = num_sequences = longest = longest_bin = largest = 0
    for number, found in enumerate(bins):
        num_bins += 1
        num_sequences += len(found.seq_starts)
        largest = max(largest, int(found.input_ids.max()))
        if len(found) > longest:
            longest, longest_bin = len(found), number
    return BinSizes(
        num_bins=num_bins,
        num_sequences=num_sequences,
        longest=longest,
        longest_bin=longest_bin,
        largest_id=largest,
    )


def _legacy_pack_size(
    path: Path, record: LegacyRecord | None, given: SupportsIndex | None, sizes: BinSizes
) -> tuple[int, str | None]:
    """The caller's pack size, else the recorded one, else the longest bin, with a warning.

    Refused if a bin does not fit it.
    """
    recorded = None if record is None else record.pack_size
    pack_size = recorded if given is None else given_pack_size(given)
    rule = None
    if pack_size is None:
        pack_size, rule = max(sizes.longest, 1), "longest_bin"
        logger.warning(
            "%s: nothing says its pack size: taking %s, the length of its longest bin (bin %s); it "
            "may have been packed with more: if you know its pack size, pass it",
            *(path, f"{pack_size:,}", f"{sizes.longest_bin:,}"),
        )
    if recorded is not None and recorded != pack_size:
        raise OptionError(
            f"{path}: {{pack_size}}, but its record says {recorded:,}", pack_size=pack_size
        )
    if sizes.longest > pack_size:
        raise OptionError(
            f"{path}: {{pack_size}}, but bin {sizes.longest_bin:,} has {sizes.longest:,} tokens",
            pack_size=pack_size,
        )
    if record is not None and record.num_bins != sizes.num_bins:
        raise DamagedStoreError(
            f"{path}: {sizes.num_bins:,} bins, but its record says {record.num_bins:,}; copy both"
        )
    return pack_size, rule


def _legacy_alignment(path: Path, record: LegacyRecord | None, given: str | None) -> str:
    """What the masks mean: as recorded, as the caller says, or else the usual, with a warning."""
    recorded = None if record is None else record.loss_mask_alignment
    found = agreed_alignment(recorded, given, f"{path} (by its record)")
    if found is None:
        logger.warning(
            "%s: nothing says how its loss masks are aligned: taken as 'label' (mask[j] says "
            "whether ids[j + 1] is trained); if they were rolled right, pass the alignment "
            "'roll_right'",
            path,
        )
    return found or "label"
