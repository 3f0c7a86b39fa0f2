"""`shardmill tokenizer`: train one, or look at one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from shardmill.arguments import check_local, is_url
from shardmill.cli.app import CommandGroup, with_parameters
from shardmill.cli.options import (
    AsJson,
    Ext,
    Field,
    Kind,
    RoleMap,
    parse_bytes,
    parse_role_map,
    parse_special,
)
from shardmill.cli.printing import Answer
from shardmill.errors import SourceError
from shardmill.sources import (
    SHAPES,
    ChatSource,
    ConcatSource,
    TextSource,
    open_texts,
    texts_of,
)
from shardmill.tokenizers import DEFAULT_SPECIALS, TrainSpec, open_tokenizer, train_tokenizer
from shardmill.tokenizers.train import NOT_TEXT, TEXT_SUFFIXES, find_files

app = typer.Typer(cls=CommandGroup, help="Train a tokenizer, or look at one.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerCommand:
    """Train a tokenizer on documents, or on what the messages of conversations say.

    Prints one line: the model's file, its ids, its special tokens, and how much text it saw. Rows
    that have a known shape of conversations and no field `text` are conversations; --field and
    --shape decide otherwise.

    Example: shardmill tokenizer train 'books/*.txt' --out tokenizer --vocab-size 400

    Exit 0: trained. Exit 2: a mistake in the call or its input, or a size that the text cannot
    fill.
    """

    inputs: Annotated[
        list[str],
        "INPUTS",
        "Whatever `build` and `build chats` take: files, folders, globs, URLs, hub:owner/name.",
    ]
    out: Annotated[Path, "Folder for the model and its meta.json."]
    vocab_size: Annotated[int, "Number of ids, with special tokens and bytes."] = 16_000
    model_type: Annotated[
        Literal["unigram", "bpe", "byte-bpe"],
        "SentencePiece unigram or bpe, or byte-level BPE (tokenizer.json).",
    ] = "unigram"
    special: Annotated[
        list[str] | None, "NAME=STRING, once per special token. Default: sys, usr, asst, eot."
    ] = None
    kind: Kind = None
    ext: Ext = None
    field: Field = None
    shape: Annotated[
        str | None, f"The inputs are conversations of this shape: {', '.join(SHAPES)}."
    ] = None
    messages_field: Annotated[str | None, "Field that holds the turns, as for build chats."] = None
    role_field: Annotated[str | None, "Their key that says who speaks."] = None
    content_field: Annotated[str | None, "Their key that says what."] = None
    role_map: RoleMap = None
    on_bad: Annotated[
        Literal["error", "skip"] | None,
        "Rows that cannot be read: stop at the first, or skip and count them.",
    ] = None
    seed: Annotated[int, "Draws the text when it is over --max-bytes."] = 42
    max_bytes: Annotated[str, "Text to train on, e.g. 256MiB; 0 for all of it."] = "256MiB"
    overwrite: Annotated[bool, "Replace a model in this folder."] = False
    as_json: Annotated[bool, "--json", "Print meta.json."] = False

    def run(self) -> Answer:
        out = self.out
        check_local(out, "out")
        size = self.max_bytes
        spec = TrainSpec(
            vocab_size=self.vocab_size,
            model_type=self.model_type,
            specials=parse_special(self.special) or dict(DEFAULT_SPECIALS),
            seed=self.seed,
            max_bytes=None if size == "0" else parse_bytes(size, "max_bytes"),
        )
        done = train_tokenizer(out, **self._text(), spec=spec, overwrite=self.overwrite)
        meta: dict[str, Any] = done.meta
        text = (
            f"{done.model}: {meta['model_type']}, {meta['vocab_size']:,} ids, "
            f"{_ids(meta['special_token_ids'])}, trained on {meta['bytes_used']:,} of "
            f"{meta['bytes_read']:,} bytes"
        )
        return Answer(msgspec.to_builtins(meta, order="sorted"), [text])

    def _text(self) -> dict[str, Any]:
        """What to train on, for `train_tokenizer`: local text files line by line, of any size, and
        everything else through its source."""
        names = (
            *("kind", "ext", "field", "shape", "on_bad"),
            *("messages_field", "role_field", "content_field"),
        )
        options = {name: getattr(self, name) for name in names} | {
            "role_map": parse_role_map(self.role_map)
        }
        options = {name: value for name, value in options.items() if value is not None}
        try:
            source = open_texts(self.inputs, **options)
        except SourceError:
            if options or not all(map(_may_be_text, self.inputs)):
                raise
            found = find_files(self.inputs)
            print(f"shardmill: {', '.join(self.inputs)}: read as plain text", file=sys.stderr)
            return {"files": found}
        parts = source.parts if isinstance(source, ConcatSource) else [source]
        files = [
            file.place for part in parts if isinstance(part, TextSource) for file in part.files
        ]
        is_text = all(isinstance(part, TextSource) for part in parts)
        if is_text and all(isinstance(f, Path) and f.suffix in TEXT_SUFFIXES for f in files):
            return {"files": files}
        if isinstance(source, ChatSource):
            print(
                f"shardmill: {source.name}: conversations; trained on the texts of their messages",
                file=sys.stderr,
            )
        return {"texts": texts_of(source), "texts_name": source.name}


@dataclass(frozen=True, kw_only=True)
class TokenizerInfoCommand:
    """Show what a tokenizer is: size, special tokens, fingerprint, fast engines.

    Prints one fact per line.

    Example: shardmill tokenizer info spm.model

    Exit 0: shown. Exit 2: no tokenizer there, or one that cannot be trusted.
    """

    tokenizer: Annotated[
        str, "TOKENIZER", "'byte', a .model file, a tokenizer.json, a folder or a hub id."
    ]
    as_json: AsJson = False

    def run(self) -> Answer:
        from shardmill.tokenizers.engines import fast_candidates

        opened = open_tokenizer(self.tokenizer)
        candidates = fast_candidates(opened)
        facts = {
            "tokenizer": repr(opened),
            "vocab_size": opened.vocab_size,
            "dtype": "uint16" if opened.vocab_size <= 2**16 else "uint32",
            "fingerprint": opened.fingerprint,
            "special_token_ids": opened.special_token_ids(),
            "fast_engines": [f"{engine.name} {engine.version}" for engine in candidates.engines],
            "not_fast": list(candidates.refusals),
        }
        return Answer(msgspec.to_builtins(facts, order="sorted"), _lines(facts))


def _may_be_text(item: str) -> bool:
    """Whether this is a text file of another name, such as wiki.train.raw, or a glob of some."""
    is_elsewhere = is_url(item) or item.startswith("hub:")
    return not (is_elsewhere or Path(item).is_dir() or item.endswith(NOT_TEXT))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            value = _ids(value) or "none"
        elif isinstance(value, list):
            value = "; ".join(value) or "none"
        yield f"{name:18} {value}"


app.command("train")(with_parameters(TrainTokenizerCommand))
app.command("info")(with_parameters(TokenizerInfoCommand))


def _ids(ids: dict[str, int]) -> str:
    return " ".join(f"{name}={number}" for name, number in ids.items())
