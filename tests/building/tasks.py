"""Tasks that do, fail, hang and die: a worker imports them from here."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmill.errors import SourceError


class OddError(Exception):
    """Comes out of a pickle as something else."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@dataclass(frozen=True)
class Doing:
    """Emits tools + 0, tools + 1, ... and what it does at each number."""

    name: str
    count: int = 3
    at: int | None = None
    act: str = ""  # "raise", "odd", "kill", "exit", "sleep", "log", "eat"
    folder: Path | None = None  # where it remembers what it did, and how often it was begun

    def run(self, tools: int, emit: Callable[[Any], None]) -> None:
        attempt = self._begin()
        for number in range(self.count):
            if number == self.at:
                self._act(attempt)
            emit(tools + number)

    def detached(self) -> Doing:
        return self

    def _begin(self) -> int:
        if self.folder is None:
            return 0
        path = self.folder / f"{self.name}.begun"
        begun = len(path.read_text()) if path.exists() else 0
        path.write_text("x" * (begun + 1))
        (self.folder / f"{self.name}.pid").write_text(str(os.getpid()))
        return begun

    def _act(self, attempt: int) -> None:
        if self.act == "raise":
            raise SourceError(f"{self.name}: no good")
        if self.act == "odd":
            raise OddError("one", "two")
        if self.act == "kill" or (self.act == "kill once" and attempt == 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.act == "exit":
            os._exit(7)
        if self.act == "sleep":
            time.sleep(600)
        if self.act == "eat":
            bytearray(2**30)
        if self.act == "log":
            logging.getLogger("tests.worker").warning("%s says %d", self.name, 7)


@dataclass(frozen=True)
class Moving:
    """Emits 0, 1, ...; what is durable is in `kept`. Its worker dies once, at the third."""

    name: str
    count: int
    kept: Path  # what is done for good
    remote: Path  # in place of the disk of the worker: what was done there, and how often it died
    known: int | None = None  # of a worker that does not see `kept`

    def run(self, tools: int, emit: Callable[[Any], None]) -> None:
        known = self._known()
        for number in range(self.count):
            if number >= known:
                self._do(number)
            emit(number)

    def detached(self) -> Moving:
        return replace(self, known=self._known())

    def _known(self) -> int:
        return len(list(self.kept.iterdir())) if self.known is None else self.known

    def _do(self, number: int) -> None:
        with (self.remote / "done").open("a") as file:
            file.write(f"{number} ")
        if number == 2 and not (self.remote / "died").exists():
            (self.remote / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.known is None:
            (self.kept / str(number)).touch()
