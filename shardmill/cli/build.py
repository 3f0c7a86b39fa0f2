"""`shardmill build`: text files or a hub dataset to a token store."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardmill.build import BuildReport, BuildSpec, Feed, build_store, plan_store
from shardmill.cli.build_field import check_field
from shardmill.cli.engines import HELP, EngineName, parse_engines
from shardmill.cli.output import open_output
from shardmill.cli.progress import build_progress
from shardmill.cli.reports import (
    check_place,
    check_report,
    cost_words,
    left_out_words,
    print_plan,
    repaired_words,
    run_facts,
    told_how_to_resume,
)
from shardmill.cli.sizes import parse_bytes
from shardmill.errors import OptionError
from shardmill.sources import open_source
from shardmill.tokenizer import open_tokenizer


def build(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Folders, files or globs of .txt .md .jsonl .parquet, here or at a URL (s3://, "
            "gs://, hf://); or a dataset, hub:owner/name."
        ),
    ],
    out: Annotated[str, typer.Option(help="Where the store goes: a folder, or s3://bucket/path.")],
    tokenizer: Annotated[
        str, typer.Option(help="'byte', a .model file, a tokenizer.json, a folder or a hub id.")
    ],
    name: Annotated[str | None, typer.Option(help="Name of the data, recorded.")] = None,
    field: Annotated[str | None, typer.Option(help="Field that holds the text.")] = None,
    on_bad: Annotated[
        Literal["error", "skip"] | None,
        typer.Option(help="Rows that cannot be read: stop, or list."),
    ] = None,
    val_tokens: Annotated[int, typer.Option(help="The first so many tokens go to 'val'.")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(help="Stop when 'train' has so many tokens.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Read files in an order drawn from this. Default: by name."),
    ] = None,
    shard_bytes: Annotated[str, typer.Option(help="Size of a shard, e.g. 128MiB.")] = "128MiB",
    dtype: Annotated[
        Literal["uint16", "uint32"] | None, typer.Option(help="Default: by vocabulary.")
    ] = None,
    append_eot: Annotated[
        bool, typer.Option(help="Put the end token behind each document.")
    ] = True,
    eot: Annotated[
        str | None, typer.Option(help="The end token, when the tokenizer does not name it.")
    ] = None,
    engine: Annotated[list[EngineName] | None, typer.Option(help=HELP)] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="The Ray to build on: auto, or host:port. Default: one started here."),
    ] = None,
    engine_check: Annotated[
        Literal["sample", "full"], typer.Option(help="How much a fast engine is compared.")
    ] = "sample",
    workers: Annotated[
        int | None, typer.Option(help="Processes. Default: one for each core; 1: no other.")
    ] = None,
    unit_bytes: Annotated[
        str | None, typer.Option(help="Input that a worker gets at a time. Default: 64MiB.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="What all processes together may use, e.g. 4GiB.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and what it takes; build nothing.")
    ] = False,
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
    append: Annotated[
        bool, typer.Option("--append", help="Keep the store, and add the files that are new.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write time, machine and counts to this JSON file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")] = False,
) -> None:
    """Tokenise text into a store.

    Prints one line: documents, tokens and shards of the store, what was left out and why, time and
    memory. Conversations have a command of their own, `shardmill build chats`; a folder that is
    called chats is written ./chats here.

    Example: shardmill build 'data/*.jsonl' --out store --tokenizer spm.model

    Example: shardmill build books --out s3://bucket/books --tokenizer spm.model --json

    Exit 0: built, or planned. Exit 2: a mistake in the call or its input; what is done is kept.
    Exit 130: stopped with Ctrl-C; go on with --resume.
    """
    place = open_output(out, scratch)
    check_place(place.folder, report, goes_on=resume or overwrite or dry_run)
    if append and place.url is not None:
        raise OptionError(
            f"--append to {place.shown}: files are added to a store on this machine: pull it, add "
            "them, and push it with --replace"
        )
    if append and dry_run:
        raise OptionError("--dry-run tells the plan of a whole build: leave out --append")
    encodes, run_on = parse_engines(engine or (), ray_address)
    for flag, number in (("--val-tokens", val_tokens), ("--max-tokens", max_tokens or 0)):
        if number < 0:
            raise OptionError(f"{flag} {number}: wanted 0 or more")
    wishes = {"field": field, "on_bad": on_bad}
    options = {key: wish for key, wish in wishes.items() if wish}
    source = open_source(inputs, seed=seed, **options)
    check_report(report, source)
    if field is not None and not resume:
        check_field(source, field)
    fill: tuple[tuple[str, int | None], ...] = (("train", max_tokens),)
    if val_tokens:
        fill = (("val", val_tokens), *fill)
    feeds = [Feed(source=source, fill=fill)]
    opened = open_tokenizer(tokenizer, specials={"eot": eot} if eot else None)
    spec = BuildSpec(
        dataset_name=name or source.name,
        split_rule=f"the first {val_tokens:,} tokens to val, then train"
        if val_tokens
        else "all to train",
        seed=seed or 0,
        shard_bytes=parse_bytes(shard_bytes),
        dtype=dtype,
        append_eot=append_eot,
    )
    manner = {
        "workers": workers,
        "unit_bytes": parse_bytes(unit_bytes) if unit_bytes else None,
        "memory": parse_bytes(memory) if memory else None,
    }
    if dry_run:
        plan = plan_store(
            feeds, place.folder, tokenizer=opened, spec=spec, ray_address=ray_address, **manner
        )
        print_plan(plan, as_json=as_json)
        return
    # Ray prints what goes wrong on its nodes to stdout, where the receipt belongs.
    apart = redirect_stdout(sys.stderr) if run_on == "ray" else nullcontext()
    with (
        place.opened(resume=resume, overwrite=overwrite) as folder,
        build_progress() as on_progress,
        told_how_to_resume(folder),
        apart,
    ):
        done = build_store(
            feeds,
            folder,
            tokenizer=opened,
            spec=spec,
            engine=encodes,
            run_on=run_on,
            ray_address=ray_address,
            engine_check=engine_check,
            resume=resume,
            overwrite=place.replaces(resume=resume, overwrite=overwrite),
            on_progress=on_progress,
            append=append,
            **manner,
        )
    if report is not None:
        report.write_text(json.dumps({**_report(done), **place.facts}, indent=2) + "\n")
    if as_json:
        print(json.dumps({**_report(done), **place.facts}))
    else:
        print(receipt(place.shown, done))


def receipt(out: str, done: BuildReport) -> str:
    """One line that says what was built and what was left out."""
    ledger = done.manifest.ledger
    shards = sum(len(split.shards) for split in done.manifest.splits.values())
    return (
        f"{out}: {ledger.documents.kept:,} documents, {ledger.tokens.kept:,} tokens, "
        f"{shards:,} shards; left out: {left_out_words(ledger)}, over budget: "
        f"{ledger.tokens.over_budget:,} tokens{repaired_words(ledger)}; "
        f"{done.seconds:.1f} s{cost_words(done)}"
    )


def _report(done: BuildReport) -> dict[str, object]:
    ledger = done.manifest.ledger
    return {
        **run_facts(done),
        "documents_kept": ledger.documents.kept,
        "documents_read": ledger.documents.read,
        "tokens_kept": ledger.tokens.kept,
        "produced_by": done.manifest.produced_by,
    }
