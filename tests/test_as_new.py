"""tools/as_new.sh: a command runs in a fresh clone, and nothing of this machine is seen there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "tools/as_new.sh"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts, process tables")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A committed file that was changed, a file that git ignores, and a .venv."""
    root = tmp_path / "repository"
    (root / "tools").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "tools")
    for name in ("pyproject.toml", "constraints.txt", "text"):
        (root / name).write_text("committed\n")
    (root / ".gitignore").write_text("ignored\n.venv\n")
    git = ["git", "-C", str(root), "-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    (root / "text").write_text("changed\n")
    (root / "ignored").touch()
    (root / ".venv").mkdir()
    (root / ".venv/mark").touch()
    return root


def run(root: Path, *words: str, **environ: str) -> tuple[int, str, str]:
    done = subprocess.run(
        ["bash", str(root / "tools/as_new.sh"), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_sees_a_clone_an_empty_home_and_few_settings(repository, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "old").touch()
    show = 'cat text; ls -A "$HOME"; ls; env; exit 7'
    environ = {"HOME": str(tmp_path / "home"), "HF_HOME": "/old", "SHARDMILL_MARK": "kept"}
    code, out, err = run(repository, "bash", "-c", show, **environ)
    assert code == 7, err
    lines = out.splitlines()
    assert lines[:5] == ["changed", "constraints.txt", "pyproject.toml", "text", "tools"]
    assert "SHARDMILL_MARK=kept" in lines
    assert not any(line.startswith(("HF_HOME=", "XDG_", "RAY_")) for line in lines)


def has_namespaces() -> bool:
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "true"]
    allowed = os.getuid() == 0 and shutil.which("unshare")
    return (
        bool(allowed) and subprocess.run(command, check=False, capture_output=True).returncode == 0
    )


@pytest.mark.slow
def test_with_namespaces_fixed_places_are_empty_and_a_process_left_behind_is_named(repository):
    if not has_namespaces():
        pytest.skip("private namespaces are not permitted here")
    code, out, err = run(
        *[repository, "--with-venv", "bash", "-c"],
        "pwd; ls -A .venv; ls /dev/shm; ls -A /tmp | grep -v '^pytest-of-'; sleep 987 & exit 0",
        AS_NEW_PATIENCE="1",
    )
    assert out.splitlines()[:2] == [str(repository), "mark"]
    assert len(out.splitlines()) <= 3, "no more in /tmp than the way to the repository"
    assert code == 1
    assert "left behind: process " in err
    assert "sleep 987" in err


def test_without_namespaces_it_says_what_is_not_checked(repository, tmp_path):
    """As where `unshare` is refused."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "unshare").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = 'pwd; ls -A "$HOME" "$TMPDIR" .venv'
    code, out, err = run(repository, "--with-venv", "bash", "-c", command, PATH=path)
    assert code == 0, err
    assert "private namespaces are not permitted here" in err
    assert out.splitlines()[0] == str(repository)
    assert "mark" in out


def test_a_tree_without_git_is_copied_without_what_tools_made(repository):
    shutil.rmtree(repository / ".git")
    code, out, err = run(repository, "ls", "-A")
    assert code == 0, err
    assert out.split() == [
        ".gitignore",
        "constraints.txt",
        "ignored",
        "pyproject.toml",
        "text",
        "tools",
    ]
