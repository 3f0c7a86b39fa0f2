"""The command line names flags, the library names keywords."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import shardmill
from shardmill.cli.app import error_text, every_command, open_app
from shardmill.errors import OptionError
from tests.cli.test_secrets import COMMANDS, FILLERS, name_of

ROOT = open_app()
LIBRARY = Path(shardmill.__file__).parent
FLAGS = {
    flag
    for _, command in every_command(ROOT)
    for param in command.params
    for flag in (*param.opts, *param.secondary_opts)
    if flag.startswith("--")
}
PACKAGES_OF_COMMANDS = {"cli", "inspect", "testing"}
"""The inspector is reached by `shardmill view` alone."""
BOTH = re.compile(r"`shardmill [^`]*`?|[\w=]+ (?:and \w+ )?\(--[\w -]+\)|--[\w-]+ \(\w+=\)")
"""A whole command, or a thing under both its names."""
KEYWORD = re.compile(r"(?<![\w.'\"`/=-])[a-z][a-z_]*=")
WRONG = ("0", "-1", "99999999999999999999", "nosuch", "1.5")


def texts_in(path: Path) -> list[tuple[int, str]]:
    """The texts of a module that are not its docstrings, those of f-strings joined."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else "X" for one in node.values]
            found.append((node.lineno, "".join(map(str, parts))))
        elif isinstance(node, ast.Constant) and id(node) not in alone | inner:
            found.append((node.lineno, str(node.value)))
    return found


@pytest.mark.slow
def test_the_library_names_no_flag_of_a_command() -> None:
    wrong = []
    for path in LIBRARY.rglob("*.py"):
        if path.relative_to(LIBRARY).parts[0] in PACKAGES_OF_COMMANDS:
            continue
        for line, text in texts_in(path):
            found = FLAGS & set(re.findall(r"--[a-z][a-z-]*(?![\w.-])", BOTH.sub("", text)))
            if found and "zstd" not in text:
                wrong.append(f"{path.relative_to(LIBRARY)}:{line}: {found} in {text!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("command", "message", "options", "wanted"),
    [
        ("build", "with {on_bad}", {"on_bad": "skip"}, "with --on-bad skip"),
        ("build", "{workers}: wanted 1", {"workers": 0}, "--workers 0: wanted 1"),
        ("build", "name another {field}, or", {"field": ...}, "name another --field, or"),
        ("build", "build with {append_eot}", {"append_eot": False}, "build with --no-append-eot"),
        ("build", "{memory}: more", {"memory": 1_000_000}, "--memory 1000000: more"),
        ("build", "{name}", {"name": "two words"}, "--name 'two words'"),
        ("stream", "{process_count}", {"process_count": None}, "no --process-count"),
        ("convert", "check {from_format}", {"from_format": ...}, "check --from"),
        ("blame", "name {inputs}", {"inputs": ...}, "name --input"),
        ("build", "found 'field=x' and data.seed=7", {}, "found 'field=x' and data.seed=7"),
        ("info", "with {on_bad}", {"on_bad": "skip"}, "with on_bad='skip'"),
    ],
)
def test_options_of_an_error_are_flags_of_the_command(command, message, options, wanted) -> None:
    error = OptionError(message, **options)
    assert error_text(error, COMMANDS[f"shardmill {command}"]) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_wrong_value_is_answered_with_a_keyword_of_python(
    name, here, run_cli, monkeypatch
) -> None:
    def refused(*_: object) -> None:
        raise OptionError("not here")

    monkeypatch.setattr("shardmill.inspect.server.open_server", refused)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wrong = []
    for param in COMMANDS[name].params:
        steps = name_of(param) == "steps"  # so many are no mistake
        for value in () if getattr(param, "is_flag", False) else WRONG[: 2 if steps else None]:
            words = _words(name, param, value)
            _, _, err = run_cli(*words)
            for said in KEYWORD.findall(err):
                wrong.append(f"{words}: {said} in {err}")
    assert not wrong, "\n".join(wrong[:5])


def _words(name: str, param: Any, value: str) -> list[str]:
    arguments, options = [], []
    for other in COMMANDS[name].params:
        if other is param or other.required:
            given = value if other is param else FILLERS.get(name_of(other), "x")
            if other.opts[0].startswith("-"):
                options += [other.opts[0], given]
            else:
                arguments.append(given)
    return [*name.split()[1:], *arguments, *options]
