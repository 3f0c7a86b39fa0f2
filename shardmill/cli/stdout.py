"""stdout that tells its own troubles apart from all others.

In: the stdout of this process.  Out: the same, in place of it while a command runs.
Promise: what cannot be written there, at any print or at the end, is an `UnheardError`, and behind
it nothing is left in buffers that would fail once more when the process ends. A character that the
terminal's encoding does not have is written \\u00e9, not an error.
Not here: what the error means for the exit code (border).
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast


class UnheardError(Exception):
    """stdout took no more. No OSError: libraries that print take those for their own."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror or str(cause))
        self.is_closed_pipe = isinstance(cause, BrokenPipeError)


class _Stdout:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with _unheard():
            return self._file.write(text)

    def flush(self) -> None:
        with _unheard():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def watched_stdout() -> Iterator[None]:
    """For the time of a command."""
    file = sys.stdout
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="backslashreplace")
    watched = _Stdout(file)
    try:
        with redirect_stdout(cast(TextIO, watched)):
            yield
        watched.flush()
    except UnheardError:
        _discard(file)
        raise


@contextmanager
def _unheard() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnheardError(error) from error


def _discard(file: TextIO) -> None:
    """What is still buffered goes nowhere: the interpreter flushes it when it ends."""
    with suppress(io.UnsupportedOperation):  # not a file of the system
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)
