"""`shardmill build`: text files or a hub dataset to a token store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer

from shardmill.building import BuildPlan, BuildSpec, plan_store
from shardmill.building.api import open_feed, output_folder
from shardmill.cli.build_output import BuildOptions, run_build
from shardmill.cli.options import Field, parse_bytes
from shardmill.errors import OptionError
from shardmill.tokenizers import open_tokenizer


@dataclass(frozen=True, kw_only=True)
class DocumentOptions(BuildOptions):
    """What `shardmill build` takes."""

    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Folders, files or globs of .txt .md .jsonl .parquet, here or at a URL (s3://, "
            "gs://, hf://); or a dataset, hub:owner/name."
        ),
    ]
    field: Field = None
    val_tokens: Annotated[int, typer.Option(help="The first so many tokens go to 'val'.")] = 0
    max_tokens: Annotated[
        int | None, typer.Option(help="Stop when 'train' has so many tokens.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Read files in an order drawn from it. Default: by name.")
    ] = None
    dtype: Annotated[
        Literal["uint16", "uint32"] | None, typer.Option(help="Default: by vocabulary.")
    ] = None
    append_eot: Annotated[bool, typer.Option(help="Put the end token after each document.")] = True
    eot: Annotated[
        str | None, typer.Option(help="The end token, when the tokenizer does not name it.")
    ] = None
    engine_check: Annotated[
        Literal["sample", "full"], typer.Option(help="How much a fast engine is compared.")
    ] = "sample"
    run_on: Annotated[Literal["local", "ray"], typer.Option(help="Where the work is done.")] = (
        "local"
    )
    ray_address: Annotated[
        str | None,
        typer.Option(help="The Ray to build on: auto, or host:port. Default: one started here."),
    ] = None
    workers: Annotated[
        int | None, typer.Option(help="Processes. Default: one for each core; 1: no other.")
    ] = None
    unit_bytes: Annotated[
        str | None, typer.Option(help="Input that a worker gets at a time. Default: 64MiB.")
    ] = None
    memory: Annotated[
        str | None, typer.Option(help="What all processes together may use, e.g. 4GiB.")
    ] = None
    append: Annotated[
        bool, typer.Option("--append", help="Keep the store, and add the files that are new.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and what it takes; build nothing.")
    ] = False


def build(options: DocumentOptions) -> None:
    """Tokenise text into a store.

    Prints one line: documents, tokens and shards of the store, what was left out and why, time and
    memory. Conversations have their own command, `shardmill build chats`; a folder that is called
    chats is written ./chats here.

    Example: shardmill build 'data/*.jsonl' --out store --tokenizer spm.model

    Example: shardmill build books --out s3://bucket/books --tokenizer spm.model --json

    Exit 0: built, or planned. Exit 2: a mistake in the call or its input; what is done is kept.
    Exit 130: stopped with Ctrl-C; continue with --resume.
    """
    sizes = {
        name: None if text is None else parse_bytes(text, name)
        for name, text in (("unit_bytes", options.unit_bytes), ("memory", options.memory))
    }
    if options.dry_run:
        _print_plan(_plan(options, sizes), as_json=options.as_json)
        return
    run_build(options, **sizes)


def _plan(options: DocumentOptions, sizes: dict[str, int | None]) -> BuildPlan:
    if options.append:
        raise OptionError("--dry-run prints the plan of a whole build: leave out --append")
    folder, _ = output_folder(options.out, options.scratch)
    feed = open_feed(
        options.inputs,
        field=options.field,
        on_bad=options.on_bad,
        seed=options.seed,
        val_tokens=options.val_tokens,
        max_tokens=options.max_tokens,
    )
    return plan_store(
        [feed],
        folder,
        tokenizer=open_tokenizer(
            options.tokenizer, specials={"eot": options.eot} if options.eot else None
        ),
        spec=BuildSpec(dtype=options.dtype, append_eot=options.append_eot),
        workers=options.workers,
        unit_bytes=sizes["unit_bytes"],
        memory=sizes["memory"],
        ray_address=options.ray_address,
    )


def _print_plan(plan: BuildPlan, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**asdict(plan), "disk_bytes": plan.disk_bytes}))
        return
    for feed in plan.feeds:
        tokens = "an unknown number of" if feed.num_tokens is None else f"{feed.num_tokens:,}"
        print(
            f"{feed.source}: {_size(feed.num_bytes)} of input in {feed.num_units:,} units, about "
            f"{tokens} tokens, {_size(feed.disk_bytes)} on disk until it is done"
        )
    print(
        f"workers: {plan.workers}; memory: about {_size(plan.memory_bytes)}; largest document: "
        f"{_size(plan.most_document)}; disk: about {_size(plan.disk_bytes)}, "
        f"{_size(plan.free_bytes)} are free"
    )


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB"
