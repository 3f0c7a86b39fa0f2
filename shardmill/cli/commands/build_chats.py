"""`shardmill build chats`: conversations to a store with loss mask and turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardmill.building import BuildReport, BuildSpec, build_chats
from shardmill.chat import (
    KNOWN_TEMPLATES,
    ChatTemplate,
    TrainPolicy,
    bind_template,
    known_template,
    load_template_spec,
)
from shardmill.cli.build_output import (
    build_progress,
    check_place,
    cost_words,
    open_output,
    repaired_words,
    run_facts,
    told_how_to_resume,
)
from shardmill.cli.commands.tokenizer import parse_specials
from shardmill.cli.terminal import parse_bytes
from shardmill.errors import OptionError, TemplateError
from shardmill.protocols import Encoder, Tokenizer
from shardmill.sources import SHAPES, open_chats
from shardmill.tokenizers import open_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A template over its tokenizer, and how to put it over a faster encoder."""

    tokenizer: Tokenizer
    template: ChatTemplate
    bind: Callable[[Encoder], ChatTemplate] | None


def chats(
    inputs: Annotated[
        list[str],
        typer.Argument(help="Folders, files or globs of .jsonl .json .parquet, or hub:owner/name."),
    ],
    out: Annotated[str, typer.Option(help="Where the store goes: a folder, or s3://bucket/path.")],
    tokenizer: Annotated[
        str, typer.Option(help="'byte:4', a .model file, a tokenizer.json, a folder or a hub id.")
    ],
    template: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(KNOWN_TEMPLATES)}; a .json or .toml file of the same kind; 'jinja' "
            "for the tokenizer's own template, or a .jinja file."
        ),
    ],
    shape: Annotated[
        str | None,
        typer.Option(help=f"Shape of the records: {', '.join(SHAPES)}. Default: found."),
    ] = None,
    train_on: Annotated[
        Literal["assistant", "last-assistant", "all"], typer.Option(help="Which turns are trained.")
    ] = "assistant",
    train_on_eot: Annotated[
        bool, typer.Option(help="A trained turn trains its end token too.")
    ] = True,
    val_fraction: Annotated[
        float, typer.Option(help="About this share of conversations goes to 'val'.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides which conversations go to 'val'.")] = 0,
    on_bad: Annotated[
        Literal["error", "skip"], typer.Option(help="Records that cannot be read: stop, or list.")
    ] = "error",
    name: Annotated[str | None, typer.Option(help="Name of the data, recorded.")] = None,
    special: Annotated[
        list[str] | None,
        typer.Option(help="NAME=STRING, once per special token the tokenizer does not name."),
    ] = None,
    shard_bytes: Annotated[str, typer.Option(help="Size of a shard, e.g. 128MiB.")] = "128MiB",
    engine: Annotated[
        Literal["reference", "fast", "auto"], typer.Option(help="Which tokenizer engine encodes.")
    ] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an unfinished build.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a store, or start again.")
    ] = False,
    scratch: Annotated[
        Path | None,
        typer.Option(help="Where a store for a URL is built before it is sent. Default: cache."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write time, machine and counts to this JSON file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")] = False,
) -> None:
    """Render conversations into a store, each whole, with loss mask and turns.

    Prints one line: conversations, turns, tokens, how many are trained, what was left out and why.
    The template's mask is proved first; a template that fails is refused. To tokenise the texts of
    a folder called chats, write ./chats.

    Example: shardmill build chats c.jsonl --out c --tokenizer spm.model --template chatml

    Exit 0: built. Exit 2: a mistake in the call or its input; what is done is kept. Exit 130:
    stopped with Ctrl-C; go on with --resume.
    """
    place = open_output(out, scratch)
    check_place(place.folder, report, goes_on=resume or overwrite)
    source = open_chats(inputs, shape=shape, name=name, on_bad=on_bad)
    opened = open_template(template, tokenizer, special)
    with (
        place.opened(resume=resume, overwrite=overwrite) as folder,
        build_progress() as on_progress,
        told_how_to_resume(folder),
    ):
        done = build_chats(
            source,
            folder,
            template=opened.template,
            tokenizer=opened.tokenizer,
            bind=opened.bind,
            spec=BuildSpec(
                dataset_name=name or source.name, seed=seed, shard_bytes=parse_bytes(shard_bytes)
            ),
            policy=TrainPolicy(train_on=train_on, train_on_eot=train_on_eot),
            val_fraction=val_fraction,
            engine=engine,
            resume=resume,
            overwrite=place.replaces(resume=resume, overwrite=overwrite),
            on_progress=on_progress,
        )
    facts = {**_facts(done), **place.facts}
    if report is not None:
        report.write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts) if as_json else receipt(place.shown, done))


def open_template(template: str, tokenizer: str, special: list[str] | None) -> Opened:
    """A template by name, from a file, or the tokenizer's own."""
    opened = open_tokenizer(tokenizer, specials=parse_specials(special) if special else None)
    path = Path(template)
    if template == "jinja" or path.suffix in (".jinja", ".jinja2"):
        return Opened(tokenizer=opened, template=_jinja(template, tokenizer), bind=None)
    spec = (
        load_template_spec(path) if path.suffix in (".json", ".toml") else known_template(template)
    )
    return Opened(
        tokenizer=opened,
        template=bind_template(spec, opened),
        bind=lambda encoder: bind_template(spec, opened, encoder),
    )


def _jinja(template: str, tokenizer: str) -> ChatTemplate:
    source = None
    if template != "jinja":
        try:
            source = Path(template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--template {template}: cannot be read: {error}") from error
    if tokenizer.partition(":")[0] == "byte":
        raise OptionError(
            f"--tokenizer {tokenizer}: has no Jinja template and takes none; wanted a folder or "
            "hub id that transformers opens, or a --template made of tokens"
        )
    from shardmill.chat.jinja import open_jinja_template
    from shardmill.tokenizers.huggingface import load_transformers

    place = Path(tokenizer)
    folder = str(place.parent) if place.name == "tokenizer.json" and place.is_file() else tokenizer
    loaded = load_transformers(folder)
    try:
        return open_jinja_template(loaded, chat_template=source)
    except TemplateError as error:
        raise TemplateError(f"--template {template}: {error}") from error


def receipt(out: str, done: BuildReport) -> str:
    """One line that says what was built and what was left out."""
    ledger = done.manifest.ledger
    assert ledger.chat is not None
    dropped = ", ".join(f"{count:,} {why}" for why, count in ledger.documents.dropped.items())
    return (
        f"{out}: {ledger.documents.kept:,} conversations, {ledger.chat.turns:,} turns, "
        f"{ledger.tokens.kept:,} tokens, {ledger.chat.trained_tokens:,} trained; "
        f"left out: {dropped or 'none'}{repaired_words(ledger)}; mask proved; "
        f"{done.seconds:.1f} s{cost_words(done)}"
    )


def _facts(done: BuildReport) -> dict[str, Any]:
    ledger = done.manifest.ledger
    assert ledger.chat is not None
    return {
        **run_facts(done),
        "conversations_read": ledger.documents.read,
        "conversations_kept": ledger.documents.kept,
        "dropped": ledger.documents.dropped,
        "turns": ledger.chat.turns,
        "tokens_kept": ledger.tokens.kept,
        "trained_tokens": ledger.chat.trained_tokens,
        "splits": {name: split.documents for name, split in done.manifest.splits.items()},
        "produced_by": done.manifest.produced_by,
    }
