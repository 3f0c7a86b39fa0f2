"""What a process tells of a task that it does: alike in every engine.

In: a task and its tools, as bytes.  Out: (kind, value): log, note, ended, failed.
Promise: an error of a task is told, not died of, and comes out of a pickle on the other side; what
the program logs is told too.
Not here: the way back (worker.py, ray_worker.py).
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

from shardmill.engines.travel import pack
from shardmill.errors import BuildError
from shardmill.urls import scrub

Tell: TypeAlias = Callable[[str, Any], None]


class Tools:
    """The tools of a process, opened when the first task needs them."""

    def __init__(self) -> None:
        self._packed: bytes | None = None
        self._opened: Any = None

    def bring(self, packed: bytes) -> None:
        self._packed = packed

    def open(self) -> Any:
        if self._packed is not None:
            self._opened, self._packed = pickle.loads(self._packed), None
        return self._opened


def do_task(data: bytes, tools: Tools, tell: Tell) -> None:
    """Run one task to its end, or to its failure."""
    try:
        opened = tools.open()
        task = pickle.loads(data)
        task.run(opened, lambda note: tell("note", note))
    except Exception as error:  # noqa: BLE001 - told to the other side, which decides
        error.add_note(scrub("".join(traceback.format_exception(error))))
        tell("failed", _portable(error))
    else:
        tell("ended", None)


class Logs(logging.Handler):
    """Records are told; the handlers are on the other side."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the other side is gone, and so are we in a moment
            self._tell("log", (record.name, record.levelno, record.getMessage()))


def log_again(value: tuple[str, int, str]) -> None:
    """On the other side: what a `Logs` told."""
    name, level, message = value
    logging.getLogger(name).log(level, "%s", message)


def _portable(error: Exception) -> Exception:
    """The error itself if it comes out of a pickle alike, else its words."""
    try:
        if str(pickle.loads(pack(error))) == str(error):
            return error
    except Exception:  # noqa: BLE001 - any class of a user may fail to travel in any way
        pass
    return BuildError(f"{type(error).__name__}: {error}")
