"""`shardmill push`, `pull` and `convert`: a finished folder to another place, or another format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shardmill.arguments import check_local
from shardmill.cli.options import AsJson, SplitOfStore, parse_special
from shardmill.cli.printing import Answer
from shardmill.cli.terminal import one_bar
from shardmill.errors import OptionError
from shardmill.formats.convert import ConvertOptions
from shardmill.formats.convert import convert as convert_format
from shardmill.formats.token_files import Separator, TokenizerFacts
from shardmill.remote import TransferReceipt
from shardmill.remote import pull as pull_folder
from shardmill.remote import push as push_folder
from shardmill.tokenizers import model_sha256_of, open_tokenizer

_TOKENS = Literal["store", "megatron", "llmc", "datatrove", "dolma"]
_PACKED = Literal["legacy", "memmap", "parquet"]


@dataclass(frozen=True, kw_only=True)
class PushCommand:
    """Prints one line: files and bytes that were sent, and those that were already there.
    Interrupted, run it again: what arrived is not sent again. Credentials and endpoint come from
    the environment (AWS_PROFILE, AWS_ENDPOINT_URL, ...).

    Example: shardmill push store s3://bucket/store

    Exit 0: all of it is there, checked. Exit 2: a mistake in the call, or a place that cannot be
    written. Exit 130: stopped with Ctrl-C.
    """

    folder: Annotated[Path, "FOLDER", "A finished store or packed folder."]
    url: Annotated[str, "URL", "Where to, for instance s3://bucket/path."]
    workers: Annotated[int, "Files sent at a time."] = 8
    replace: Annotated[bool, "Replace another folder that is there."] = False
    as_json: AsJson = False

    def run(self) -> Answer:
        with one_bar("push") as progress:
            done = push_folder(
                self.folder,
                self.url,
                workers=self.workers,
                progress=progress,
                replace=self.replace,
            )
        return _answer(done, done.url, "sent")


@dataclass(frozen=True, kw_only=True)
class PullCommand:
    """Prints one line: files and bytes that were fetched, and those that were already there.
    Interrupted, run it again: what arrived is not fetched again.

    Example: shardmill pull s3://bucket/pushed pulled

    Exit 0: all of it is here, checked. Exit 2: a mistake in the call, or nothing whole is there.
    Exit 130: stopped with Ctrl-C.
    """

    url: Annotated[str, "URL", "A pushed folder, for instance s3://bucket/path."]
    folder: Annotated[Path, "FOLDER", "Where to: a new or empty folder."]
    workers: Annotated[int, "Files fetched at a time."] = 8
    as_json: AsJson = False

    def run(self) -> Answer:
        check_local(self.folder, "folder")
        with one_bar("pull") as progress:
            done = pull_folder(self.url, self.folder, workers=self.workers, progress=progress)
        return _answer(done, str(done.folder), "fetched")


def _answer(done: TransferReceipt, where: str, verb: str) -> Answer:
    text = (
        f"{where}: {done.kind} of {done.files:,} files, {done.bytes:,} bytes; "
        f"{done.moved_files:,} {verb} ({done.moved_bytes:,} bytes), "
        f"{done.kept_files:,} there before; all checked"
    )
    return Answer(done.to_json(), [text], indent=2)


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
            tokenizer=None if self.tokenizer is None else _tokenizer(self.tokenizer, self.special),
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


def _tokenizer(name: str, special: list[str] | None) -> TokenizerFacts:
    opened = open_tokenizer(name, specials=parse_special(special))
    return TokenizerFacts(
        name=name,
        fingerprint=opened.fingerprint,
        sha256=model_sha256_of(opened),
        vocab_size=opened.vocab_size,
        special_token_ids=opened.special_token_ids(),
    )
