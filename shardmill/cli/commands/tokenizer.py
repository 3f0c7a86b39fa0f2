"""`shardmill tokenizer`: train one, or look at one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from shardmill.arguments import check_local
from shardmill.cli.app import CommandGroup, with_parameters
from shardmill.cli.options import AsJson, parse_bytes, parse_special
from shardmill.cli.printing import Answer
from shardmill.tokenizers import DEFAULT_SPECIALS, TrainSpec, open_tokenizer, train_tokenizer

app = typer.Typer(cls=CommandGroup, help="Train a tokenizer, or look at one.", no_args_is_help=True)
_STRUCTURED = (
    *(".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".tar", ".tgz", ".zip"),
    *(".gz", ".zst"),
)


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerCommand:
    """Train a tokenizer.

    Prints one line: the model's file, its ids, its special tokens, and how much text it saw.

    Example: shardmill tokenizer train 'books/*.txt' --out tokenizer --vocab-size 400

    Exit 0: trained. Exit 2: a mistake in the call or its input, or a size that the text cannot
    fill.
    """

    inputs: Annotated[
        list[str],
        "INPUTS",
        "Text files, globs, folders; .jsonl, .csv, .parquet, or hub:owner/name.",
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
    seed: Annotated[int, "Draws the text when it is over --max-bytes."] = 42
    max_bytes: Annotated[str, "Text to train on, e.g. 256MiB; 0 for all of it."] = "256MiB"
    overwrite: Annotated[bool, "Replace a model in this folder."] = False
    as_json: Annotated[bool, "--json", "Print meta.json."] = False

    def run(self) -> Answer:
        inputs, out = self.inputs, self.out
        check_local(out, "out")
        size = self.max_bytes
        spec = TrainSpec(
            vocab_size=self.vocab_size,
            model_type=self.model_type,
            specials=parse_special(self.special) or dict(DEFAULT_SPECIALS),
            seed=self.seed,
            max_bytes=None if size == "0" else parse_bytes(size, "max_bytes"),
        )
        if any(item.startswith("hub:") or item.endswith(_STRUCTURED) for item in inputs):
            from shardmill.sources import open_source

            source = open_source(inputs)
            texts = (text for batch in source.batches() for text in batch.texts.to_pylist())
            done = train_tokenizer(
                out, texts=texts, texts_name=source.name, spec=spec, overwrite=self.overwrite
            )
        else:
            done = train_tokenizer(out, files=inputs, spec=spec, overwrite=self.overwrite)
        meta: dict[str, Any] = done.meta
        text = (
            f"{done.model}: {meta['model_type']}, {meta['vocab_size']:,} ids, "
            f"{_ids(meta['special_token_ids'])}, trained on {meta['bytes_used']:,} of "
            f"{meta['bytes_read']:,} bytes"
        )
        return Answer(msgspec.to_builtins(meta, order="sorted"), [text])


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
