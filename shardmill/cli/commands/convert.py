"""`shardmill convert`: other people's formats to ours and back, compared token for token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shardmill.arguments import check_local
from shardmill.cli.options import AsJson, SplitOfStore, parse_special
from shardmill.cli.printing import Answer
from shardmill.errors import OptionError
from shardmill.formats.convert import ConvertOptions
from shardmill.formats.convert import convert as convert_format
from shardmill.formats.token_files import Separator, TokenizerFacts
from shardmill.tokenizers import model_sha256_of, open_tokenizer

_TOKENS = Literal["store", "megatron", "llmc", "datatrove", "dolma"]
_PACKED = Literal["legacy", "memmap", "parquet"]


@dataclass(frozen=True, kw_only=True)
class ConvertCommand:
    """Prints one line: documents or bins, and tokens. Tokens: megatron, llmc, datatrove, dolma to
    store; store to megatron. Packed shards: legacy, memmap and parquet to one another, and the
    plan of a chat store to any of them.

    Example: shardmill convert store megatron --from store --to megatron

    Example: shardmill convert old.npy new --from legacy --to memmap --pack-size 4096

    Exit 0: converted and equal. Exit 2: a mistake in the call or its input, or not equal: then
    nothing is left there.
    """

    source: Annotated[Path, "SOURCE", "A file, a folder, or the prefix of .bin/.idx."]
    target: Annotated[Path, "TARGET", "Where the result goes; nothing may be there."]
    from_format: Annotated[Literal[_TOKENS, _PACKED, "plan"], "--from", "What SOURCE is."]
    to_format: Annotated[Literal["store", "megatron", _PACKED], "--to", "What TARGET becomes."]
    split: SplitOfStore = "train"
    dtype: Annotated[
        Literal["uint16", "uint32"] | None, "Of bare tokens whose files do not record it."
    ] = None
    eot: Annotated[int | None, "The id between documents, for files without an index."] = None
    eot_first: Annotated[bool, "That id opens a document (llm.c), and closes none."] = False
    ignore_loss: Annotated[bool, "Train on tokens that a .loss file leaves out."] = False
    tokenizer: Annotated[
        str | None, "What made the tokens, recorded in the store: as for `build`."
    ] = None
    special: Annotated[list[str] | None, "NAME=STRING, once per special token of --tokenizer."] = (
        None
    )
    pack_size: Annotated[int | None, "The most tokens of a bin, if the files do not record it."] = (
        None
    )
    loss_mask_alignment: Annotated[
        Literal["label", "roll_right"] | None, "What masks mean, if the files do not record it."
    ] = None
    as_json: AsJson = False

    def run(self) -> Answer:
        for name, path in (("source", self.source), ("target", self.target)):
            check_local(path, name, instead=" (`shardmill pull` and `push` copy)")
        if self.eot_first and self.eot is None:
            raise OptionError("--eot-first: of which id? Give --eot too")
        if self.tokenizer is not None and self.to_format != "store":
            raise OptionError(
                f"--tokenizer {self.tokenizer}: only a store records one (--to store)"
            )
        shared = ("split", "dtype", "ignore_loss", "pack_size", "loss_mask_alignment")
        options = ConvertOptions(
            **{name: getattr(self, name) for name in shared},
            tokenizer=None if self.tokenizer is None else _facts(self.tokenizer, self.special),
            separator=None if self.eot is None else Separator(token=self.eot, first=self.eot_first),
        )
        receipt = convert_format(
            self.source,
            self.target,
            from_format=self.from_format,
            to_format=self.to_format,
            options=options,
        )
        unit = "bins" if "bins" in receipt else "documents"
        text = (
            f"{self.target}: {receipt[unit]:,} {unit}, {receipt['tokens']:,} tokens, compared with "
            f"{self.source} token for token: equal"
        )
        return Answer(receipt, [text])


def _facts(name: str, special: list[str] | None) -> TokenizerFacts:
    opened = open_tokenizer(name, specials=parse_special(special))
    return TokenizerFacts(
        name=name,
        fingerprint=opened.fingerprint,
        sha256=model_sha256_of(opened),
        vocab_size=opened.vocab_size,
        special_token_ids=opened.special_token_ids(),
    )
