"""`shardmill verify`: check every byte of a store; exit 1 on any damage."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from shardmill.arguments import is_url
from shardmill.cli.printing import Answer, num_problems
from shardmill.cli.terminal import one_bar
from shardmill.store import verify as verify_store
from shardmill.urls import Url


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Prints one line: ok, or DAMAGED; each problem on stderr.

    A store at a URL is read once, and nothing of it is kept here.

    Example: shardmill verify store

    Exit 0: every byte is as it was written. Exit 1: damage, one line for each problem. Exit 2: no
    finished store there.
    """

    folder: Annotated[str, "FOLDER", "The store to check: a folder, or a URL."]
    as_json: Annotated[bool, "--json", "Print the report as JSON."] = False

    def run(self) -> Answer:
        folder = self.folder
        with one_bar("verify") as on_progress:
            if is_url(folder):
                from shardmill.remote import verify_remote

                name, report = str(Url(folder)), verify_remote(folder, on_progress=on_progress)
            else:
                name, report = str(Path(folder)), verify_store(folder, on_progress=on_progress)
        counts = f"{report.documents:,} documents, {report.tokens:,} tokens, {report.files:,} files"
        found = f"ok, {counts}" if report.ok else f"DAMAGED, {num_problems(report.problems)}"
        return Answer(
            {"store": name, "ok": report.ok, **asdict(report)},
            [f"{name}: {found}"],
            report.problems,
            found=not report.ok,
            indent=2,
        )
