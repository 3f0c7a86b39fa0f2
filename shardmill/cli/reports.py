"""What every build command checks first and tells at the end."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from shardmill.build import BuildReport, has_unfinished_build
from shardmill.errors import OptionError, UnfinishedBuildError


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


def run_facts(done: BuildReport) -> dict[str, Any]:
    """What a store never holds: when, where and how long."""
    return {
        "store": str(done.folder),
        "seconds": round(done.seconds, 3),
        "resumed": done.resumed,
        "machine": platform.platform(),
        "python": platform.python_version(),
    }
