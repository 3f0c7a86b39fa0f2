"""From one format to another, with a receipt.

In: a source, a target, the names of both formats.  Out: the target, and what was compared.
Promise: every conversion ends with a comparison, token for token, of what was written with what
was read (of packed shards before they get their name); nothing that stands at the target is
overwritten; a pair of formats that would lose a loss mask is not offered.
Not here: the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.arguments import refuse_url
from shardmill.errors import OptionError, StoreNotFoundError
from shardmill.formats.parity import Parity, check_bins, check_documents, shard_bins
from shardmill.formats.token_files import ForeignFile, Separator, TokenizerFacts
from shardmill.records import JSON

if TYPE_CHECKING:
    from shardmill.formats.packed.records import PackedBin

TOKENS = ("megatron", "llmc", "datatrove", "dolma")
PACKED = ("legacy", "memmap", "parquet")
PAIRS = (
    *((name, "store") for name in TOKENS),
    ("store", "megatron"),
    *((one, other) for one in (*PACKED, "plan") for other in PACKED if one != other),
)
"""What can be turned into what."""

_PATTERN = {"megatron": "*.idx", "llmc": "*.bin", "datatrove": "*.ds", "dolma": "*.npy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What a file does not say. None or False: it is not said here either."""

    split: str = "train"  # of a store
    dtype: str | None = None  # of bare tokens: "uint16" or "uint32"
    separator: Separator | None = None  # between documents, for files without an index
    tokenizer: TokenizerFacts | None = None  # of tokens that become a store
    ignore_loss: bool = False  # train on what a .loss file leaves out
    pack_size: int | None = None
    loss_mask_alignment: str | None = None


def convert(
    source: str | Path,
    target: str | Path,
    *,
    from_format: str,
    to_format: str,
    options: ConvertOptions | None = None,
) -> dict[str, JSON]:
    """Write `target` and return the receipt: formats, counts, and the result of the comparison.

    The receipt has "pack_size_rule" when nothing says the pack size of a legacy file, and the
    length of its longest bin is taken.
    """
    for name, path in (("source", source), ("target", target)):
        refuse_url(path, name, instead="copy with shardmill.remote.pull or push")
    if (from_format, to_format) not in PAIRS:
        offered = ", ".join(f"{one} to {other}" for one, other in PAIRS)
        raise OptionError(f"{from_format!r} to {to_format!r}: not offered; there is {offered}")
    said = options or ConvertOptions()
    found: dict[str, JSON] = {}
    if to_format == "store":
        parity = _to_store(Path(source), Path(target), from_format, said)
    elif from_format == "store":
        parity = _to_megatron(Path(source), Path(target), said)
    else:
        bins = _open_bins(Path(source), from_format, said)
        parity = _packed(Path(source), Path(target), to_format, bins)
        found = {} if bins.rule is None else {"pack_size_rule": bins.rule}
    return {
        "source": str(source),
        "target": str(target),
        "from": from_format,
        "to": to_format,
        parity.unit: parity.num_units,
        "tokens": parity.num_tokens,
        "parity": parity.to_json(),
        **found,
    }


def open_foreign(path: str | Path, name: str, options: ConvertOptions) -> list[ForeignFile]:
    """The token files at `path`: one file, or all of a folder that look like the format."""
    path = Path(path)
    paths = [path]
    if path.is_dir():
        paths = sorted(path.glob(_PATTERN[name]))
        if not paths:
            raise StoreNotFoundError(
                f"{path}: no {_PATTERN[name]} in this folder; check from_format="
            )
    return [_open_one(one, name, options) for one in paths]


def _open_one(path: Path, name: str, options: ConvertOptions) -> ForeignFile:
    if name == "megatron":
        from shardmill.formats.megatron import open_megatron

        return open_megatron(path)
    if name == "llmc":
        from shardmill.formats.llmc import open_llmc

        return open_llmc(path, separator=options.separator)
    if name == "datatrove":
        from shardmill.formats.datatrove import open_datatrove

        return open_datatrove(path, dtype=options.dtype, ignore_loss=options.ignore_loss)
    from shardmill.formats.dolma import open_dolma

    return open_dolma(path, dtype=options.dtype, separator=options.separator)


def _to_store(source: Path, target: Path, name: str, options: ConvertOptions) -> Parity:
    from shardmill.formats.stores import StoreOptions, store_from_files

    files = open_foreign(source, name, options)
    wanted = StoreOptions(split=options.split, name=source.name, tokenizer=options.tokenizer)
    return store_from_files(files, target, wanted)


def _to_megatron(source: Path, target: Path, options: ConvertOptions) -> Parity:
    from shardmill.formats.megatron import open_megatron, write_megatron
    from shardmill.formats.stores import StoreSplit

    split = StoreSplit(source, options.split)
    write_megatron(split, target)
    written = open_megatron(target).batches()
    return check_documents(split.batches(), written, f"{source} and {target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bins:
    """A packed shard of any format: its bins can be read several times."""

    read: Callable[[], Iterator[PackedBin]]
    pack_size: int
    rule: str | None  # how the pack size was found, if nothing said it
    alignment: str
    num_bins: int
    num_sequences: int
    largest_id: int


def _packed(source: Path, target: Path, to_format: str, bins: _Bins) -> Parity:
    writer = _writer(target, to_format, bins)
    parity: list[Parity] = []

    def compare(staged: Path) -> None:
        written = _read_bins(staged, to_format)
        parity.append(check_bins(bins.read(), written, f"{source} and {target}"))

    try:
        for number, found in enumerate(bins.read()):
            writer.write_bin(number, found.input_ids, found.loss_mask, found.seq_starts)
        writer.finalize(check=compare)
    finally:
        writer.abort()
    return parity[0]


def _read_bins(path: Path, name: str) -> Iterator[PackedBin]:
    """What was just written, under whatever name it has."""
    if name == "legacy":
        from shardmill.formats.packed.legacy import iter_legacy_bins

        return iter_legacy_bins(path)
    return shard_bins(_open_shard(path, name, ConvertOptions()))


def _open_bins(path: Path, name: str, said: ConvertOptions) -> _Bins:
    if name == "legacy":
        from shardmill.formats.packed import legacy_convert as legacy
        from shardmill.formats.packed.legacy import iter_legacy_bins

        sizes = legacy.measure_legacy(path)
        pack_size, rule = legacy.legacy_pack_size(path, said.pack_size, sizes)
        return _Bins(
            read=lambda: iter_legacy_bins(path),
            pack_size=pack_size,
            rule=rule,
            alignment=legacy.legacy_alignment(path, said.loss_mask_alignment),
            num_bins=sizes.num_bins,
            num_sequences=sizes.num_sequences,
            largest_id=sizes.largest_id,
        )
    shard = _open_shard(path, name, said)
    read = shard.bins if name == "plan" else lambda: shard_bins(shard)
    num_sequences = largest = 0
    for found in read():
        num_sequences += len(found.seq_starts)
        largest = max(largest, int(found.input_ids.max()))
    return _Bins(
        read=read,
        pack_size=shard.pack_size,
        rule=None,
        alignment=shard.loss_mask_alignment,
        num_bins=len(shard),
        num_sequences=num_sequences,
        largest_id=largest,
    )


def _open_shard(path: Path, name: str, said: ConvertOptions) -> Any:
    if name == "memmap":
        from shardmill.formats.packed.memmap import open_memmap_shard

        return open_memmap_shard(path, loss_mask_alignment=said.loss_mask_alignment)
    if name == "plan":
        from shardmill.formats.packed.open import PlanShard

        return PlanShard(path, loss_mask_alignment=said.loss_mask_alignment)
    from shardmill.formats.packed.parquet import ParquetShard

    return ParquetShard(
        path, pack_size=said.pack_size, loss_mask_alignment=said.loss_mask_alignment
    )


def _writer(target: Path, name: str, bins: _Bins) -> Any:
    if name == "memmap":
        from shardmill.formats.packed.memmap_writer import MemmapShardWriter

        return MemmapShardWriter(
            target,
            bins.num_bins,
            bins.pack_size,
            bins.num_sequences,
            np.int32 if bins.largest_id < 2**31 else np.uint32,
            loss_mask_alignment=bins.alignment,
            pack_size_rule=bins.rule,
        )
    if name == "parquet":
        from shardmill.formats.packed.parquet import ParquetShardWriter

        return ParquetShardWriter(target, bins.pack_size, loss_mask_alignment=bins.alignment)
    from shardmill.formats.packed.legacy import LegacyPickleWriter

    return LegacyPickleWriter(target, pack_size=bins.pack_size, loss_mask_alignment=bins.alignment)
