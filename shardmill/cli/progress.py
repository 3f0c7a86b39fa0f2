"""A progress bar for builds, on stderr: documents, tokens, tokens per second, time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from shardmill.build import Progress


class TokenRateColumn(ProgressColumn):
    """Tokens so far and per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed or 0.0
        return Text(f"{int(task.completed):,} tokens  {speed / 1e6:.2f}M/s")


@contextmanager
def build_progress() -> Iterator[Callable[[Progress], None]]:
    """A callback for `build_store` that draws one bar for each source."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TokenRateColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(progress: Progress) -> None:
            if progress.source not in tasks:
                tasks[progress.source] = bars.add_task(progress.source, total=None)
            total = progress.tokens / progress.share if progress.share else None
            bars.update(tasks[progress.source], completed=progress.tokens, total=total)

        yield show
