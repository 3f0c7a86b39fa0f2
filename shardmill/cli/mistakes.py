"""A mistake in a call, in the words of the one who made it.

In: what typer found wrong, or the message of an error of ours, and the call.  Out: one sentence.
Promise: options are named as flags, never as keywords of Python; what is nearly right comes with
what was probably meant.
Not here: printing, exit codes (border).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardmill.arguments import nearest
from shardmill.cli.called import Call, every_command
from shardmill.errors import OptionError

_CHOICE = re.compile(r"'(?P<word>[^']*)' is not one of (?P<known>.*?)\.?$", re.DOTALL)
_VALUE = r"'[^']*'|\"[^\"]*\"|[0-9]+(?:,[0-9]{3})*(?![\w.])|[\w./-]*\w"
_LIBRARY_NAMES = {
    "run_on": "--engine",
    "inputs": "--input",
    "from_format": "--from",
    "to_format": "--to",
}
"""Keywords of the library that have another name as flags."""
_KINDS = {"valid integer": "a whole number", "valid number": "a number", "valid float": "a number"}
"""What typer says of values, and what it means."""
_SYSTEM = re.compile(r"\[Errno [0-9]+\] ([A-Z][^:'\"]*): '([^']+)'")
_TWICE = re.compile(r"(--[a-z][a-z-]*) \(\1\)")
"""What the library calls by both names: --fill (fill=)."""
_EMPTY = re.compile(r"(--[a-z][a-z-]*)=")


def check_words(words: Sequence[str]) -> None:
    """Refuse words that can only be a slip: an empty one would mean the current folder."""
    for number, word in enumerate(words):
        flag = _EMPTY.fullmatch(word)
        before = words[number - 1] if number else ""
        if word == "" or flag:
            where = flag[1] if flag else before if before.startswith("--") else f"word {number + 1}"
            raise OptionError(
                f"{where}: found nothing ('') for it; is a variable of the shell empty?"
            )
        if "\0" in word:
            raise OptionError(f"{word!r}: holds a NUL, which no name and no text of a call may")


def usage_mistake(error: Any, call: Call, root: Any) -> str:
    """What typer refused. Told apart by name: the classes move between its versions."""
    kind, param = type(error).__name__, getattr(error, "param", None)
    if kind == "NoSuchOption":
        return _no_such_option(error.option_name, call, root)
    if kind == "MissingParameter" and param is not None:
        helped = f": {param.help}" if getattr(param, "help", None) else ""
        return f"{_shown(param)} is missing{helped}"
    if kind == "BadParameter" and param is not None:
        return _bad_value(_shown(param), error.message)
    return str(error.format_message()).rstrip(".")


def our_mistake(message: str, call: Call) -> str:
    """The message of an error of ours, for the one who called."""
    return as_flags(without_doubles(message), call)


def without_doubles(message: str) -> str:
    """The system's words name a file once more: x.toml: ... No such file or directory: 'x.toml'."""
    return _SYSTEM.sub(
        lambda found: found[1] if found[2] in message[: found.start()] else found[0], message
    )


def as_flags(message: str, call: Call) -> str:
    """`on_bad='skip'` and `workers=1` of the library as `--on-bad skip` and `--workers 1`."""
    options = dict(_keywords(getattr(call.command, "params", ())))
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
    """Each option's keyword: the flag, and the one that says the opposite."""
    for param in params:
        flags = [flag for flag in param.opts if flag.startswith("--")]
        if flags:
            option = (flags[0], next(iter(param.secondary_opts), None))
            yield flags[0][2:].replace("-", "_"), option
            yield from ((name, option) for name, flag in _LIBRARY_NAMES.items() if flag in flags)


def _no_such_option(word: str, call: Call, root: Any) -> str:
    if word == "--debug":
        return "--debug stands before the command: shardmill --debug ..."
    known = _flags(call.command)
    near = nearest(word, known)
    if near is not None and near != word:
        return f"no option {word}; did you mean {near}?"
    others = [name for name, command in every_command(root) if word in _flags(command)]
    return f"no option {word}" + (f"; {' and '.join(others[:3])} have it" if others else "")


def _flags(command: Any) -> Mapping[str, None]:
    params = getattr(command, "params", ())
    flags = [flag for param in params for flag in (*param.opts, *param.secondary_opts)]
    return dict.fromkeys(flag for flag in [*flags, "--help"] if flag.startswith("--"))


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


def _shown(param: Any) -> str:
    flags = [flag for flag in param.opts if flag.startswith("--")]
    return str(flags[0] if flags else param.name.upper())
