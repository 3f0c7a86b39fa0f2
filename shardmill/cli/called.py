"""Which command the words of a call mean.

In: the app, and words.  Out: the command, its full name, and whether --debug stands before it.
Promise: `build chats` is a command of its own; any other word behind `build` is an input. A word
that is no command is refused with the nearest one. Help is set in whole paragraphs; an example
has a line of its own, to be copied; a flag is shown without a type.
Not here: options and values (typer), running (border).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from shardmill.arguments import nearest
from shardmill.errors import OptionError

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
