"""One worker process: takes tasks from its parent, one after the other, and tells of them.

In: a socket to the parent.  Out: messages (kind, value, usage).
Promise: it dies with its parent, also when that is killed; it leaves Ctrl-C to its parent.
Not here: which task comes next (local.py), what is told of one (telling.py).
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from shardmill.building.engines.tasks import (
    Logs,
    Tools,
    do_task,
    limit_memory,
    pack,
    usage_of_this_process,
)

_PR_SET_PDEATHSIG = 1


class _Teller:
    """The way back to the parent; several threads may log at one time."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def tell(self, kind: str, value: Any) -> None:
        message = pack((kind, value, usage_of_this_process()))
        with self._lock:
            self._connection.send_bytes(message)


def main(descriptor: int, parent: int, memory: int) -> None:
    """Work until the parent closes the socket; `memory` bytes may be used, 0: no limit."""
    _die_with(parent)
    if memory:
        limit_memory(memory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    teller = _Teller(connection)
    logging.basicConfig(level=logging.INFO, handlers=[Logs(teller.tell)], force=True)
    orders: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, orders), daemon=True).start()
    tools = Tools()
    while True:
        kind, data = orders.get()
        if kind == "tools":
            tools.bring(data)
        else:
            do_task(data, tools, teller.tell)


def _listen(connection: Connection[Any, Any], orders: SimpleQueue[tuple[str, bytes]]) -> None:
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
