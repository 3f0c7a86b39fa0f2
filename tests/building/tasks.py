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
    first: int = 0  # number that it emits first

    def run(self, tools: int, emit: Callable[[Any], None]) -> None:
        attempt = self._begin()
        for number in range(self.first, self.count):
            if number == self.at:
                self._act(attempt)
            emit(tools + number)

    def after(self, _note: int) -> Doing:
        return replace(self, first=self.first + 1)

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
class Stepping:
    """Emits 0, 1, ..., and writes down what it does. Its worker dies once, in the third step."""

    name: str
    count: int
    folder: Path
    first: int = 0

    def run(self, _tools: int, emit: Callable[[Any], None]) -> None:
        for number in range(self.first, self.count):
            with (self.folder / "done").open("a") as file:
                file.write(f"{number} ")
            if number == 2 and not (self.folder / "died").exists():
                (self.folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            emit(number)

    def after(self, note: int) -> Stepping:
        return replace(self, first=note + 1)
