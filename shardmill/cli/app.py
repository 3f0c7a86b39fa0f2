"""The commands, and which of them a call names.

`shardmill --help` needs the names and summaries of all commands but none of their code, so the
table below holds those, and a command's module is imported when the command is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from typing import Annotated, Any, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

import shardmill
from shardmill.arguments import nearest
from shardmill.errors import OptionError

PROGRAM = "shardmill"
MAKE, LOOK, MOVE, RUN = "Make", "Look and check", "Move", "Run and measure"
# command -> (module and function, panel of the help, summary), in the order of the help
COMMANDS = {
    "tokenizer": ("tokenizer:app", MAKE, "Train a tokenizer, or look at one."),
    "build": ("build:build", MAKE, "Tokenise text into a store."),
    "build chats": (
        *("build_chats:chats", MAKE),
        "Render conversations into a store, each whole, with loss mask and turns.",
    ),
    "pack": (
        *("pack:pack", MAKE),
        "Decide which conversations of a store share a row, and write that down beside it.",
    ),
    "info": (
        *("info:info", LOOK),
        "Show the splits, the tokenizer, the ledger, pack plans and exclusions of a store.",
    ),
    "show": (
        *("show:show", LOOK),
        "Show an example, a packed row, or the batch of a step: trained green, others grey.",
    ),
    "view": (
        *("view:view", LOOK),
        "Serve a page that shows stores: documents, tokens, masks, plans, the batch of any step.",
    ),
    "blame": ("blame:blame", LOOK, "Show where tokens came from: source, file, row, characters."),
    "verify": ("verify:verify", LOOK, "Read a whole store and compare it with its manifest."),
    "check": (
        *("check:check", LOOK),
        "Check a folder of tokens; print the flags and the TOML that name it in a training config.",
    ),
    "diff": (
        *("diff:diff", LOOK),
        "Explain what differs between two stores: facts, files, documents, order, masks, "
        "exclusions.",
    ),
    "exclude": (
        *("exclude:exclude", LOOK),
        "Record what is not to be trained on: by document, or by the steps that saw it.",
    ),
    "push": (
        *("transfer:push", MOVE),
        "Copy a finished folder to object storage, the manifest last.",
    ),
    "pull": (
        *("transfer:pull", MOVE),
        "Copy a finished folder from object storage; it appears when every byte is checked.",
    ),
    "convert": (
        *("convert:convert", MOVE),
        "Convert between formats; afterwards both sides are read and compared.",
    ),
    "stream": ("stream:stream", RUN, "Run a stream from text to batches for some steps."),
    "bench": ("bench:bench", RUN, "Measure this machine on your own data: tokenise, build, read."),
}
_TWO_WORDS = {("build", "chats"): "build chats"}


class CommandGroup(TyperGroup):
    """A group that answers an unknown command with the nearest known one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not ctx.resilient_parsing and name not in self.commands:
            near = nearest(name, self.commands)
            known = ", ".join(self.commands)
            guess = f"did you mean {near}?" if near else f"wanted one of {known}"
            raise OptionError(
                f"no command {name!r}; {guess} (`{ctx.command_path} --help` lists all)"
            )
        return super().resolve_command(ctx, args)


class RootGroup(CommandGroup):
    """The commands of `COMMANDS`, each a placeholder until it is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {
            name: TyperCommand(name, help=summary, rich_help_panel=panel)
            for name, (_, panel, summary) in COMMANDS.items()
        }
        self._loaded: set[str] = set()

    def load(self, name: str) -> Any:
        """The command itself."""
        if name not in self._loaded:
            module, _, attribute = COMMANDS[name][0].partition(":")
            found = getattr(import_module(f"shardmill.cli.commands.{module}"), attribute)
            self.commands[name] = _as_command(name, found)
            self._loaded.add(name)
        return self.commands[name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        args = _joined(args)
        if args[0] in self.commands:
            self.load(args[0])
        return super().resolve_command(ctx, args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The command that a call names, as far as its words can be followed."""

    name: str  # "shardmill build chats"
    command: Any  # of typer
    debug: bool  # --debug was given before the command


def open_app() -> RootGroup:
    """The command line as typer's root command."""
    app = typer.Typer(
        name=PROGRAM,
        cls=RootGroup,
        help="Text and chats to training batches: tokenised once, memory-mapped, checked.",
        epilog="`shardmill COMMAND --help` has examples; docs/cli.md has the exit codes.",
        no_args_is_help=True,
    )
    app.callback()(_global_options)
    root = typer.main.get_command(app)
    assert isinstance(root, RootGroup)
    _hide_types_of_flags(root)
    return root


def find_call(root: RootGroup, words: Sequence[str]) -> Call:
    """The command that is called; the root, or a group, when its command is missing or wrong."""
    command: Any = root
    name, debug, rest = PROGRAM, False, list(words)
    while rest and hasattr(command, "commands"):
        word, *rest = _joined(rest) if command is root else rest
        debug = debug or word == "--debug"
        if word.startswith("-"):
            continue
        if word not in command.commands:
            break
        command = root.load(word) if command is root else command.commands[word]
        name = f"{name} {word}"
    return Call(name=name, command=command, debug=debug)


def every_command(root: RootGroup) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its full name, in the order of the help."""
    for name in root.commands:
        command = root.load(name)
        if isinstance(command, TyperGroup):
            for word, inner in command.commands.items():
                yield f"{PROGRAM} {name} {word}", inner
        else:
            yield f"{PROGRAM} {name}", command


def set_help(text: str) -> str:
    """The paragraphs of a docstring as one line each; what follows "Example: " on its own line."""
    paragraphs = (" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))
    return "\n\n".join(part.replace("Example: ", "Example:\n", 1) for part in paragraphs)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"shardmill {shardmill.__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback with every error.")
    ] = False,
) -> None:
    pass


def _as_command(name: str, found: Any) -> Any:
    """A function, or an app of several, as a command of typer."""
    app = found
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(name)(with_parameters(found))
    command = typer.main.get_command(app)
    command.name, command.rich_help_panel = name, COMMANDS[name][1]  # type: ignore[attr-defined]
    for one in (command, *getattr(command, "commands", {}).values()):
        one.help = set_help(one.help or "")
        _hide_types_of_flags(one)
    return command


def with_parameters(command: Callable[..., None]) -> Callable[..., None]:
    """A function of one record of options as a function of the record's fields."""
    record = next(iter(get_type_hints(command).values()))
    if not is_dataclass(record):
        return command
    hints = get_type_hints(record, include_extras=True)

    make = cast(Callable[..., object], record)

    def flat(**options: Any) -> None:
        command(make(**options))

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {field.name: hints[field.name] for field in fields(record)}
    flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(record)
        ]
    )
    return flat


def _hide_types_of_flags(command: Any) -> None:
    for param in command.get_params(typer.Context(command)):  # with --help
        if getattr(param, "is_flag", False):
            param.metavar = ""


def _joined(words: Sequence[str]) -> list[str]:
    """The words with a command of two words as one."""
    double = _TWO_WORDS.get(tuple(words[:2]))  # type: ignore[arg-type]  # fewer words are no key
    return [double, *words[2:]] if double else list(words)
