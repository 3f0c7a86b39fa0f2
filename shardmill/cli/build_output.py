"""What the build commands share: their options, progress on stderr, and the receipt."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from shardmill.building import BuildReport, Progress, has_unfinished_build
from shardmill.building.api import build, output_folder
from shardmill.cli.options import AsJson, TokenizerName, parse_bytes
from shardmill.cli.terminal import SafeConsole, safe_bars
from shardmill.store import is_finished
from shardmill.urls import Url

LINE_SECONDS = 30.0
"""Between two lines of one source, where there is no terminal."""

Clock = Callable[[], float]
Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of every build."""

    inputs: list[str]
    out: Annotated[str, typer.Option(help="Where the store goes: a folder, or s3://bucket/path.")]
    tokenizer: TokenizerName
    name: Annotated[str | None, typer.Option(help="Name of the data, recorded.")] = None
    on_bad: Annotated[
        Literal["error", "skip"] | None,
        typer.Option(help="Rows that cannot be read: stop at the first, or skip and list them."),
    ] = None
    shard_bytes: Annotated[str, typer.Option(help="Size of a shard, e.g. 128MiB.")] = "128MiB"
    engine: Annotated[
        Literal["auto", "fast", "reference"], typer.Option(help="How text is encoded.")
    ] = "auto"
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished build.")] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a store, or start again.")
    ] = False
    scratch: Annotated[
        Path | None,
        typer.Option(help="Where a store for a URL is built before it is sent. Default: cache."),
    ] = None
    report: Annotated[
        Path | None, typer.Option(help="Write time, machine and counts to this JSON file.")
    ] = None
    as_json: AsJson = False


def run_build(options: BuildOptions, **more: Any) -> None:
    """Build with these options, and print the receipt; `more` replaces options."""
    keywords = {**vars(options), "shard_bytes": parse_bytes(options.shard_bytes, "shard_bytes")}
    keywords = {name: keywords[name] for name in keywords if name not in ("as_json", "dry_run")}
    with (
        build_progress() as progress,
        _says_how_to_resume(options),
        redirect_stdout(sys.stderr),  # Ray prints there what goes wrong on its nodes
    ):
        done = build(**(keywords | more), on_progress=progress.show, on_push=progress.push)
    print(json.dumps(done.to_json()) if options.as_json else _receipt(options, done))


def _receipt(options: BuildOptions, done: BuildReport) -> str:
    """One line: what was built, what was left out, time and memory."""
    ledger, documents = done.manifest.ledger, done.manifest.ledger.documents
    where = done.url or Path(options.out)
    if ledger.chat is None:
        shards = sum(len(split.shards) for split in done.manifest.splits.values())
        empty = {"empty": documents.empty} if documents.empty else {}
        reasons = {**empty, **documents.dropped}
        why = f" ({_counts(reasons)})" if reasons else ""
        text = (
            f"{where}: {documents.kept:,} documents, {ledger.tokens.kept:,} tokens, "
            f"{shards:,} shards; left out: {sum(reasons.values()):,} documents{why}, over budget: "
            f"{ledger.tokens.over_budget:,} tokens"
        )
    else:
        text = (
            f"{where}: {documents.kept:,} conversations, {ledger.chat.turns:,} turns, "
            f"{ledger.tokens.kept:,} tokens, {ledger.chat.trained_tokens:,} trained; "
            f"left out: {_counts(documents.dropped) or 'none'}"
        )
    if ledger.repaired:
        text += f"; repaired: {_counts(ledger.repaired)}"
    if ledger.chat is not None:
        text += "; mask proved"
    text += f"; {done.seconds:.1f} s"
    if done.cost is not None and done.utilisation is not None:
        workers = f"{done.cost.num_workers} workers, " if done.cost.num_workers > 1 else ""
        text += (
            f" ({workers}{done.utilisation:.0%} of {done.cost.num_cores} cores, at most "
            f"{done.cost.peak_bytes / 2**20:,.0f} MiB a process)"
        )
    return text


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {why}" for why, count in counts.items())


@contextmanager
def _says_how_to_resume(options: BuildOptions) -> Iterator[None]:
    """After Ctrl-C: whether anything was kept, and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        folder, url = output_folder(options.out, options.scratch)
        # a finished store in the scratch folder is only sent again
        kept = has_unfinished_build(folder) or (url is not None and is_finished(folder))
        what = "what is done is kept: continue with --resume" if kept else "nothing was kept"
        where = folder if url is None else str(Url(url)).rstrip("/")
        print(f"{where}: stopped; {what}", file=sys.stderr)
        raise


@dataclass(slots=True)
class SourceProgress:
    """How far one source is. What an earlier run did does not count as speed."""

    first: Progress
    began: float
    last: Progress
    at: float  # when `last` came

    @property
    def rate(self) -> float | None:
        """Tokens per second; None at the start."""
        seconds = self.at - self.began
        return (self.last.tokens - self.first.tokens) / seconds if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """None when the size of the source is unknown."""
        if self.last.share is None or self.first.share is None:
            return None
        done = self.last.share - self.first.share
        return (1 - self.last.share) * (self.at - self.began) / done if done > 0 else None

    def words(self) -> str:
        """12,345 documents, 6,789,012 tokens, 1.23M tokens/s, 45%, 0:01:02 left"""
        parts = [f"{self.last.documents:,} documents", f"{self.last.tokens:,} tokens"]
        if self.rate is not None:
            parts.append(f"{self.rate / 1e6:.2f}M tokens/s")
        if self.last.share is not None:
            parts.append(f"{self.last.share:.0%}")
        if self.seconds_left is not None:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left")
        return ", ".join(parts)


class ProgressLines:
    """A line for each source that moved, every `LINE_SECONDS`."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._sources: dict[Key, SourceProgress] = {}
        self._moved: dict[Key, None] = {}
        self._printed = clock()

    def note(self, progress: Progress) -> SourceProgress:
        key, now = (progress.source, progress.feed), self._clock()
        state = self._sources.setdefault(key, SourceProgress(progress, now, progress, now))
        state.last, state.at = progress, now
        return state

    def show(self, progress: Progress) -> None:
        self.note(progress)
        self._moved[progress.source, progress.feed] = None
        if self._clock() - self._printed < LINE_SECONDS:
            return
        for key in self._moved:
            text = f"{key[0]}: {self._sources[key].words()}"
            self._console.print(text, markup=False, highlight=False)
        self._moved.clear()
        self._printed = self._clock()

    def push(self, done: int, total: int) -> None:
        pass


class ProgressDisplay(ProgressLines):
    """A bar for each source, and one for the bytes that are sent."""

    def __init__(self, console: Console, bars: Bars) -> None:
        super().__init__(console)
        self._bars = bars
        self._tasks: dict[Key, TaskID] = {}

    def show(self, progress: Progress) -> None:
        words = self.note(progress).words()
        self._update((progress.source, progress.feed), progress.share, words)

    def push(self, done: int, total: int) -> None:
        words = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
        self._update(("push", -1), done / total if total else None, words)

    def _update(self, key: Key, share: float | None, words: str) -> None:
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(key[0], total=None, words="")
        total = None if share is None else 1.0
        self._bars.update(self._tasks[key], completed=share or 0.0, total=total, words=words)


@contextmanager
def build_progress(console: Console | None = None) -> Iterator[ProgressLines]:
    """Progress of a build on stderr, or on `console`: bars on a terminal, else lines."""
    console = console or SafeConsole(stderr=True, soft_wrap=True)
    if not console.is_terminal:
        yield ProgressLines(console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with safe_bars(*columns, console=console) as bars:
        yield ProgressDisplay(console, bars)
