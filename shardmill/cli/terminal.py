"""What the command line writes: stdout, stderr and log lines, fit for a terminal.

Names, documents, manifests and templates are the data of others. A terminal obeys some characters
and hides others, so they are escaped here, once, whatever a command prints: `printable`. Colours
are made by `SafeConsole` alone, from text that was escaped before. What goes to stderr is also
scrubbed of secrets; on stdout is data, which is never changed beyond the escapes.

What cannot be written to stdout, at any print or at the end, is an `UnheardError`, and nothing is
left in buffers that would fail once more when the process ends. A character that the terminal's
encoding does not have is written \\u00e9, not an error.

Sizes as people write them: 134217728, 128MiB, 1GB.

What a shell offers behind an option, beside what typer knows by itself.

Promise: a store that is named before the option is looked at by its manifest alone; whatever is
wrong with it, nothing is offered and nothing is said: a person is in the middle of a word.

Folders of this machine, as a call names them.

What is written like a URL or a hub dataset never becomes a local folder called s3: or hub:owner.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.segment import Segment

from shardmill.arguments import is_url
from shardmill.errors import OptionError, ShardmillError
from shardmill.store.manifest import read_manifest
from shardmill.urls import scrub

# Controls but "\n" and "\t"; what turns the direction of text; what has no width, or breaks lines;
# halves of characters. Not the joiners, which see.
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
    """The text with all that a terminal would obey or hide written out: \\x1b, \\u202e.

    Line breaks and tabs stay. Only ASCII controls are written \\x..: what is escaped in a line of
    JSON, where there are none, is still the same JSON.
    """
    return text if text.isascii() and text.isprintable() else _ESCAPED.sub(_escape, text)


def one_line(text: str) -> str:
    """The same for a name or value in a line: line breaks and tabs are written out, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def indented(text: str) -> str:
    """A message whose further lines cannot be taken for messages of their own."""
    return re.sub(r"\n(?=\S)", "\n  ", text)


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    if number < 0x20:
        return found[0].encode("unicode_escape").decode("ascii")
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class SafeConsole(Console):
    """A rich console for text of others: its own colours are all that reaches the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def safe_bars(*columns: str | ProgressColumn, console: Console | None = None) -> Progress:
    """Bars on stderr that are gone when the work is done; nothing where there is no terminal."""
    console = console or SafeConsole(stderr=True)
    # rich would take escapes in what is printed meanwhile for colours of ours
    return Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )


class UnheardError(Exception):
    """stdout took no more. No OSError: libraries that print take those for their own."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror or str(cause))
        self.is_closed_pipe = isinstance(cause, BrokenPipeError)


class _Stdout:
    """stdout as it is, but for its errors."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with _unheard():
            return self._file.write(text)

    def flush(self) -> None:
        with _unheard():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Escaping:
    """A stream whose text is escaped. rich, which escapes in `SafeConsole`, writes past it."""

    def __init__(self, file: Any, *, scrubs: bool) -> None:
        self.rich_proxied_file = file
        self._scrubs = scrubs

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(scrub(text) if self._scrubs else text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def watched_stdout() -> Iterator[None]:
    """For the time of a command."""
    file = sys.stdout
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="backslashreplace")
    watched = _Stdout(file)
    try:
        with redirect_stdout(cast(TextIO, _Escaping(watched, scrubs=False))):
            yield
        watched.flush()
    except UnheardError:
        _discard(file)
        raise


@contextmanager
def messages(*loggers: str, worded: Callable[[str], str] = str) -> Iterator[None]:
    """stderr for the time of a command: escaped, scrubbed, and the only log lines are those of
    these loggers, from INFO on, `worded` for who called. What libraries log is for programs."""
    file = sys.stderr
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="backslashreplace")
    stream = cast(TextIO, _Escaping(file, scrubs=True))
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.INFO)
    handler.setFormatter(_Lines(worded))
    silent = logging.NullHandler()  # else Python itself prints what has no handler
    named = [logging.getLogger(name) for name in loggers]
    levels = [logger.level for logger in named]
    logging.getLogger().addHandler(silent)
    for logger in named:
        logger.addHandler(handler)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
    try:
        with redirect_stderr(stream):
            yield
    finally:
        logging.getLogger().removeHandler(silent)
        for logger, level in zip(named, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


class _Lines(logging.Formatter):
    def __init__(self, worded: Callable[[str], str]) -> None:
        super().__init__("%(message)s")
        self._worded = worded

    def format(self, record: logging.LogRecord) -> str:
        return indented(self._worded(super().format(record)))


@contextmanager
def _unheard() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnheardError(error) from error


def _discard(file: TextIO) -> None:
    """What is still buffered goes nowhere: the interpreter flushes it when it ends."""
    with suppress(io.UnsupportedOperation):  # not a file of the system
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """The number of bytes; KiB, MiB, GiB are powers of 1024, KB, MB, GB of 1000."""
    match = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise OptionError(f"size {text!r}: wanted a number of bytes, or one like 128MiB or 1GB")
    return int(match[1]) * _UNITS[match[2].upper()]


def complete_split(ctx: typer.Context, incomplete: str) -> list[str]:
    """The splits of the first store that stands before. An option that waits for its value leaves
    the words before it unparsed."""
    places = [ctx.params.get("folder"), ctx.params.get("source"), *ctx.args]
    for place in filter(None, places):
        try:
            splits = read_manifest(Path(place)).splits
        except (ShardmillError, OSError, ValueError):
            continue
        return [name for name in splits if name.startswith(incomplete)]
    return []


def check_local(place: str | Path, name: str, *, instead: str = "") -> None:
    """Refuse a place that is not a folder of this machine; `name` is the flag or argument."""
    is_dataset = str(place).startswith("hub:")
    if not (is_dataset or is_url(place)) or Path(place).exists():
        return
    found = "a dataset of the hub" if is_dataset else "a URL"
    raise OptionError(
        f"{name} {place}: {found}, wanted a folder of this machine{instead}; a folder of that name "
        f"is written ./{place}"
    )


def check_file(path: Path, name: str) -> None:
    """Refuse to write where something other than a file is: a link, a device, a pipe, a folder."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise OptionError(f"{name} {path}: found a link, device, pipe or folder; wanted a new file")
