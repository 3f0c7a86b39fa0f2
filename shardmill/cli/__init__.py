"""The command line: one module per command, in `commands/`.

Data goes to stdout, progress and messages to stderr; the exit codes are `run.EXIT_CODES`.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The `shardmill` program."""
    from shardmill.cli.run import run

    for name in ("HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")  # these libraries print through their own handlers
    sys.exit(run(sys.argv[1:]))


__all__ = ["main"]
