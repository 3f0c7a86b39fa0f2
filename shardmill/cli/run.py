"""Runs one call of the command line. Every error becomes an exit code and a message on stderr."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import typer

from shardmill.cli.app import PROGRAM, Call, RootGroup, find_call, open_app
from shardmill.cli.terminal import StdoutError, indented, messages, watched_stdout
from shardmill.cli.wording import as_flags, check_words, error_text, usage_text
from shardmill.errors import ShardmillError
from shardmill.urls import remember

DONE, FOUND, MISTAKE, FAULT, STOPPED, UNHEARD = 0, 1, 2, 70, 130, 141
EXIT_CODES = {
    DONE: "done, and all is well",
    FOUND: "done, and something was found: damage, a problem, a difference",
    MISTAKE: "a mistake in the call or its input, or a place that cannot be read or written",
    FAULT: "a fault of shardmill itself; its traceback is on stderr",
    STOPPED: "stopped with Ctrl-C",
    UNHEARD: "the reader of stdout went away, as `| head` does",
}
_USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[1])
"""What typer raises for a wrong call, wherever this version keeps it."""


def run(words: Sequence[str]) -> int:
    """Run the command that the words name. Only our own faults and --debug show a traceback."""
    if sys.stderr is None:  # closed by the caller: messages go nowhere
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - as long as the process
    for word in words:
        remember(word)
    root = open_app()
    call = find_call(root, words)
    with messages(PROGRAM, worded=lambda text: as_flags(text, call.command)):
        try:
            return _run(root, words)
        except _USAGE_ERROR as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                return MISTAKE  # the help was printed
            return _refused(error, f"{usage_text(error, call, root)} (`{call.name} --help`)", call)
        except ShardmillError as error:
            return _refused(error, error_text(error, call.command), call)
        except StdoutError as error:
            return UNHEARD if error.is_closed_pipe else _refused(error, f"stdout: {error}", call)
        except OSError as error:  # a full disk, a folder that may not be written
            where = f"{error.filename}: " if error.filename is not None else ""
            return _refused(error, f"{where}{error.strerror or error}", call)
        except Exception:  # noqa: BLE001 - shown whole, with an exit code that no check has
            _say(f"{traceback.format_exc()}{PROGRAM}: a fault of shardmill, not of this call")
            return FAULT


def _run(root: RootGroup, words: Sequence[str]) -> int:
    if sys.stdout is None:
        raise OSError("stdout is closed: leave it open, or send it to /dev/null")
    check_words(words)
    with watched_stdout():
        try:
            code = root.main(list(words), prog_name=PROGRAM, standalone_mode=False)
        except SystemExit as end:
            # typer takes every broken pipe for that of stdout, which raises StdoutError here
            if isinstance(end.__context__, BrokenPipeError):
                raise OSError("a connection was closed by its other end") from end
            code = end.code
    return code if isinstance(code, int) else DONE


def _refused(error: BaseException, text: str, call: Call) -> int:
    trace = "".join(traceback.format_exception(error)) if call.debug else ""
    _say(f"{trace}{PROGRAM}: {indented(text)}")
    return MISTAKE


def _say(text: str) -> None:
    with suppress(OSError):  # stderr is closed; the exit code remains
        print(text, file=sys.stderr)
