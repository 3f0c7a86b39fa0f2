"""The types of the public API, as a user's mypy --strict sees them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TYPED = ROOT / "tests/typed"
FOUND = re.compile(r"^(?P<file>\S+?):(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]$", re.MULTILINE)
WANTED = re.compile(r"# error: ([\w, -]+)$")


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says in a separate folder, with shardmill among the installed packages: there only
    `py.typed` lets it look inside."""
    project = tmp_path_factory.mktemp("project")
    for path in TYPED.glob("*.py"):
        (project / path.name).write_text(path.read_text())
    options = ["--strict", "--no-pretty", "--cache-dir", os.devnull]  # nobody would read a cache
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "public_api.py", "wrong_use.py"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,  # cold, it reads all of torch: under a minute on a free machine
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


def errors_in(output: str, file: str) -> list[tuple[int, str]]:
    return [
        (int(hit["line"]), hit["code"]) for hit in FOUND.finditer(output) if hit["file"] == file
    ]


def test_a_program_that_uses_the_public_names_has_no_type_error(output):
    assert [line for line in output.splitlines() if not line.startswith("wrong_use.py:")] == [
        output.splitlines()[-1]
    ]
    assert "(checked 2 source files)" in output.splitlines()[-1]


def test_each_wrong_use_is_found_where_it_is_and_nothing_else(output):
    wanted = [
        (number, code)
        for number, line in enumerate((TYPED / "wrong_use.py").read_text().splitlines(), 1)
        if (hit := WANTED.search(line))
        for code in hit[1].split(", ")
    ]
    assert len(wanted) == 15
    assert sorted(errors_in(output, "wrong_use.py")) == sorted(wanted)
