"""How far a build is, on stderr: for each source documents, tokens, tokens per second, time left.

In: `Progress` of any source, in any order.  Out: a bar for each source on a terminal; elsewhere, a
line now and then for each source that moved.
Promise: stdout stays clean. What an earlier run did is not counted as speed. Time left is told when
the share of the source is known.
Not here: counting (build/meter.py).

What every build command checks first and tells at the end.

Where the store of a build goes: a folder of this machine, or a URL.

In: --out and --scratch.  Out: the folder to build in; behind the build, what a receipt tells.
Promise: a URL is looked at before the build, and has the store when the block ends well.
Not here: scratch and sending (remote).
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from shardmill.building import BuildPlan, BuildReport, Progress, has_unfinished_build
from shardmill.cli.terminal import SafeConsole, byte_bar, check_local, safe_bars
from shardmill.errors import OptionError, UnfinishedBuildError
from shardmill.remote.build_to import build_to, scratch_store
from shardmill.store import Ledger
from shardmill.urls import Url

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


def check_place(out: Path, report: Path | None, *, goes_on: bool) -> None:
    """Before any work: is an earlier build in the way, can the report be written?

    `goes_on`: --resume or --overwrite was given.
    """
    if has_unfinished_build(out) and not goes_on:
        raise UnfinishedBuildError(
            f"{out}: an earlier build stopped half-way: go on with --resume, "
            "or start again with --overwrite"
        )
    if report is not None and not report.parent.is_dir():
        raise OptionError(f"--report {report}: there is no folder {report.parent}")
    if report is not None and report.is_dir():
        raise OptionError(f"--report {report}: this is a folder; name a file in it")


def check_report(report: Path | None, source: object) -> None:
    """Refuse a report that would be written over what is read."""
    if report is None or not report.exists():
        return
    for file in getattr(source, "files", ()):
        if isinstance(file.place, Path) and file.place.samefile(report):
            raise OptionError(f"--report {report}: this file is read; name another for the report")


def run_facts(done: BuildReport) -> dict[str, Any]:
    """What a store never holds: when, where and how long."""
    return {
        "store": str(done.folder),
        "seconds": round(done.seconds, 3),
        "resumed": done.resumed,
        "workers": done.cost.num_workers if done.cost else None,
        "cores": done.cost.num_cores if done.cost else None,
        "cpu_seconds": round(done.cost.cpu_seconds, 3) if done.cost else None,
        "utilisation": round(done.utilisation, 3) if done.utilisation is not None else None,
        "peak_bytes": done.cost.peak_bytes if done.cost else None,
        "ledger": msgspec.to_builtins(done.manifest.ledger),
        "machine": platform.platform(),
        "python": platform.python_version(),
    }


@contextmanager
def told_how_to_resume(out: Path) -> Iterator[None]:
    """Behind Ctrl-C: whether anything was kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if has_unfinished_build(out):
            print(f"{out}: stopped; what is done is kept: go on with --resume", file=sys.stderr)
        else:
            print(f"{out}: stopped before anything was done for good", file=sys.stderr)
        raise


def left_out_words(ledger: Ledger) -> str:
    """How many documents were left out, and why."""
    documents = ledger.documents
    reasons = {**({"empty": documents.empty} if documents.empty else {}), **documents.dropped}
    words = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    return f"{sum(reasons.values()):,} documents{f' ({words})' if words else ''}"


def repaired_words(ledger: Ledger) -> str:
    """How many kept documents were changed, and why; empty when none was."""
    words = ", ".join(f"{count:,} {why}" for why, count in ledger.repaired.items())
    return f"; repaired: {words}" if words else ""


def cost_words(done: BuildReport) -> str:
    """How well the machine was used; empty when nothing was built."""
    if done.cost is None or done.utilisation is None:
        return ""
    workers = f"{done.cost.num_workers} workers, " if done.cost.num_workers > 1 else ""
    return (
        f" ({workers}{done.utilisation:.0%} of {done.cost.num_cores} cores, at most "
        f"{done.cost.peak_bytes / 2**20:,.0f} MiB a process)"
    )


def print_plan(plan: BuildPlan, *, as_json: bool) -> None:
    """What --dry-run tells."""
    if as_json:
        print(json.dumps({**asdict(plan), "disk_bytes": plan.disk_bytes}))
        return
    for feed in plan.feeds:
        print(
            f"{feed.source}: {_size(feed.num_bytes)} of input in {feed.num_units:,} units, about "
            f"{_count(feed.num_tokens)} tokens, {_size(feed.disk_bytes)} on disk until it is done"
        )
    print(
        f"workers: {plan.workers}; memory: about {_size(plan.memory_bytes)}; largest document: "
        f"{_size(plan.most_document)}; disk: about {_size(plan.disk_bytes)}, "
        f"{_size(plan.free_bytes)} are free"
    )


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB"


def _count(number: int | None) -> str:
    return "an unknown number of" if number is None else f"{number:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Made by `open_output`."""

    folder: Path  # where the store is built
    url: str | None  # where it is sent then
    scratch: Path | None
    shown: str  # for people
    facts: dict[str, Any] = field(default_factory=dict)  # what a receipt for machines adds

    def replaces(self, *, resume: bool, overwrite: bool) -> bool:
        """Whether the build may replace what stands in its folder. In a scratch folder a store
        that a resume finds is one that was not sent: the place there is what it overwrites."""
        return overwrite and not (resume and self.url is not None)

    @contextmanager
    def opened(self, *, resume: bool, overwrite: bool) -> Iterator[Path]:
        """The folder to build in. At the end of the block the store goes where it was wanted."""
        if self.url is None:
            yield self.folder
            return
        is_built = False
        try:
            with (
                _bar_when_needed() as progress,
                build_to(
                    self.url,
                    scratch=self.scratch,
                    resume=resume,
                    overwrite=overwrite,
                    progress=progress,
                ) as out,
            ):
                yield out.folder
                is_built = True
        except KeyboardInterrupt:
            if is_built:
                print(
                    f"{self.shown}: stopped; what is built and sent is kept: go on with --resume",
                    file=sys.stderr,
                )
            raise
        sent = out.receipt
        self.facts.update(
            store=self.shown,
            sent_files=sent.moved_files if sent else 0,
            sent_bytes=sent.moved_bytes if sent else 0,
        )


def open_output(out: str, scratch: Path | None) -> Output:
    """What --out names. Asks nobody anything yet."""
    if "://" not in out:
        if scratch is not None:
            raise OptionError(
                f"--scratch {scratch}: is for a store that goes to a URL, but --out is the folder "
                f"{out}, in which it is built"
            )
        check_local(out, "--out", instead=", or a URL such as s3://bucket/path")
        return Output(folder=Path(out), url=None, scratch=None, shown=str(Path(out)))
    if scratch is not None:
        check_local(scratch, "--scratch")
    folder = scratch_store(out, scratch)
    return Output(folder=folder, url=out, scratch=scratch, shown=str(Url(out)).rstrip("/"))


@contextmanager
def _bar_when_needed() -> Iterator[Callable[[int, int], None]]:
    """A bar that appears with the first bytes: until then the build has one of its own."""
    with ExitStack() as bars:
        show: Callable[[int, int], None] | None = None

        def progress(done: int, total: int) -> None:
            nonlocal show
            if show is None:
                show = bars.enter_context(byte_bar("push"))
            show(done, total)

        yield progress
