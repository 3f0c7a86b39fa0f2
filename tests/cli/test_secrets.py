"""No command prints, logs or stores a secret of a URL, whichever argument it is given to."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any, get_args

import pytest

from shardmill.cli.app import FAULT, every_command, open_app, run
from shardmill.storage import retry
from tests.secret_forms import FORMS, seen

ROOT = open_app()
COMMANDS = dict(every_command(ROOT))
FREE_TEXT = {"name", "reason"}
"""Words of the user that are stored as they were given."""
FILLERS = {
    "inputs": "data/*.jsonl",
    "folder": "store",
    "folders": "store",
    "a": "store-before",
    "b": "store-now",
    "url": "memory://elsewhere/store",
    "source": "tokens",
    "target": "new",
    "config": "stream.toml",
    "tokenizer": "spm.model",
    "out": "new",
    "template": "chatml",
    "from": "tokens",
    "to": "store",
}


def name_of(param: Any) -> str:
    flag = next((one for one in param.opts if one.startswith("--")), param.name)
    return str(flag.lstrip("-"))


def takes_text(param: Any) -> bool:
    """Whether any text can be given: a path, an input, a name; no number, flag or choice."""
    annotation = param.type_descriptor.annotation
    kinds = {annotation, *get_args(annotation)}
    kinds |= {inner for kind in kinds for inner in get_args(kind)}
    return bool(kinds & {str, Path})


def call_with(name: str, param: Any, url: str) -> list[str]:
    """The words of a call in which this parameter is the URL, and all others make sense."""
    arguments, options = [], []
    for other in COMMANDS[name].params:
        value = url if other is param else FILLERS.get(name_of(other), "x")
        if other is not param and not other.required:
            continue
        if other.opts[0].startswith("-"):
            options += [other.opts[0], value]
        else:
            arguments.append(value)
    return [*name.split()[1:], *arguments, *options]


CALLS = [
    pytest.param(name, param, id=f"{name.removeprefix('shardmill ')} {name_of(param)}")
    for name, command in COMMANDS.items()
    for param in command.params
    if takes_text(param)
]


@pytest.fixture
def offline(monkeypatch, here, tmp_path) -> None:
    """Nothing is asked twice, and no hub is asked at all."""
    monkeypatch.setattr(retry, "MAX_RETRIES", 0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # caches of clients


def test_every_command_has_an_argument_that_is_tried() -> None:
    assert {call.values[0] for call in CALLS} == set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "param"), CALLS)
def test_no_secret_is_printed_logged_or_stored(name, param, offline, tmp_path, capfd, caplog):
    """With --debug, which prints all that is printed without it, and tracebacks with causes."""
    caplog.set_level(logging.DEBUG, logger="shardmill")
    began = {path: path.stat().st_mtime_ns for path in files_below(tmp_path)}
    wrong = []
    for url, secrets in FORMS.items():
        caplog.clear()
        code = run(["--debug", *call_with(name, param, url)])
        out, err = capfd.readouterr()
        logged = "\n".join(
            record.getMessage() for record in caplog.records if record.name.startswith("shardmill")
        )
        for where, text in (("stdout", out), ("stderr", err), ("log", logged)):
            if found := seen(text, secrets):
                wrong.append(f"{url}: {found} on {where}: {text[:2000]}")
        if code == FAULT and "Traceback" in err:
            wrong.append(f"{url}: {err}")
    if name_of(param) not in FREE_TEXT:
        every = tuple({secret for secrets in FORMS.values() for secret in secrets})
        for path in files_below(tmp_path):
            if began.get(path) != path.stat().st_mtime_ns:
                text = path.read_bytes().decode("utf-8", "replace")
                wrong += [f"{found} in {path}" for found in seen(text + str(path), every)]
    assert not wrong, f"{len(wrong)} of {len(FORMS)}\n" + "\n".join(wrong[:6])


def files_below(folder: Path) -> list[Path]:
    return [Path(top, name) for top, _, names in os.walk(folder) for name in names]
