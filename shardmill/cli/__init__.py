"""The command line: its commands are in `commands/`, those of one subject in a module.

Data goes to stdout, progress and messages to stderr; the exit codes are `app.EXIT_CODES`.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The `shardmill` program."""
    for name in ("HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")  # these libraries print through their own handlers
    try:
        from shardmill.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are loaded; during a command `run` answers
        code = 130
    sys.exit(code)


__all__ = ["main"]
