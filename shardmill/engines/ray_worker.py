"""One worker on Ray: an actor that does tasks, one at a time, and is asked what became of them.

In: a task as bytes.  Out: messages (kind, value, usage) as bytes, one for each `hear`.
Promise: a task begins when it is first asked for, goes on in a thread, and waits when two of its
notes were not heard; nothing is written but what the task itself writes.
Not here: which task comes next (ray_engine.py), what is told of one (telling.py). Ray starts this
process, and ends it with the one that asked for it.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import ray

import shardmill
from shardmill.engines.telling import Logs, Tools, do_task
from shardmill.engines.travel import pack
from shardmill.engines.usage import allow_memory, usage_of_this_process

_UNHEARD = 2


class RayWorker:
    """Ray calls its methods one after the other, in one thread."""

    def __init__(self, environ: Mapping[str, str], paths: Sequence[str], memory: int) -> None:
        """`environ` counts before a tokenizer is imported; modules are also looked for in `paths`;
        `memory` bytes may be used beyond what Ray itself took, 0: no limit."""
        os.environ.update(environ)
        sys.path += [path for path in paths if path not in sys.path]
        if memory:
            allow_memory(memory)
        self._tools = Tools()
        self._task: bytes | None = None
        self._messages: SimpleQueue[tuple[bool, bytes]] = SimpleQueue()  # a note?, the message
        self._room = threading.Semaphore(_UNHEARD)
        logs = Logs(self._tell)
        logs.addFilter(lambda record: not record.name.startswith("ray"))
        logging.basicConfig(level=logging.INFO, handlers=[logs], force=True)

    def greet(self) -> dict[str, str]:
        """Who this is; plain strings, since another version must be able to read them."""
        return {
            "shardmill": shardmill.__version__,
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "host": socket.gethostname(),
            "node": ray.get_runtime_context().get_node_id(),
        }

    def take(self, task: bytes, tools: bytes | None) -> None:
        """The next task, and tools when they are new. Nothing begins."""
        if tools is not None:
            self._tools.bring(tools)
        self._task = task

    def hear(self) -> bytes:
        """The next message; waits for it."""
        if self._task is not None:
            threading.Thread(target=self._work, args=(self._task,), daemon=True).start()
            self._task = None
        is_note, message = self._messages.get()
        if is_note:
            self._room.release()
        return message

    def _work(self, task: bytes) -> None:
        try:
            do_task(task, self._tools, self._tell)
        except BaseException:  # noqa: BLE001 - as in a process of its own, it ends the process
            traceback.print_exc()
            os._exit(1)

    def _tell(self, kind: str, value: Any) -> None:
        if kind == "note":
            self._room.acquire()
        self._messages.put((kind == "note", pack((kind, value, usage_of_this_process()))))
