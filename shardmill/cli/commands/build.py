"""`shardmill build`: text files or a hub dataset to a token store.

Whether any row has the field that --field names.

In: a source that was opened with that field.  Out: nothing, or an error with the fields there are.
Promise: a build whose every row would be left out for want of the field is refused before it
begins; the source is read up to its first text, which is in its first batch unless texts are rare.

`--engine`: two questions under one name, which engine encodes and where the work is done.

In: the values that were given.  Out: one answer to each question.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from shardmill.arguments import choices
from shardmill.building import BuildReport, BuildSpec, Feed, build_store, plan_store
from shardmill.building.documents import WorkerKeywords
from shardmill.building.pool import RunOn
from shardmill.cli.build_output import (
    build_progress,
    check_place,
    check_report,
    cost_words,
    left_out_words,
    open_output,
    print_plan,
    repaired_words,
    run_facts,
    told_how_to_resume,
)
from shardmill.cli.terminal import parse_bytes
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source
from shardmill.sources import ConcatSource, JsonlSource, iter_jsonl_rows, open_source
from shardmill.tokenizers import EngineChoice, open_tokenizer

_ROWS = 1000
"""The fields of so many rows are listed."""


def check_field(source: Source, field: str) -> None:
    """Refuse a field that no row has."""
    num_rows = 0
    for batch in source.batches():
        if len(batch.texts) or batch.counts.get("empty"):
            return
        num_rows += batch.num_read
    if not num_rows:
        return  # nothing is read, so nothing is left out
    names = sorted({name for row in _first_rows(source) for name in row})
    told = f"; {choices(field, names, verb='the fields are')}" if names else ""
    raise SourceError(
        f"{source.name}: none of {num_rows:,} rows has text in the field {field!r}{told}; name the "
        "field that holds the documents (field=)"
    )


def _first_rows(source: Source) -> Iterator[dict[str, object]]:
    parts = source.parts if isinstance(source, ConcatSource) else [source]
    files = [file for part in parts if isinstance(part, JsonlSource) for file in part.files]
    places = [file.place for file in files if isinstance(file.place, Path)]
    if places:
        yield from islice(iter_jsonl_rows(places), _ROWS)


class EngineName(StrEnum):
    """What `--engine` takes."""

    auto = "auto"
    fast = "fast"
    reference = "reference"
    local = "local"
    ray = "ray"


HELP = (
    "Which tokenizer engine encodes (auto, fast, reference), and where the work is done (local, "
    "ray); one of each at most, e.g. --engine ray --engine fast."
)


def parse_engines(
    names: Sequence[EngineName], ray_address: str | None = None
) -> tuple[EngineChoice, RunOn]:
    """The engine that encodes (auto unless said) and where the work is done (local unless said)."""
    encodes = [name.value for name in names if name in get_args(EngineChoice)]
    places = [name.value for name in names if name in get_args(RunOn)]
    for given in (encodes, places):
        if len(given) > 1:
            raise OptionError(
                f"--engine {' --engine '.join(given)}: wanted one of them; another may only say "
                "the other thing: auto, fast or reference how to encode, local or ray where"
            )
    run_on = cast(RunOn, places[0] if places else "local")
    if ray_address is not None and run_on != "ray":
        raise OptionError(f"--ray-address {ray_address}: only with --engine ray")
    return cast(EngineChoice, encodes[0] if encodes else "auto"), run_on


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
    manner: WorkerKeywords = {
        "workers": workers,
        "unit_bytes": parse_bytes(unit_bytes) if unit_bytes else None,
        "memory": parse_bytes(memory) if memory else None,
        "run_on": run_on,
        "ray_address": ray_address,
    }
    if dry_run:
        plan = plan_store(feeds, place.folder, tokenizer=opened, spec=spec, **manner)
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
