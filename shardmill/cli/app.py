"""The commands: which of them a call names, and how it ends.

`shardmill --help` needs the names and summaries of all commands but none of their code, so the
table below holds those, and a command's module is imported when the command is called. Every error
becomes an exit code and a message on stderr, in the words of the command line: options as flags,
and a typo with the nearest name.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

import shardmill
from shardmill.arguments import nearest
from shardmill.cli.terminal import StdoutError, indented, messages, watched_stdout
from shardmill.errors import LossError, OptionError, ShardmillError, as_keyword
from shardmill.urls import remember

if TYPE_CHECKING:
    from shardmill.cli.printing import Answer

DONE, FOUND, MISTAKE, FAULT, STOPPED, CLOSED = 0, 1, 2, 70, 130, 141
EXIT_CODES = {
    DONE: "done, and all is well",
    FOUND: "done, and something was found: damage, a problem, a difference, too many rows lost",
    MISTAKE: "a mistake in the call or its input, or a place that cannot be read or written",
    FAULT: "a fault of shardmill itself; its traceback is on stderr",
    STOPPED: "stopped with Ctrl-C",
    CLOSED: "the reader of stdout went away, as `| head` does",
}
_USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[1])
"""What typer raises for a wrong call, wherever this version keeps it."""
_CHOICE = re.compile(r"'(?P<word>[^']*)' is not one of (?P<known>.*?)\.?$", re.DOTALL)
_KINDS = {"valid integer": "a whole number", "valid number": "a number", "valid float": "a number"}
"""What typer says of values, and what it means."""
_SYSTEM = re.compile(r"\[Errno [0-9]+\] ([A-Z][^:'\"]*): '([^']+)'")
_EMPTY = re.compile(r"(--[a-z][a-z-]*)=")
PROGRAM = "shardmill"
# panel of the help -> command -> the first sentence of its help; its class has the others
COMMANDS = {
    "Make": {
        "look": "Show what is in files before a build: columns, shape, what would be trained.",
        "tokenizer": "Train a tokenizer, or look at one.",
        "build": "Tokenise text into a store.",
        "build chats": "Render conversations into a store, each whole, with loss mask and turns.",
        "pack": "Decide which conversations of a store share a row, and write that down beside it.",
    },
    "Look and check": {
        "info": "Show the splits, the tokenizer, the ledger, pack plans and exclusions of a store.",
        "show": "Show an example, a packed row, or the batch of a step: trained green, others "
        "grey.",
        "view": "Serve a page that shows stores: documents, tokens, masks, plans, the batch of any "
        "step.",
        "blame": "Show where tokens came from: source, file, row, characters.",
        "verify": "Read a whole store and compare it with its manifest.",
        "check": "Check a folder of tokens; print the flags and the TOML that name it in a "
        "training config.",
        "diff": "Explain what differs between two stores: facts, files, documents, order, masks, "
        "exclusions.",
        "exclude": "Record what is not to be trained on: by document, or by the steps that saw it.",
    },
    "Move": {
        "push": "Copy a finished folder to object storage, the manifest last.",
        "pull": "Copy a finished folder from object storage; it appears when every byte is "
        "checked.",
        "convert": "Convert between formats; afterwards both sides are read and compared.",
    },
    "Run and measure": {
        "stream": "Run a stream from text to batches for some steps.",
        "bench": "Measure this machine on your own data: tokenise, build, read.",
    },
}
# command -> its module and class, where they have other names than info:InfoCommand
_CLASSES = {
    "tokenizer": "tokenizer:app",
    "build chats": "build:BuildChatsCommand",
    "view": "show:ViewCommand",
    "verify": "info:VerifyCommand",
    "push": "move:PushCommand",
    "pull": "move:PullCommand",
    "convert": "move:ConvertCommand",
}


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
        found = super().resolve_command(ctx, args)
        ctx.find_root().command.called = f"{ctx.command_path} {found[0]}", found[1]
        return found


class RootGroup(CommandGroup):
    """The commands of `COMMANDS`, each a placeholder until it is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {
            name: TyperCommand(name, help=summary, rich_help_panel=panel)
            for panel, commands in COMMANDS.items()
            for name, summary in commands.items()
        }
        self._loaded: set[str] = set()
        self.called: tuple[str, Any] = PROGRAM, self
        """The command that is called; this, or a group, when its command is missing or wrong."""

    def load(self, name: str) -> Any:
        """The command itself."""
        if name not in self._loaded:
            default = f"{name}:{name.capitalize()}Command"
            module, _, found = _CLASSES.get(name, default).partition(":")
            found = getattr(import_module(f"shardmill.cli.commands.{module}"), found)
            self.commands[name] = _as_command(self.commands[name], found)
            self._loaded.add(name)
        return self.commands[name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        args = _joined(args)
        if args[0] in self.commands:
            self.load(args[0])
        return super().resolve_command(ctx, args)


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
    _adjust_parameters(root)
    return root


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


def run(words: Sequence[str]) -> int:
    """Run the command that the words name. Only our own faults and --debug show a traceback."""
    if sys.stderr is None:  # closed by the caller: messages go nowhere
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - as long as the process
    for word in words:
        remember(word)
    root = open_app()
    with messages(PROGRAM):
        try:
            return _run(root, words)
        except _USAGE_ERROR as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                return MISTAKE  # the help was printed
            return _refused(error, usage_text(error, root), words)
        except ShardmillError as error:
            code = FOUND if isinstance(error, LossError) else MISTAKE
            return _refused(error, error_text(error, root.called[1]), words, code)
        except StdoutError as error:
            return CLOSED if error.is_closed_pipe else _refused(error, f"stdout: {error}", words)
        except OSError as error:  # a full disk, a folder that may not be written
            where = f"{error.filename}: " if error.filename is not None else ""
            return _refused(error, f"{where}{error.strerror or error}", words)
        except Exception:  # noqa: BLE001 - shown whole, with an exit code that no check has
            _say(f"{traceback.format_exc()}{PROGRAM}: a fault of shardmill, not of this call")
            return FAULT


def _check_words(words: Sequence[str]) -> None:
    """Refuse words that can only be a slip: an empty one would mean the current folder."""
    for number, word in enumerate(words):
        flag = _EMPTY.fullmatch(word)
        before = words[number - 1] if number else ""
        if word == "" or flag:
            where = flag[1] if flag else before if before.startswith("--") else f"word {number + 1}"
            raise OptionError(f"{where}: found nothing (''); is a variable of the shell empty?")
        if "\0" in word:
            raise OptionError(f"{word!r}: has a NUL character, which no argument may have")


def _run(root: RootGroup, words: Sequence[str]) -> int:
    if sys.stdout is None:
        raise OSError("stdout is closed: leave it open, or send it to /dev/null")
    _check_words(words)
    with watched_stdout():
        try:
            code = root.main(list(words), prog_name=PROGRAM, standalone_mode=False)
        except SystemExit as end:
            # typer takes every broken pipe for that of stdout, which raises StdoutError here
            if isinstance(end.__context__, BrokenPipeError):
                raise OSError("a connection was closed by its other end") from end
            code = end.code
    return code if isinstance(code, int) else DONE


def _refused(error: BaseException, text: str, words: Sequence[str], code: int = MISTAKE) -> int:
    debug = "--debug" in takewhile(lambda word: word.startswith("-"), words)
    trace = "".join(traceback.format_exception(error)) if debug else ""
    _say(f"{trace}{PROGRAM}: {indented(text)}")
    return code


def _say(text: str) -> None:
    with suppress(OSError):  # stderr is closed; the exit code remains
        print(text, file=sys.stderr)


# commands of typer


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


def _as_command(placeholder: Any, found: Any) -> Any:
    """A command's class, or an app of several, as a command of typer."""
    app = found
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        help_text = f"{placeholder.help}\n\n{inspect.getdoc(found)}"
        app.command(placeholder.name, help=help_text)(with_parameters(found))
    command: Any = typer.main.get_command(app)
    command.name, command.rich_help_panel = placeholder.name, placeholder.rich_help_panel
    for one in (command, *getattr(command, "commands", {}).values()):
        one.help = set_help(one.help or "")
        _adjust_parameters(one)
    return command


def with_parameters(command: Any) -> Callable[..., int]:
    """A command's class as a function of its fields, which prints what the command answers."""
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        one.replace(annotation=_described(one, hints[one.name]))
        for one in inspect.signature(command).parameters.values()
        if get_origin(hints[one.name]) is Annotated
    ]

    def run(**options: Any) -> int:
        answer: Answer | None = command(**options).run()
        if answer is None:
            return DONE
        answer.print(as_json=options["as_json"])
        return FOUND if answer.found else DONE

    run.__doc__ = command.__doc__
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _described(parameter: inspect.Parameter, hint: Any) -> Any:
    """The annotation of an option, written as `options.py` says, as typer reads it."""
    kind, *notes = get_args(hint)
    *names, text = (note for note in notes if isinstance(note, str))
    if names and names[0].isupper():
        return Annotated[kind, typer.Argument(help=text)]
    if parameter.default is False and not names:
        names = [_default_flag(parameter.name)]  # else typer adds a --no-...
    complete = next((note for note in notes if callable(note)), None)
    return Annotated[kind, typer.Option(*names, help=text, autocompletion=complete)]


def _adjust_parameters(command: Any) -> None:
    """Show no type beside a flag, and convert only values that need it."""
    for param in command.get_params(typer.Context(command)):  # with --help
        if getattr(param, "is_flag", False):
            param.metavar = ""
        if getattr(param, "_runtime_param", ...) is None:
            param._runtime_param = _AsGiven()


class _AsGiven:
    """Instead of typer's conversion, which imports pydantic: a third of the time of `info`.

    Versions of typer that convert in another way do not look for it.
    """

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        annotation = param.type_descriptor.annotation
        is_word = annotation in (str, str | None) and isinstance(value, str)
        if is_word or (value is None and not param.multiple and param.nargs == 1):
            return value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _joined(words: Sequence[str]) -> list[str]:
    """The words with the command of two words as one."""
    return ["build chats", *words[2:]] if list(words[:2]) == ["build", "chats"] else list(words)


def _default_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# errors in words


def as_flag(name: str, value: object) -> str:
    """An option as it is typed; `name` is its flag or its keyword."""
    flag = name if name.startswith("--") or name.isupper() else _default_flag(name)
    if value is ... or value is True:
        return flag
    if isinstance(value, Mapping):
        return " ".join(f"{flag} {shlex.quote(f'{k}={json.dumps(v)}')}" for k, v in value.items())
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return " ".join(f"{flag} {shlex.quote(str(one))}" for one in value)
    if value is False:
        return f"--no-{flag.removeprefix('--')}"
    return f"no {flag}" if value is None else f"{flag} {shlex.quote(str(value))}"


def _typed(param: Any) -> str:
    """An option or argument as the help names it."""
    return str(next((flag for flag in param.opts if flag.startswith("--")), param.name.upper()))


def error_text(error: ShardmillError, command: Any) -> str:
    """The message of one of our errors, with the options of this command as they are typed."""
    typed = {param.name: _typed(param) for param in command.params}
    typed |= {flag[2:].replace("-", "_"): flag for flag in typed.values() if flag[:2] == "--"}

    def write(name: str, value: object) -> str:
        return as_flag(typed[name], value) if name in typed else as_keyword(name, value)

    # the system repeats the file's name: x.toml: ... No such file or directory: 'x.toml'
    text = error.worded(write)
    return _SYSTEM.sub(lambda it: it[1] if it[2] in text[: it.start()] else it[0], text)


def usage_text(error: Any, root: RootGroup) -> str:
    """What typer refused. Its classes are known by name: they move between its versions."""
    kind, param = type(error).__name__, getattr(error, "param", None)
    name, command = root.called
    if kind == "NoSuchOption":
        text = _no_such_option(error.option_name, command, root)
    elif param is None or kind not in ("MissingParameter", "BadParameter"):
        text = str(error.format_message()).rstrip(".")
    elif kind == "MissingParameter":
        text = f"{_typed(param)} is missing" + (f": {param.help}" if param.help else "")
    else:
        text = _bad_value(_typed(param), error.message)
    return f"{text} (`{name} --help`)"


def _no_such_option(word: str, called: Any, root: RootGroup) -> str:
    if word == "--debug":
        return "--debug goes before the command: shardmill --debug ..."
    near = nearest(word, _flags(called))
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
