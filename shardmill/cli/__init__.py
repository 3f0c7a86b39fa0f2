"""The command line: one file per command, put together here.

Promise: data on stdout, progress and messages on stderr; the exit codes of `border.EXIT_CODES`. No
traceback for a user's mistake; `--debug` before the command shows it.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import shardmill
from shardmill.cli.calls import Commands, run
from shardmill.cli.commands.bench import bench
from shardmill.cli.commands.blame import blame
from shardmill.cli.commands.build import build
from shardmill.cli.commands.build_chats import chats
from shardmill.cli.commands.check import check
from shardmill.cli.commands.convert import convert
from shardmill.cli.commands.diff import diff
from shardmill.cli.commands.exclude import exclude
from shardmill.cli.commands.info import info, verify
from shardmill.cli.commands.pack import pack
from shardmill.cli.commands.show import show
from shardmill.cli.commands.stream import stream
from shardmill.cli.commands.tokenizer import app as tokenizer_app
from shardmill.cli.commands.transfer import pull, push
from shardmill.cli.commands.view import view

app = typer.Typer(
    name="shardmill",
    cls=Commands,
    help="Text and chats to training batches: tokenised once, memory-mapped, checked.",
    epilog="`shardmill COMMAND --help` has examples; docs/cli.md has the exit codes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
MAKE, LOOK, MOVE, RUN = "Make", "Look and check", "Move", "Run and measure"
"""The panels of the help, in the order of work."""
app.add_typer(tokenizer_app, name="tokenizer", rich_help_panel=MAKE)
app.command(rich_help_panel=MAKE)(build)
app.command("build chats", rich_help_panel=MAKE)(chats)
app.command(rich_help_panel=MAKE)(pack)
app.command(rich_help_panel=LOOK)(info)
app.command(rich_help_panel=LOOK)(show)
app.command(rich_help_panel=LOOK)(view)
app.command(rich_help_panel=LOOK)(blame)
app.command(rich_help_panel=LOOK)(verify)
app.command(rich_help_panel=LOOK)(check)
app.command(rich_help_panel=LOOK)(diff)
app.command(rich_help_panel=LOOK)(exclude)
app.command(rich_help_panel=MOVE)(push)
app.command(rich_help_panel=MOVE)(pull)
app.command(rich_help_panel=MOVE)(convert)
app.command(rich_help_panel=RUN)(stream)
app.command(rich_help_panel=RUN)(bench)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"shardmill {shardmill.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback with every error.")
    ] = False,
) -> None:
    """Text and chats to training batches: tokenised once, memory-mapped, checked."""


def main() -> None:
    """The entry point."""
    for name in ("HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")  # the clients print by handlers of their own
    sys.exit(run(app, sys.argv[1:]))


__all__ = ["app", "main"]
