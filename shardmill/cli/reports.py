"""What every build command checks first and tells at the end."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from shardmill.build import BuildPlan, BuildReport, has_unfinished_build
from shardmill.errors import OptionError, UnfinishedBuildError
from shardmill.shards import Ledger


def check_place(out: Path, report: Path | None, *, goes_on: bool) -> None:
    """Before any work: is an earlier build in the way, can the report be written?

    `goes_on`: --resume or --overwrite was given.
    """
    if has_unfinished_build(out) and not goes_on:
        raise UnfinishedBuildError(
            f"{out}: an earlier build stopped half-way: go on with --resume, "
            "or start again with --overwrite"
        )
    if report is not None and not report.parent.is_dir():
        raise OptionError(f"--report {report}: there is no folder {report.parent}")
    if report is not None and report.is_dir():
        raise OptionError(f"--report {report}: this is a folder; name a file in it")


def check_report(report: Path | None, source: object) -> None:
    """Refuse a report that would be written over what is read."""
    if report is None or not report.exists():
        return
    for file in getattr(source, "files", ()):
        if isinstance(file.place, Path) and file.place.samefile(report):
            raise OptionError(f"--report {report}: this file is read; name another for the report")


def run_facts(done: BuildReport) -> dict[str, Any]:
    """What a store never holds: when, where and how long."""
    return {
        "store": str(done.folder),
        "seconds": round(done.seconds, 3),
        "resumed": done.resumed,
        "workers": done.cost.num_workers if done.cost else None,
        "cores": done.cost.num_cores if done.cost else None,
        "cpu_seconds": round(done.cost.cpu_seconds, 3) if done.cost else None,
        "utilisation": round(done.utilisation, 3) if done.utilisation is not None else None,
        "peak_bytes": done.cost.peak_bytes if done.cost else None,
        "ledger": msgspec.to_builtins(done.manifest.ledger),
        "machine": platform.platform(),
        "python": platform.python_version(),
    }


@contextmanager
def told_how_to_resume(out: Path) -> Iterator[None]:
    """Behind Ctrl-C: whether anything was kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if has_unfinished_build(out):
            print(f"{out}: stopped; what is done is kept: go on with --resume", file=sys.stderr)
        else:
            print(f"{out}: stopped before anything was done for good", file=sys.stderr)
        raise


def left_out_words(ledger: Ledger) -> str:
    """How many documents were left out, and why."""
    documents = ledger.documents
    reasons = {**({"empty": documents.empty} if documents.empty else {}), **documents.dropped}
    words = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    return f"{sum(reasons.values()):,} documents{f' ({words})' if words else ''}"


def repaired_words(ledger: Ledger) -> str:
    """How many kept documents were changed, and why; empty when none was."""
    words = ", ".join(f"{count:,} {why}" for why, count in ledger.repaired.items())
    return f"; repaired: {words}" if words else ""


def cost_words(done: BuildReport) -> str:
    """How well the machine was used; empty when nothing was built."""
    if done.cost is None or done.utilisation is None:
        return ""
    workers = f"{done.cost.num_workers} workers, " if done.cost.num_workers > 1 else ""
    return (
        f" ({workers}{done.utilisation:.0%} of {done.cost.num_cores} cores, at most "
        f"{done.cost.peak_bytes / 2**20:,.0f} MiB a process)"
    )


def print_plan(plan: BuildPlan, *, as_json: bool) -> None:
    """What --dry-run tells."""
    if as_json:
        print(json.dumps({**asdict(plan), "disk_bytes": plan.disk_bytes}))
        return
    for feed in plan.feeds:
        print(
            f"{feed.source}: {_size(feed.num_bytes)} of input in {feed.num_units:,} units, about "
            f"{_count(feed.num_tokens)} tokens, {_size(feed.disk_bytes)} on disk until it is done"
        )
    print(
        f"workers: {plan.workers}; memory: about {_size(plan.memory_bytes)}; largest document: "
        f"{_size(plan.most_document)}; disk: about {_size(plan.disk_bytes)}, "
        f"{_size(plan.free_bytes)} are free"
    )


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB"


def _count(number: int | None) -> str:
    return "an unknown number of" if number is None else f"{number:,}"
