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
    """A callback for `build_store` that draws one bar for each source and phase."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TokenRateColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[tuple[str, str], TaskID] = {}

        def show(progress: Progress) -> None:
            key = (progress.phase, progress.source)
            if key not in tasks:
                tasks[key] = bars.add_task(f"{progress.phase} {progress.source}", total=None)
            bars.update(tasks[key], completed=progress.tokens, total=progress.max_tokens)

        yield show
