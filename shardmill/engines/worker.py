"""One worker process: takes tasks from its parent, one after the other, and tells of them.

In: a socket to the parent.  Out: messages (kind, task number, value, usage).
Promise: it dies with its parent, also when that is killed; it leaves Ctrl-C to its parent; an error
of a task is told, not died of; what the program logs is told too.
Not here: which task comes next (local.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from shardmill.engines.travel import pack
from shardmill.engines.usage import limit_memory, usage_of_this_process
from shardmill.errors import BuildError

_PR_SET_PDEATHSIG = 1


class _Teller:
    """The way back to the parent; several threads may log at one time."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def tell(self, kind: str, number: int | None, value: Any) -> None:
        message = pack((kind, number, value, usage_of_this_process()))
        with self._lock:
            self._connection.send_bytes(message)


class _Logs(logging.Handler):
    """Records go to the parent, which has the handlers."""

    def __init__(self, teller: _Teller) -> None:
        super().__init__()
        self._teller = teller

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, and so are we in a moment
            self._teller.tell("log", None, (record.name, record.levelno, record.getMessage()))


def main(descriptor: int, parent: int, memory: int) -> None:
    """Work until the parent closes the socket; `memory` bytes may be used, 0: no limit."""
    _die_with(parent)
    if memory:
        limit_memory(memory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    teller = _Teller(connection)
    logging.basicConfig(level=logging.INFO, handlers=[_Logs(teller)], force=True)
    orders: SimpleQueue[tuple[str, Any, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, orders), daemon=True).start()
    tools: Any = None
    while True:
        kind, number, data = orders.get()
        if kind == "tools":
            tools = data
            continue
        tools = pickle.loads(tools) if isinstance(tools, bytes) else tools
        _work(teller, tools, number, data)


def _work(teller: _Teller, tools: Any, number: int, data: bytes) -> None:
    try:
        task = pickle.loads(data)
        task.run(tools, lambda note: teller.tell("note", number, note))
    except Exception as error:  # noqa: BLE001 - told to the parent, which decides
        error.add_note("".join(traceback.format_exception(error)))
        teller.tell("failed", number, _portable(error))
    else:
        teller.tell("ended", number, None)


def _portable(error: Exception) -> Exception:
    """The error itself if it comes out of a pickle alike, else its words."""
    try:
        if str(pickle.loads(pack(error))) == str(error):
            return error
    except Exception:  # noqa: BLE001 - any class of a user may fail to travel in any way
        pass
    return BuildError(f"{type(error).__name__}: {error}")


def _listen(connection: Connection[Any, Any], orders: SimpleQueue[tuple[str, Any, Any]]) -> None:
    """Orders of the parent; when it is gone this process ends, whatever it does."""
    try:
        while True:
            orders.put(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)


def _die_with(parent: int) -> None:
    """Ask the kernel, where it can, to die with the parent; the socket tells it elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
