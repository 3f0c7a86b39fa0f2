"""The command line: one file per command, put together here.

Promise: data on stdout, progress and messages on stderr; exit 0 when done, 1 when a check found
damage or a comparison a difference, 2 for a mistake in the call or its input, 130 after Ctrl-C. No
traceback for a user's mistake; `--debug` before the command shows it.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardmill.cli.blame import blame
from shardmill.cli.build import build
from shardmill.cli.build_chats import chats
from shardmill.cli.check import check
from shardmill.cli.convert import convert
from shardmill.cli.diff import diff
from shardmill.cli.exclude import exclude
from shardmill.cli.info import info
from shardmill.cli.pack import pack
from shardmill.cli.pull import pull
from shardmill.cli.push import push
from shardmill.cli.show import show
from shardmill.cli.stream import stream
from shardmill.cli.tokenizer import app as tokenizer_app
from shardmill.cli.verify import verify
from shardmill.cli.view import view
from shardmill.errors import ShardmillError


class _Commands(TyperGroup):
    """`build chats` is a command of its own; any other first word after `build` is an input."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:2] == ["build", "chats"]:
            args = ["build chats", *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="shardmill",
    cls=_Commands,
    help="Text and chats to training batches: tokenised once, memory-mapped, checked.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(build)
app.command("build chats")(chats)
app.command()(pack)
app.command()(show)
app.command()(blame)
app.command()(view)
app.command()(verify)
app.command()(check)
app.command()(info)
app.command()(diff)
app.command()(exclude)
app.command()(push)
app.command()(pull)
app.command()(convert)
app.command()(stream)
app.add_typer(tokenizer_app, name="tokenizer")

_debug = False


@app.callback()
def options(
    debug: Annotated[bool, typer.Option(help="Show a traceback with every error.")] = False,
) -> None:
    global _debug
    _debug = debug


def main() -> None:
    """The entry point: errors of ours become one line and exit code 2."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    try:
        app()
    except ShardmillError as error:
        if _debug:
            raise
        print(f"shardmill: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be written
        if _debug:
            raise
        print(f"shardmill: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)


__all__ = ["app", "main"]
