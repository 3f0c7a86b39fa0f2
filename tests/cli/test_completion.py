"""A shell completes commands, options, values and splits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
mkdir -p "$HOME"
shardmill --install-completion
source "$HOME/.bashrc"
complete_words() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _shardmill_completion shardmill
    (IFS='|'; echo "${COMPREPLY[*]}")
}
complete_words shardmill ve
complete_words shardmill build chats --split-t
complete_words shardmill build x --engine re
complete_words shardmill show store --split v
complete_words shardmill show nowhere --split v
"""


def environment(folder: Path) -> dict[str, str]:
    """A `shardmill` on the path, and a home folder."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "shardmill"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardmill "$@"\n')
    program.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(folder / "home"), "SHELL": "/bin/bash"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_after_the_installation(here, tmp_path):
    done = subprocess.run(
        ["bash", "-c", SCRIPT],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    installed, _, *completed = done.stdout.splitlines()
    assert installed.startswith("bash completion installed in "), done.stderr
    assert completed == ["verify", "--split-think", "reference", "val", ""]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("shell", "variables", "wanted"),
    [
        ("zsh", {"_TYPER_COMPLETE_ARGS": "shardmill veri"}, '"verify":'),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "shardmill veri", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
            "verify\t",
        ),
        ("bash", {"COMP_WORDS": "shardmill veri", "COMP_CWORD": "1"}, "verify\n"),
    ],
)
def test_each_shell_has_a_script_and_its_answers(shell, variables, wanted, run_cli, monkeypatch):
    monkeypatch.setenv("_SHARDMILL_COMPLETE", f"source_{shell}")
    code, out, err = run_cli()
    assert (code, err) == (0, "")
    assert f"_SHARDMILL_COMPLETE=complete_{shell}" in out
    monkeypatch.setenv("_SHARDMILL_COMPLETE", f"complete_{shell}")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = run_cli()
    assert (code, err) == (0, "")
    assert wanted in out
