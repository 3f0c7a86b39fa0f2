"""`shardmill verify`: check every byte of a store; exit 1 on any damage."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shardmill.arguments import is_url
from shardmill.cli.app import DONE, FOUND
from shardmill.cli.terminal import one_bar
from shardmill.store import verify as verify_store
from shardmill.urls import Url


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What `shardmill verify` takes."""

    folder: Annotated[str, "FOLDER", "The store to check: a folder, or a URL."]
    as_json: Annotated[bool, "--json", "Print the report as JSON."] = False


def verify(options: VerifyOptions) -> int:
    """Read a whole store and compare it with its manifest.

    Prints one line: ok, or DAMAGED; each problem on stderr.

    A store at a URL is read once, and nothing of it is kept here.

    Example: shardmill verify store

    Exit 0: every byte is as it was written. Exit 1: damage, one line for each problem. Exit 2: no
    finished store there.
    """
    folder = options.folder
    with one_bar("verify") as on_progress:
        if is_url(folder):
            from shardmill.remote import verify_remote

            name, report = str(Url(folder)), verify_remote(folder, on_progress=on_progress)
        else:
            name, report = str(Path(folder)), verify_store(folder, on_progress=on_progress)
    if options.as_json:
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
    return DONE if report.ok else FOUND
