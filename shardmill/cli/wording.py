"""Errors in the words of the command line: options as flags, and a typo with the nearest name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardmill.arguments import nearest
from shardmill.cli.app import Call, RootGroup, every_command
from shardmill.errors import OptionError, ShardmillError, as_keyword

_FLAGS = {"inputs": "--input", "from_format": "--from", "to_format": "--to"}
"""Keywords whose flag has another name."""
_CHOICE = re.compile(r"'(?P<word>[^']*)' is not one of (?P<known>.*?)\.?$", re.DOTALL)
_KINDS = {"valid integer": "a whole number", "valid number": "a number", "valid float": "a number"}
"""What typer says of values, and what it means."""
_SYSTEM = re.compile(r"\[Errno [0-9]+\] ([A-Z][^:'\"]*): '([^']+)'")
_EMPTY = re.compile(r"(--[a-z][a-z-]*)=")


def check_words(words: Sequence[str]) -> None:
    """Refuse words that can only be a slip: an empty one would mean the current folder."""
    for number, word in enumerate(words):
        flag = _EMPTY.fullmatch(word)
        before = words[number - 1] if number else ""
        if word == "" or flag:
            where = flag[1] if flag else before if before.startswith("--") else f"word {number + 1}"
            raise OptionError(f"{where}: found nothing (''); is a variable of the shell empty?")
        if "\0" in word:
            raise OptionError(f"{word!r}: has a NUL character, which no argument may have")


def as_flag(name: str, value: object) -> str:
    """An option as it is typed."""
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if value is ... or value is True:
        return flag
    if value is False:
        return f"--no-{flag.removeprefix('--')}"
    return f"no {flag}" if value is None else f"{flag} {shlex.quote(str(value))}"


def error_text(error: ShardmillError, command: Any) -> str:
    """The message of one of our errors, with the options that this command has as flags."""
    flags = _flags(command)

    def write(name: str, value: object) -> str:
        known = as_flag(name, ...) in flags
        return as_flag(name, value) if known else as_keyword(name, value)

    return _named_once(as_flags(error.worded(write), command))


def usage_text(error: Any, call: Call, root: RootGroup) -> str:
    """What typer refused. Its classes are known by name: they move between its versions."""
    kind, param = type(error).__name__, getattr(error, "param", None)
    if kind == "NoSuchOption":
        return _no_such_option(error.option_name, call, root)
    if param is None or kind not in ("MissingParameter", "BadParameter"):
        return str(error.format_message()).rstrip(".")
    flags = [flag for flag in param.opts if flag.startswith("--")]
    shown = flags[0] if flags else param.name.upper()
    if kind == "MissingParameter":
        return f"{shown} is missing" + (f": {param.help}" if param.help else "")
    return _bad_value(shown, error.message)


def _named_once(message: str) -> str:
    """The system repeats the file's name: x.toml: ... No such file or directory: 'x.toml'."""
    return _SYSTEM.sub(
        lambda found: found[1] if found[2] in message[: found.start()] else found[0], message
    )


def _no_such_option(word: str, call: Call, root: RootGroup) -> str:
    if word == "--debug":
        return "--debug goes before the command: shardmill --debug ..."
    near = nearest(word, _flags(call.command))
    if near is not None and near != word:
        return f"no option {word}; did you mean {near}?"
    others = [name for name, command in every_command(root) if word in _flags(command)]
    return f"no option {word}" + (f"; {' and '.join(others[:3])} have it" if others else "")


def _flags(command: Any) -> list[str]:
    flags = [flag for param in command.params for flag in (*param.opts, *param.secondary_opts)]
    return [flag for flag in [*flags, "--help"] if flag.startswith("--")]


def _bad_value(shown: str, message: str) -> str:
    message = message.removeprefix("Value error, ")
    choice = _CHOICE.search(message)
    if choice is None:
        wanted = next((words for part, words in _KINDS.items() if part in message), None)
        return f"{shown}: {f'wanted {wanted}' if wanted else message.rstrip('.')}"
    known = re.findall("'([^']*)'", choice["known"])
    near = nearest(choice["word"], known)
    guess = f"; did you mean {near}?" if near else ""
    return f"{shown} {choice['word']}: wanted one of {', '.join(known)}{guess}"


# Until every message of the library gives its options as keywords of the exception:

_VALUE = r"'[^']*'|\"[^\"]*\"|[0-9]+(?:,[0-9]{3})*(?![\w.])|[\w./-]*\w"
_TWICE = re.compile(r"(--[a-z][a-z-]*) \(\1\)")


def as_flags(message: str, command: Any) -> str:
    """`on_bad='skip'` and `workers=1` of the library as `--on-bad skip` and `--workers 1`."""
    options = dict(_keywords(command.params))
    if not options:
        return message
    names = "|".join(map(re.escape, sorted(options, key=len, reverse=True)))
    found = re.compile(rf"(?<![\w.'\"`=-])({names})=({_VALUE}|(?=[\s,;:.)]|$))")
    flags = found.sub(lambda match: _flag(options[match[1]], match[2]), message)
    return _TWICE.sub(r"\1", flags)


def _flag(option: tuple[str, str | None], value: str) -> str:
    flag, opposite = option
    if value in ("", "True"):
        return flag
    if value == "None":
        return f"no {flag}"
    if value == "False" and opposite is not None:
        return opposite
    if value[0] in "'\"":
        return f"{flag} {shlex.quote(value[1:-1])}"
    return f"{flag} {value.replace(',', '')}"


def _keywords(params: Iterable[Any]) -> Iterable[tuple[str, tuple[str, str | None]]]:
    names: Mapping[str, str] = {flag: name for name, flag in _FLAGS.items()}
    for param in params:
        flags = [flag for flag in param.opts if flag.startswith("--")]
        if flags:
            option = (flags[0], next(iter(param.secondary_opts), None))
            yield flags[0][2:].replace("-", "_"), option
            if flags[0] in names:
                yield names[flags[0]], option
