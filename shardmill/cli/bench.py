"""`shardmill bench`: how fast this machine tokenises, builds and reads, on the user's own data."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shardmill.arguments import whole_number
from shardmill.cli.bench_read import Shape, measure_reading
from shardmill.cli.bench_text import Rate, measure_build, measure_engines, take_sample
from shardmill.errors import OptionError
from shardmill.loading.config import meant_split
from shardmill.mapped.space import READERS, ReaderName
from shardmill.shards import Store, open_store
from shardmill.sources import open_source
from shardmill.tokenizer import open_tokenizer


def bench(
    inputs: Annotated[
        list[str] | None, typer.Argument(help="Text to measure with, as for build.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Whose speed is measured on INPUTS, as for build.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Read this store. Default: the one built from INPUTS.")
    ] = None,
    field: Annotated[str | None, typer.Option(help="Field that holds the text.")] = None,
    megabytes: Annotated[int, typer.Option(help="Text to tokenise and build with.")] = 16,
    seconds: Annotated[float, typer.Option(help="To spend on each number, about.")] = 2.0,
    workers: Annotated[int, typer.Option(help="Processes that build.")] = 1,
    seq_len: Annotated[int, typer.Option(help="Inputs of a window that is read.")] = 1024,
    batch_size: Annotated[int, typer.Option(help="Windows that are read at a time.")] = 32,
    reader: Annotated[
        str, typer.Option(help="How the store is read: auto, mapped or pread.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure this machine on your own data: tokenise, build, read.

    Prints one table: megabytes of text a second for the reference engine, the fast ones and a
    whole build; windows a second of random reads and of a shuffled epoch, with their share of what
    a plain copy reaches. What is built for it is removed. A number may differ by a tenth from call
    to call; a machine that does other work gives other numbers.

    Example: shardmill bench 'data/*.jsonl' --tokenizer spm.model

    Example: shardmill bench --store store --json

    Exit 0: measured. Exit 2: a mistake in the call or its input.
    """
    shape = Shape(
        seq_len=whole_number(seq_len, "seq_len"), batch_size=whole_number(batch_size, "batch_size")
    )
    chosen = _reader(reader)
    whole_number(megabytes, "megabytes")
    whole_number(workers, "workers")
    if not 0 < seconds < 60:
        raise OptionError(f"--seconds {seconds}: wanted more than 0 and less than 60")
    if not inputs and store is None:
        raise OptionError("nothing to measure: name text and --tokenizer, or --store, or both")
    if bool(inputs) != bool(tokenizer):
        missing = "--tokenizer is missing" if inputs else "text is missing: name files for it"
        raise OptionError(f"{missing}; INPUTS and --tokenizer go together")
    with ExitStack() as undo:
        rates: list[Rate] = []
        if inputs and tokenizer:
            scratch = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="shardmill-bench-"))
            )
            options: dict[str, Any] = {"field": field} if field else {}
            source = open_source(inputs, **options)
            opened = open_tokenizer(tokenizer)
            sample = take_sample(source, megabytes * 10**6)
            rates += _told(measure_engines(opened, sample, seconds))
            rates += _told(
                measure_build(
                    *(source, opened, sample, scratch / "store"), workers=workers, engines=rates
                )
            )
        found, split = _to_read(store if store is not None else scratch / "store")
        rates += _told(measure_reading(found, split, shape, seconds, chosen))
    facts = {
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "rates": [asdict(rate) for rate in rates],
    }
    if as_json:
        print(json.dumps(facts))
    else:
        for line in _lines(rates):
            print(line)


def _reader(name: str) -> ReaderName:
    if name not in READERS:
        raise OptionError(f"--reader {name}: wanted auto, mapped or pread")
    return name


def _to_read(folder: Path) -> tuple[Store, str]:
    found = meant_split(folder, None)
    return found if found is not None else (open_store(folder), "train")


def _told(rates: Iterator[Rate]) -> Iterator[Rate]:
    """What is measured, on stderr as it comes."""
    for rate in rates:
        print(f"shardmill bench: {rate.name}", file=sys.stderr)
        yield rate


def _lines(rates: list[Rate]) -> Iterator[str]:
    width = max(len(rate.name) for rate in rates)
    yield f"{'':{width}}  {'MB/s':>8}  {'windows/s':>10}  {'share':>6}"
    for rate in rates:
        share = "" if rate.share is None else f"{rate.share:.2f}"
        told = rate.note or (f"of {rate.limit}" if rate.limit not in (None, rate.name) else "")
        numbers = f"{_number(rate.megabytes):>8}  {_number(rate.windows):>10}  {share:>6}"
        yield f"{rate.name:{width}}  {numbers}  {told}".rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
