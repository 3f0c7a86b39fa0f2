"""Verify a store while people look at it.

In: a folder.  Out: how far it is, then every problem.
Promise: one check of a store at a time, in a thread that ends with the process; the store is only
read.
Not here: what is checked (shards.verify).
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.records import JSON
from shardmill.shards import verify_store

log = logging.getLogger(__name__)

MOST_PROBLEMS = 1000


class Check:
    """The last check of one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._state = "never"
        self._done = self._total = 0
        self._problems: list[str] = []

    def start(self) -> None:
        """Begin one, unless one runs."""
        with self._lock:
            if self._state == "running":
                return
            self._state, self._done, self._total, self._problems = "running", 0, 0, []
        threading.Thread(target=self._run, name="verify", daemon=True).start()

    def facts(self) -> dict[str, JSON]:
        with self._lock:
            return {
                "state": self._state,
                "done_bytes": self._done,
                "total_bytes": self._total,
                "problems": [*self._problems[:MOST_PROBLEMS]],
                "num_problems": len(self._problems),
            }

    def statuses(self) -> dict[str, str] | None:
        """Files that are not well, after a check that came to its end; else None."""
        with self._lock:
            if self._state != "done":
                return None
            parts = [problem.partition(": ") for problem in self._problems]
        return {
            file: "missing" if what.startswith("missing") else "damaged" for file, _, what in parts
        }

    def _run(self) -> None:
        try:
            report = verify_store(self.folder, on_progress=self._progress)
        except (ShardmillError, OSError) as error:
            self._end("failed", [str(error)])
        except BaseException as error:
            self._end("failed", [f"{self.folder}: the check broke off: {error!r}"])
            raise
        else:
            self._end("done", report.problems)

    def _progress(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def _end(self, state: str, problems: list[str]) -> None:
        with self._lock:
            self._state, self._problems = state, problems
        log.info("%s: verified, %d problems", self.folder, len(problems))
