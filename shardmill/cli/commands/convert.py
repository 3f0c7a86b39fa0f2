"""`shardmill convert`: other people's formats to ours and back, compared token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardmill.cli.commands.tokenizer import parse_specials
from shardmill.cli.terminal import check_local, complete_split
from shardmill.errors import OptionError
from shardmill.formats.convert import ConvertOptions
from shardmill.formats.convert import convert as convert_format
from shardmill.formats.token_files import Separator, TokenizerFacts
from shardmill.tokenizers import model_sha256_of, open_tokenizer

_TOKENS = Literal["store", "megatron", "llmc", "datatrove", "dolma"]
_PACKED = Literal["legacy", "memmap", "parquet"]


def convert(
    source: Annotated[Path, typer.Argument(help="A file, a folder, or the prefix of .bin/.idx.")],
    target: Annotated[Path, typer.Argument(help="Where the result goes; nothing may be there.")],
    from_format: Annotated[
        Literal[_TOKENS, _PACKED, "plan"],
        typer.Option("--from", help="What SOURCE is."),
    ],
    to_format: Annotated[
        Literal["store", "megatron", _PACKED],
        typer.Option("--to", help="What TARGET shall be."),
    ],
    split: Annotated[
        str, typer.Option(help="Of the store.", autocompletion=complete_split)
    ] = "train",
    dtype: Annotated[
        Literal["uint16", "uint32"] | None, typer.Option(help="Of bare tokens, if nothing says it.")
    ] = None,
    eot: Annotated[
        int | None, typer.Option(help="The id between documents, for files without an index.")
    ] = None,
    eot_first: Annotated[
        bool,
        typer.Option("--eot-first", help="That id opens a document (llm.c), and closes none."),
    ] = False,
    ignore_loss: Annotated[
        bool,
        typer.Option("--ignore-loss", help="Train on tokens that a .loss file leaves out."),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="What made the tokens, recorded in the store: as for `build`."),
    ] = None,
    special: Annotated[
        list[str] | None, typer.Option(help="NAME=STRING, once per special token of --tokenizer.")
    ] = None,
    pack_size: Annotated[
        int | None, typer.Option(help="The most tokens a bin holds, if nothing says it.")
    ] = None,
    loss_mask_alignment: Annotated[
        Literal["label", "roll_right"] | None,
        typer.Option(help="What masks mean, if nothing says it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")] = False,
) -> None:
    """Convert between formats; afterwards both sides are read and compared.

    Prints one line: documents or bins, and tokens. Tokens: megatron, llmc, datatrove, dolma to
    store; store to megatron. Packed shards: legacy, memmap and parquet to one another, and the
    plan of a chat store to any of them.

    Example: shardmill convert store megatron --from store --to megatron

    Example: shardmill convert old.npy new --from legacy --to memmap --pack-size 4096

    Exit 0: converted and equal. Exit 2: a mistake in the call or its input, or not equal: then
    nothing is left there.
    """
    for name, place in (("SOURCE", source), ("TARGET", target)):
        check_local(place, name, instead=" (`shardmill pull` and `push` copy)")
    if eot_first and eot is None:
        raise OptionError("--eot-first: of which id? Give --eot too")
    if tokenizer is not None and to_format != "store":
        raise OptionError(f"--tokenizer {tokenizer}: only a store records one (--to store)")
    options = ConvertOptions(
        tokenizer=None if tokenizer is None else _tokenizer_facts(tokenizer, special),
        split=split,
        dtype=dtype,
        separator=None if eot is None else Separator(token=eot, first=eot_first),
        ignore_loss=ignore_loss,
        pack_size=pack_size,
        loss_mask_alignment=loss_mask_alignment,
    )
    receipt = convert_format(
        source, target, from_format=from_format, to_format=to_format, options=options
    )
    if as_json:
        print(json.dumps(receipt))
        return
    unit = "bins" if "bins" in receipt else "documents"
    print(
        f"{target}: {receipt[unit]:,} {unit}, {receipt['tokens']:,} tokens, compared with {source} "
        "token for token: equal"
    )


def _tokenizer_facts(name: str, special: list[str] | None) -> TokenizerFacts:
    opened = open_tokenizer(name, specials=parse_specials(special) if special else None)
    return TokenizerFacts(
        name=name,
        fingerprint=opened.fingerprint,
        sha256=model_sha256_of(opened),
        vocab_size=opened.vocab_size,
        special_token_ids=opened.special_token_ids(),
    )
