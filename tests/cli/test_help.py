"""What the help promises: examples work as printed, and every command names its exit codes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from shardmill.cli.app import COMMANDS as TABLE
from shardmill.cli.app import EXIT_CODES, every_command, open_app, set_help

COMMANDS = dict(every_command(open_app()))
WITHOUT_JSON = {"shardmill view"}  # a server prints no receipt
SERVERS = {"shardmill view"}  # its example would not end
DOCS = Path(__file__).parent.parent.parent / "docs" / "cli.md"


def examples(name: str) -> list[str]:
    """The commands in a docstring, as they are printed."""
    return re.findall(r"^Example:\n(.*)$", COMMANDS[name].help, re.MULTILINE)


def prepared(line: str) -> list[str]:
    """The words of an example, where its result is not there yet; a bench that takes no time."""
    _, *words = shlex.split(line)
    if "--out" in words:
        shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
    if words[0] == "bench":
        words += ["--seconds", "0.01", "--seq-len", "32"]
    return words


ALL = [(name, line) for name in COMMANDS if name not in SERVERS for line in examples(name)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_prints_how_it_is_called_and_what_its_codes_mean(name, run_cli):
    text = COMMANDS[name].help
    first, *rest = text.split("\n\n")
    assert re.fullmatch(r"[^.]*\.", first), "one sentence first"
    assert any(part.startswith("Prints ") for part in rest), "what it prints"
    assert examples(name), "an example"
    codes = set(map(int, re.findall(r"Exit (\d+): ", text)))
    assert {0, 2} <= codes <= set(EXIT_CODES)
    code, out, err = run_cli(*name.split()[1:], "--help")
    assert (code, err) == (0, "")
    printed = [line.strip() for line in out.splitlines()]
    for line in examples(name):
        assert line in printed, "too long to be copied from a terminal of 80 columns"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), ALL, ids=[line for _, line in ALL])
def test_every_example_works_as_it_is_printed(name, line, here, far, run_cli):
    assert line.startswith(f"{name} ")
    code, out, err = run_cli(*prepared(line))
    assert (code, bool(out)) == (0, True), err


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WITHOUT_JSON])
def test_with_json_stdout_is_one_object_and_nothing_else(name, here, far, run_cli):
    code, out, err = run_cli(*prepared(examples(name)[0]), "--json")
    assert code == 0, err
    assert isinstance(json.loads(out), dict)
    assert out.endswith("}\n")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WITHOUT_JSON])
def test_with_json_a_mistake_is_on_stderr_and_stdout_is_empty(name, here, run_cli):
    wrong = {"shardmill bench": ["--store", "nowhere"], "shardmill convert": ["nowhere", "x"]}
    wrong |= {"shardmill tokenizer info": ["nowhere.model"]}  # else the hub is asked
    _, *words = shlex.split(examples(name)[0])
    arguments = wrong.get(name, ["nowhere.jsonl"])
    options = words[len(name.split()) - 1 :]
    while options and not options[0].startswith("--"):
        options.pop(0)
        if name not in wrong and options and not options[0].startswith("--"):
            arguments = [*arguments, "elsewhere"]
    code, out, err = run_cli(*name.split()[1:], *arguments, *options, "--json")
    assert (code, out) == (2, "")
    assert err.startswith("shardmill: ")
    assert "Traceback" not in err


def test_the_help_groups_the_commands_in_the_order_of_work(run_cli):
    code, out, _ = run_cli("--help")
    assert code == 0
    panels = ["Make", "Look and check", "Move", "Run and measure"]
    places = [out.index(f" {panel} ") for panel in panels]
    assert places == sorted(places)
    assert out.index(" tokenizer ") < out.index(" build ") < out.index(" pack ")
    assert "<bool>" not in out, "a flag takes no value"


def test_the_table_of_commands_has_the_first_sentence_of_each() -> None:
    single = [name for name in COMMANDS if "tokenizer" not in name]
    table = {name: words for panel in TABLE.values() for name, words in panel.items()}
    found = {name: table[name.removeprefix("shardmill ")] for name in single}
    assert found == {name: COMMANDS[name].help.split("\n\n")[0] for name in found}


def test_paragraphs_are_set_whole_and_examples_alone():
    assert set_help("One\n    two.\n\n    More\n    words.\n\n    Example: a b\n    c\n    ") == (
        "One two.\n\nMore words.\n\nExample:\na b c"
    )


def rows_of_docs() -> dict[str, str]:
    """The first two columns of the table of commands."""
    rows = re.findall(r"^\| `(shardmill [^`]*)` \| (.*?) \|", DOCS.read_text(), re.MULTILINE)
    return dict(rows)


def test_the_docs_have_every_command_with_its_sentence():
    wanted = {name: command.help.split("\n\n")[0] for name, command in COMMANDS.items()}
    assert rows_of_docs() == wanted


def test_the_docs_have_every_exit_code():
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    assert {int(code): words for code, words in rows} == EXIT_CODES
