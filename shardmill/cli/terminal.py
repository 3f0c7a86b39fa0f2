"""What the command line writes to stdout and stderr, safe for a terminal.

Names, documents, manifests and templates come from other people. A terminal obeys some characters
and hides others, so everything that a command prints is escaped here (`printable`). Only
`SafeConsole` adds colours, to text that was escaped before. Text for stderr is also scrubbed of
secrets; stdout is data, which is only escaped.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from shardmill.urls import scrub

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn, TaskID

    from shardmill.building import Progress

LINE_SECONDS = 30.0
"""Between two lines of one source, where there is no terminal."""
_Key = tuple[str, int]  # name and number of a source

# Controls but "\n" and "\t"; what turns the direction of text; what has no width, or breaks lines;
# halves of characters. Joiners have their own rule.
_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f"
)
_JOINERS = "\u200c\u200d"
# A joiner belongs to emoji and to Persian or Indic words; elsewhere it only hides.
_BESIDE = rf"[^\x00-\x7f{_HIDDEN}{_JOINERS}]"
JOINED = re.compile(rf"(?<={_BESIDE})[{_JOINERS}](?={_BESIDE})")
_ESCAPED = re.compile(rf"[{_HIDDEN}]|(?<!{_BESIDE})[{_JOINERS}]|[{_JOINERS}](?!{_BESIDE})")


def printable(text: str) -> str:
    """The text with all characters that a terminal obeys or hides as escapes: \\x1b, \\u202e.

    Line breaks and tabs stay. Only ASCII controls are written \\x..; JSON has none, so an escaped
    line of JSON is still the same JSON.
    """
    return text if text.isascii() and text.isprintable() else _ESCAPED.sub(_escape, text)


def one_line(text: str) -> str:
    """The same for a name or value in a line: line breaks and tabs are escaped, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def visible(text: str) -> str:
    """The text with every unprintable character escaped; a line break is marked and kept."""
    if text.isprintable():
        return text
    joined = {found.start() for found in JOINED.finditer(text)}
    return "".join(
        one if at in joined or one.isprintable() else _LINE_BREAK.get(one) or _escaped(one)
        for at, one in enumerate(text)
    )


_LINE_BREAK = {"\n": "\\n\n"}


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def indented(text: str) -> str:
    """A message whose further lines cannot be taken for other messages."""
    return re.sub(r"\n(?=\S)", "\n  ", text)


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    if number < 0x20:
        return _escaped(found[0])
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class SafeConsole(Console):
    """A rich console that escapes what it prints: only its own colours reach the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def safe_bars(*columns: str | ProgressColumn, console: Console | None = None) -> Bars:
    """Bars on stderr that vanish when the work is done; nothing where there is no terminal."""
    from rich.progress import Progress as Bars

    console = console or SafeConsole(stderr=True)
    # rich would take escapes in what is printed meanwhile for its own colours
    return Bars(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextmanager
def one_bar(title: str, *, of_bytes: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; the callback takes how much is done, and how much there is in all."""
    from rich import progress as rich

    speed = (rich.DownloadColumn(), rich.TransferSpeedColumn())
    columns = (rich.BarColumn(bar_width=30), *(speed if of_bytes else (rich.TaskProgressColumn(),)))
    with safe_bars(rich.TextColumn(title), *columns, rich.TimeRemainingColumn()) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


# progress of a build


class BuildProgress:
    """A bar for each source; without bars, a line for each source that moved, every
    `LINE_SECONDS`."""

    def __init__(
        self,
        console: Console,
        bars: Bars | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._bars, self._clock = console, bars, clock
        self._tasks: dict[_Key, TaskID] = {}
        self._first: dict[_Key, tuple[Progress, float]] = {}  # and when it came
        self._moved: dict[_Key, str] = {}
        self._printed = clock()

    def show(self, progress: Progress) -> None:
        key, words = (progress.source, progress.feed), self.words(progress)
        if self._bars is not None:
            self._update(self._bars, key, progress.share, words)
            return
        self._moved[key] = words
        if self._clock() - self._printed < LINE_SECONDS:
            return
        for (source, _), words in self._moved.items():
            self._console.print(f"{source}: {words}", markup=False, highlight=False)
        self._moved.clear()
        self._printed = self._clock()

    def words(self, progress: Progress) -> str:
        """12,345 documents, 6,789,012 tokens, 1.23M tokens/s, 45%, 0:01:02 left

        What an earlier run did does not count as speed.
        """
        now = self._clock()
        first, began = self._first.setdefault((progress.source, progress.feed), (progress, now))
        seconds, share = now - began, progress.share
        parts = [f"{progress.documents:,} documents", f"{progress.tokens:,} tokens"]
        if seconds > 0:
            parts.append(f"{(progress.tokens - first.tokens) / seconds / 1e6:.2f}M tokens/s")
        if share is not None:
            parts.append(f"{share:.0%}")
            done = share - (share if first.share is None else first.share)
            if done > 0:
                minutes, left = divmod(round((1 - share) * seconds / done), 60)
                parts.append(f"{minutes // 60}:{minutes % 60:02}:{left:02} left")
        return ", ".join(parts)

    def _update(self, bars: Bars, key: _Key, share: float | None, words: str) -> None:
        if key not in self._tasks:
            self._tasks[key] = bars.add_task(key[0], total=None, words="")
        total = None if share is None else 1.0
        bars.update(self._tasks[key], completed=share or 0.0, total=total, words=words)


@contextmanager
def build_progress(console: Console | None = None) -> Iterator[BuildProgress]:
    """Progress of a build on stderr, or on `console`: bars on a terminal, else lines."""
    console = console or SafeConsole(stderr=True, soft_wrap=True)
    if not console.is_terminal:
        yield BuildProgress(console)
        return
    from rich.progress import BarColumn, SpinnerColumn, TextColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with safe_bars(*columns, console=console) as bars:
        yield BuildProgress(console, bars)


# stdout and stderr


class StdoutError(Exception):
    """stdout cannot be written. Not an OSError: libraries that print would take it for theirs."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror or str(cause))
        self.is_closed_pipe = isinstance(cause, BrokenPipeError)


class _SafeStream:
    """A stream whose text is cleaned; `raises` gives the error for a write that fails."""

    def __init__(
        self,
        file: Any,
        clean: Callable[[str], str],
        raises: Callable[[OSError], Exception] = lambda error: error,
    ) -> None:
        self._file, self._clean, self._raises = file, clean, raises

    @property
    def rich_proxied_file(self) -> _SafeStream:
        """What rich writes to, since `SafeConsole` escapes and adds colours."""
        return _SafeStream(self._file, str, self._raises)

    def write(self, text: str) -> int:
        try:
            self._file.write(self._clean(text))
        except OSError as error:
            raise self._raises(error) from error
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise self._raises(error) from error

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def close(self) -> None:
        """Nothing: libraries close a stream that they found, and this file is not ours."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def watched_stdout() -> Iterator[None]:
    """stdout for the time of a command: escaped, and a write that fails is a `StdoutError`.

    A character that the terminal's encoding lacks is written \\u00e9.
    """
    file = sys.stdout
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="backslashreplace")
    stream = _SafeStream(file, printable, StdoutError)
    try:
        with redirect_stdout(cast(TextIO, stream)):
            yield
        stream.flush()
    except StdoutError:
        # what is still buffered goes nowhere: else the interpreter fails to flush it at its end
        with suppress(io.UnsupportedOperation):  # not a file of the system
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
        raise


@contextmanager
def messages(*loggers: str) -> Iterator[None]:
    """stderr for the time of a command: escaped and scrubbed. Of log lines it shows those of these
    loggers, from INFO on; what other libraries log is for programs."""
    file = sys.stderr
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="backslashreplace")
    stream = cast(TextIO, _SafeStream(file, lambda text: printable(scrub(text))))
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.INFO)
    handler.setFormatter(_Lines())
    with ExitStack() as undo:
        silent = logging.NullHandler()  # else Python prints what has no handler
        for name, one in {"": silent, **dict.fromkeys(loggers, handler)}.items():
            logger = logging.getLogger(name)
            undo.callback(logger.setLevel, logger.level)
            undo.callback(logger.removeHandler, one)
            logger.addHandler(one)
            if name and logger.getEffectiveLevel() > logging.INFO:
                logger.setLevel(logging.INFO)
        undo.enter_context(redirect_stderr(stream))
        yield


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))
