"""Convert one format into another, with a receipt.

Every conversion ends with a token-for-token comparison of what was written with what was read; a
packed shard gets its name only after it. Nothing at the target is overwritten, and a pair of
formats that would lose a loss mask is not offered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardmill.arguments import refuse_url
from shardmill.errors import OptionError, StoreNotFoundError
from shardmill.formats.megatron import open_megatron, write_megatron
from shardmill.formats.packed.formats import convert_packed
from shardmill.formats.stores import StoreOptions, StoreSplit, check_documents, store_from_files
from shardmill.formats.token_files import (
    ForeignFile,
    Separator,
    TokenizerFacts,
    open_datatrove,
    open_dolma,
    open_llmc,
)
from shardmill.records import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What the files do not state; None or False: not given either."""

    split: str = "train"  # of a store
    dtype: str | None = None  # of bare tokens: "uint16" or "uint32"
    separator: Separator | None = None  # between documents, for files without an index
    tokenizer: TokenizerFacts | None = None  # of tokens that become a store
    ignore_loss: bool = False  # train on tokens that a .loss file leaves out
    pack_size: int | None = None
    loss_mask_alignment: str | None = None


Open = Callable[[Path, ConvertOptions], ForeignFile]

TOKENS: dict[str, tuple[str, Open]] = {
    "megatron": ("*.idx", lambda path, _: open_megatron(path)),
    "llmc": ("*.bin", lambda path, given: open_llmc(path, separator=given.separator)),
    "datatrove": (
        "*.ds",
        lambda path, given: open_datatrove(path, dtype=given.dtype, ignore_loss=given.ignore_loss),
    ),
    "dolma": (
        "*.npy",
        lambda path, given: open_dolma(path, dtype=given.dtype, separator=given.separator),
    ),
}
"""Formats of tokens: the pattern of their files in a folder, and how to open one of them."""

PACKED = ("legacy", "memmap", "parquet")
PAIRS = (
    *((name, "store") for name in TOKENS),
    ("store", "megatron"),
    *((one, other) for one in (*PACKED, "plan") for other in PACKED if one != other),
)
"""What can be turned into what."""


def convert(
    source: str | Path,
    target: str | Path,
    *,
    from_format: str,
    to_format: str,
    options: ConvertOptions | None = None,
) -> dict[str, JSON]:
    """Write `target` and return the receipt: formats, counts, and the result of the comparison.

    The receipt has "pack_size_rule" if nothing states the pack size of a legacy file, and the
    length of its longest bin is taken.
    """
    for name, path in (("source", source), ("target", target)):
        refuse_url(path, name, instead="copy with shardmill.remote.pull or push")
    if (from_format, to_format) not in PAIRS:
        offered = ", ".join(f"{one} to {other}" for one, other in PAIRS)
        raise OptionError(f"{from_format!r} to {to_format!r}: not offered; there is {offered}")
    given = options or ConvertOptions()
    here, there = Path(source), Path(target)
    found: dict[str, JSON] = {}
    if to_format == "store":
        wanted = StoreOptions(split=given.split, name=here.name, tokenizer=given.tokenizer)
        parity = store_from_files(_open_tokens(here, from_format, given), there, wanted)
    elif from_format == "store":
        split = StoreSplit(here, given.split)
        write_megatron(split, there)
        written = open_megatron(there).batches()
        parity = check_documents(split.batches(), written, f"{here} and {there}")
    else:
        pack_size, alignment = given.pack_size, given.loss_mask_alignment
        report, parity = convert_packed(here, there, from_format, to_format, pack_size, alignment)
        found = {name: report[name] for name in ("pack_size_rule",) if name in report}
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


def _open_tokens(path: Path, name: str, options: ConvertOptions) -> list[ForeignFile]:
    """The token files at `path`: one file, or all of a folder that look like the format."""
    pattern, open_one = TOKENS[name]
    paths = [path]
    if path.is_dir():
        paths = sorted(path.glob(pattern))
        if not paths:
            raise StoreNotFoundError(
                f"{path}: no {pattern} in this folder; check {{from_format}}", from_format=...
            )
    return [open_one(one, options) for one in paths]
