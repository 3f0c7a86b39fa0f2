"""Which command the words of a call mean.

In: the app, and words.  Out: the command, its full name, and whether --debug stands before it.
Promise: `build chats` is a command of its own; any other word behind `build` is an input. A word
that is no command is refused with the nearest one. Help is set in whole paragraphs; an example
has a line of its own, to be copied; a flag is shown without a type.
Not here: options and values (typer), running (border).

Between a person and the commands: whatever happens becomes an exit code and a sentence.

In: the app and the words of a call.  Out: an exit code, see `EXIT_CODES`; mistakes on stderr.
Promise: no traceback for a user's mistake, unless --debug asks for it; a fault of ours keeps its
traceback. A reader that goes away (`| head`) ends the command without a word.
Not here: wording (mistakes), the commands.

A mistake in a call, in the words of the one who made it.

In: what typer found wrong, or the message of an error of ours, and the call.  Out: one sentence.
Promise: options are named as flags, never as keywords of Python; what is nearly right comes with
what was probably meant.
Not here: printing, exit codes (border).
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import typer
from typer.core import TyperGroup

from shardmill.arguments import nearest
from shardmill.cli.terminal import UnheardError, indented, messages, watched_stdout
from shardmill.errors import OptionError, ShardmillError
from shardmill.urls import remember

PROGRAM = "shardmill"
_DOUBLE = {("build", "chats"): "build chats"}
_FIRST = "tokenizer"
"""A group; typer lists groups behind commands, but this is where work begins."""


class Commands(TyperGroup):
    """A group that knows commands of two words, and what was probably meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        args = joined(args)
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise OptionError(unknown_command(args[0], self.commands, ctx.command_path))
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: name != _FIRST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the words name, as far as they can be followed."""

    name: str  # "shardmill build chats"
    command: Any  # as typer made it
    debug: bool


def joined(words: Sequence[str]) -> list[str]:
    """The words with a command of two words as one."""
    double = _DOUBLE.get(tuple(words[:2]))  # type: ignore[arg-type]  # fewer words are no key
    return [double, *words[2:]] if double else list(words)


def open_app(app: typer.Typer) -> Any:
    """The app as a command with commands, fit to be shown."""
    root = typer.main.get_command(app)
    for command in (root, *(command for _, command in every_command(root))):
        command.help = set_help(command.help or "")
        for param in command.get_params(typer.Context(command)):
            if getattr(param, "is_flag", False):
                param.metavar = ""
    return root


def set_help(text: str) -> str:
    """The paragraphs of a docstring as one line each; what follows "Example: " as another."""
    paragraphs = (" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))
    return "\n\n".join(part.replace("Example: ", "Example:\n", 1) for part in paragraphs)


def find_call(root: Any, words: Sequence[str]) -> Call:
    """The command that is called; the root, or a group, when its command is missing or wrong."""
    command, name, debug, rest = root, PROGRAM, False, list(words)
    while rest and hasattr(command, "commands"):
        word, *rest = joined(rest)
        debug = debug or word == "--debug"
        if word.startswith("-"):
            continue
        if word not in command.commands:
            break
        command, name = command.commands[word], f"{name} {word}"
    return Call(name=name, command=command, debug=debug)


def every_command(root: Any, name: str = PROGRAM) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its full name, in the order of the help."""
    for word, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def unknown_command(word: str, known: Mapping[str, object], path: str) -> str:
    """What is said of a word that is no command."""
    near = nearest(word, known)
    guess = f"; did you mean {near}?" if near else f"; wanted one of {', '.join(known)}"
    return f"no command {word!r}{guess} (`{path} --help` tells all)"


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


DONE, FOUND, MISTAKE, FAULT, STOPPED, UNHEARD = 0, 1, 2, 70, 130, 141
EXIT_CODES = {
    DONE: "done, and all is well",
    FOUND: "done, and something was found: damage, a problem, a difference",
    MISTAKE: "a mistake in the call or its input, or a place that cannot be read or written",
    FAULT: "a fault of shardmill itself; its traceback is on stderr",
    STOPPED: "stopped with Ctrl-C",
    UNHEARD: "the reader of stdout went away, as `| head` does",
}
_USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[1])
"""What typer raises for a wrong call, wherever this version keeps it."""


def run(app: typer.Typer, words: Sequence[str]) -> int:
    """Run the command that the words name."""
    if sys.stderr is None:  # closed by the caller: what is said there is said to nobody
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - as long as the process
    for word in words:
        remember(word)
    root = open_app(app)
    call = find_call(root, words)
    with messages(PROGRAM, worded=partial(our_mistake, call=call)):
        return _answered(root, words, call)


def _answered(root: Any, words: Sequence[str], call: Call) -> int:
    try:
        return _run(root, words)
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return MISTAKE  # the help was printed
        return _refused(error, f"{usage_mistake(error, call, root)} (`{call.name} --help`)", call)
    except ShardmillError as error:
        return _refused(error, our_mistake(str(error), call), call)
    except UnheardError as error:
        return UNHEARD if error.is_closed_pipe else _refused(error, f"stdout: {error}", call)
    except OSError as error:  # a full disk, a folder that may not be written
        where = f"{error.filename}: " if error.filename is not None else ""
        return _refused(error, f"{where}{error.strerror or error}", call)
    except Exception:  # noqa: BLE001 - told whole, and with a code that no check has
        _say(f"{traceback.format_exc()}{PROGRAM}: a fault of shardmill, not of this call")
        return FAULT


def _run(root: Any, words: Sequence[str]) -> int:
    if sys.stdout is None:
        raise OSError("stdout is closed: leave it open, or send it to /dev/null")
    check_words(words)
    with watched_stdout():
        try:
            code = root.main(list(words), prog_name=PROGRAM, standalone_mode=False)
        except SystemExit as end:
            # typer takes every broken pipe for that of stdout, which has an error of its own
            if isinstance(end.__context__, BrokenPipeError):
                raise OSError("a connection was closed by its other end") from end
            code = end.code
    return code if isinstance(code, int) else DONE


def _refused(error: BaseException, text: str, call: Call) -> int:
    trace = "".join(traceback.format_exception(error)) if call.debug else ""
    _say(f"{trace}{PROGRAM}: {indented(text)}")
    return MISTAKE


def _say(text: str) -> None:
    with suppress(OSError):  # nobody can be told; the exit code stands
        print(text, file=sys.stderr)
