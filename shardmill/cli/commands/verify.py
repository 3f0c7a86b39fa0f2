"""`shardmill verify`: check every byte of a store; exit 1 on any damage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardmill.arguments import is_url
from shardmill.cli.terminal import byte_bar
from shardmill.store import verify as verify_store
from shardmill.urls import Url


def verify(
    folder: Annotated[str, typer.Argument(help="The store to check: a folder, or a URL.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Read a whole store and compare it with its manifest.

    Prints one line: ok, or DAMAGED; each problem on stderr.

    A store at a URL is read once, and nothing of it is kept here.

    Example: shardmill verify store

    Exit 0: every byte is as it was written. Exit 1: damage, one line for each problem. Exit 2: no
    finished store there.
    """
    with byte_bar("verify") as on_progress:
        if is_url(folder):
            from shardmill.remote import verify_remote

            name, report = str(Url(folder)), verify_remote(folder, on_progress=on_progress)
        else:
            name, report = str(Path(folder)), verify_store(folder, on_progress=on_progress)
    if as_json:
        facts = {
            "store": name,
            "ok": report.ok,
            "files": report.files,
            "tokens": report.tokens,
            "documents": report.documents,
            "problems": report.problems,
        }
        print(json.dumps(facts, indent=2))
    elif report.ok:
        print(
            f"{name}: ok, {report.documents:,} documents, {report.tokens:,} tokens, "
            f"{report.files:,} files"
        )
    else:
        count = len(report.problems)
        print(f"{name}: DAMAGED, {count:,} {'problem' if count == 1 else 'problems'}")
        for problem in report.problems:
            print(f"  {problem}", file=sys.stderr)
    if not report.ok:
        raise typer.Exit(1)
