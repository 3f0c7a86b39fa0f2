"""How far a build is, on stderr: for each source documents, tokens, tokens per second, time left.

In: `Progress` of any source, in any order.  Out: a bar for each source on a terminal; elsewhere, a
line now and then for each source that moved.
Promise: stdout stays clean. What an earlier run did is not counted as speed. Time left is told when
the share of the source is known.
Not here: counting (build/meter.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from shardmill.build import Progress
from shardmill.cli.stdout import SafeConsole, safe_bars

LINE_SECONDS = 30.0
"""Between two lines of one source, where there is no terminal."""

Clock = Callable[[], float]
Key = tuple[str, int]


@dataclass(slots=True)
class SourceState:
    """What is known of one source."""

    first: Progress  # the base of speeds
    began: float
    last: Progress
    at: float  # when `last` came

    @property
    def rate(self) -> float | None:
        """Tokens per second; None before it can be told."""
        seconds = self.at - self.began
        return (self.last.tokens - self.first.tokens) / seconds if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        if self.last.share is None or self.first.share is None:
            return None
        made = self.last.share - self.first.share
        return (1 - self.last.share) * (self.at - self.began) / made if made > 0 else None

    def words(self) -> str:
        """12,345 documents, 6,789,012 tokens, 1.23M tokens/s, 45%, 0:01:02 left"""
        parts = [f"{self.last.documents:,} documents", f"{self.last.tokens:,} tokens"]
        if self.rate is not None:
            parts.append(f"{self.rate / 1e6:.2f}M tokens/s")
        if self.last.share is not None:
            parts.append(f"{self.last.share:.0%}")
        left = self.seconds_left
        if left is not None:
            minutes, seconds = divmod(round(left), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left")
        return ", ".join(parts)


class Board:
    """The sources of a build."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._states: dict[Key, SourceState] = {}

    def note(self, progress: Progress) -> SourceState:
        now = self._clock()
        key = (progress.source, progress.feed)
        if key not in self._states:
            self._states[key] = SourceState(progress, now, progress, now)
        state = self._states[key]
        state.last, state.at = progress, now
        return state


class Lines:
    """A line for each source that moved, every `LINE_SECONDS`."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._board = Board(clock)
        self._moved: dict[Key, SourceState] = {}
        self._told = clock()

    def show(self, progress: Progress) -> None:
        self._moved[(progress.source, progress.feed)] = self._board.note(progress)
        if self._clock() - self._told < LINE_SECONDS:
            return
        for (source, _), state in self._moved.items():
            self._console.print(f"{source}: {state.words()}", markup=False, highlight=False)
        self._moved.clear()
        self._told = self._clock()


class BarsOfSources:
    """A bar for each source, drawn over the last ones."""

    def __init__(self, bars: Bars) -> None:
        self._bars, self._board = bars, Board()
        self._tasks: dict[Key, TaskID] = {}

    def show(self, progress: Progress) -> None:
        state = self._board.note(progress)
        key = (progress.source, progress.feed)
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(progress.source, total=None, words="")
        total = None if progress.share is None else 1.0
        self._bars.update(
            self._tasks[key], completed=progress.share or 0.0, total=total, words=state.words()
        )


@contextmanager
def build_progress(console: Console | None = None) -> Iterator[Callable[[Progress], None]]:
    """A callback for `build_store`; `console` stands for stderr."""
    console = console or SafeConsole(stderr=True, soft_wrap=True)
    if not console.is_terminal:
        yield Lines(console).show
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with safe_bars(*columns, console=console) as bars:
        yield BarsOfSources(bars).show
