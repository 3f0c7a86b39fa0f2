"""`shardmill verify`: check every byte of a store; exit 1 on any damage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardmill.cli.push import transfer_progress
from shardmill.shards import VerifyReport, verify_store


def verify(
    folder: Annotated[Path, typer.Argument(help="The store to check.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Read a whole store and compare it with its manifest.

    Prints one line: ok, or DAMAGED; each problem on stderr.

    Example: shardmill verify store

    Exit 0: every byte is as it was written. Exit 1: damage, one line for each problem. Exit 2: no
    finished store there.
    """
    with transfer_progress("verify") as on_progress:
        report = verify_store(folder, on_progress=on_progress)
    print(_as_json(folder, report) if as_json else _receipt(folder, report))
    if not as_json:
        for problem in report.problems:
            print(f"  {problem}", file=sys.stderr)
    if not report.ok:
        raise typer.Exit(1)


def _receipt(folder: Path, report: VerifyReport) -> str:
    if report.ok:
        return (
            f"{folder}: ok, {report.documents:,} documents, {report.tokens:,} tokens, "
            f"{report.files:,} files"
        )
    count = len(report.problems)
    return f"{folder}: DAMAGED, {count:,} {'problem' if count == 1 else 'problems'}"


def _as_json(folder: Path, report: VerifyReport) -> str:
    return json.dumps(
        {
            "store": str(folder),
            "ok": report.ok,
            "files": report.files,
            "tokens": report.tokens,
            "documents": report.documents,
            "problems": report.problems,
        },
        indent=2,
    )
