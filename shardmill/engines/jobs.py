"""A task on its way through an engine: what it noted, and how many processes it took with it.

In: what becomes of one attempt after the other.  Out: whether there is another.
Promise: an attempt that notes more than all before it begins the counts anew; without that a task
is lost at the third death of a worker, and at the tenth loss of one that need not be its fault.
Alike in every engine.
Not here: how a death is noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from shardmill.errors import BuildError
from shardmill.protocols import Task, TaskReport

MOST_DEATHS = 3
MOST_LOSSES = 10


@dataclass(slots=True)
class Job:
    """One task on its way."""

    number: int
    task: Task
    notes: int = 0  # in this attempt
    best: int = 0  # in any attempt
    deaths: int = 0  # of workers, since an attempt noted more than those before it
    losses: int = 0  # of workers that went with their machine, since then

    @property
    def name(self) -> str:
        return self.task.name

    def noted(self) -> None:
        self.notes += 1
        if self.notes > self.best:
            self.best, self.deaths, self.losses = self.notes, 0, 0

    def died(self, words: str) -> TaskReport | None:
        """Its worker died, perhaps of it; None: it is to be done again."""
        self.deaths += 1
        if self.deaths >= MOST_DEATHS:
            return self._lost(f"{self.deaths} workers died of it, the last one {words}")
        self._say_again(words)
        return None

    def parted(self, words: str) -> TaskReport | None:
        """Its worker went for a reason of its own; None: it is to be done again."""
        self.losses += 1
        if self.losses >= MOST_LOSSES:
            return self._lost(f"{self.losses} workers were lost at it, the last one {words}")
        self._say_again(words)
        return None

    def _say_again(self, words: str) -> None:
        self.notes = 0
        logging.getLogger(__name__).warning(
            "%s: its worker died (%s); it is done again", self.name, words
        )

    def _lost(self, words: str) -> TaskReport:
        error = BuildError(
            f"{self.name}: {words}; what the others did is kept: look for an input that takes too "
            "much memory there, build with fewer workers, and go on with resume=True"
        )
        return TaskReport(task=self.number, error=error, lost=True)


def next_job(queue: Iterator[tuple[int, Task]]) -> Job | None:
    """The next of the numbered tasks; None: there is no other."""
    found = next(queue, None)
    return None if found is None else Job(number=found[0], task=found[1])
