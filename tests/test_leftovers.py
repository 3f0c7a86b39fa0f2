"""A test that leaves a process or a file fails the run, and both are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LEAVES = """
import os
import subprocess
import sys
import tempfile
from pathlib import Path

def test_leaves_a_process():
    # twice removed: its parent is gone
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    subprocess.run([sys.executable, "-c", code, "import time; time.sleep(987)"], check=True)

def test_leaves_a_file_in_home():
    (Path.home() / ".left").mkdir()
    (Path.home() / ".left" / "inner.txt").touch()

def test_leaves_a_file_in_the_repository():
    (Path(__file__).parent / "left.txt").touch()

def test_leaves_a_temporary_file():
    os.close(tempfile.mkstemp(prefix="left-")[0])
"""
HEARS = """
import signal
import subprocess
import sys

def test_ctrl_c_reaches_children():
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\\n"
"""
TIDY = """
import subprocess
import sys

def test_is_tidy(tmp_path):
    (tmp_path / "mine.txt").touch()
    subprocess.run([sys.executable, "-c", "import time; time.sleep(0.01)"], check=True)
"""


def run_tests(
    folder: Path, code: str, *options: str, start: Callable[[], object] | None = None
) -> tuple[int, str]:
    (folder / "test_it.py").write_text(code)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "quick.py").write_text("import tests.conftest\ntests.conftest.PATIENCE_SECONDS = 1\n")
    plugins = ("-p", "tests.conftest", "-p", "quick", "-p", "no:cacheprovider")
    (folder / "t").mkdir()
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "TMPDIR": f"{folder}/t"}
    environ.pop("SHARDMILL_OWN_MACHINE", None)
    environ.pop("PYTEST_DEBUG_TEMPROOT", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=environ,
        preexec_fn=start,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n", "0"), ("-n", "2")])
def test_what_tests_leave_behind_fails_the_run_and_is_named(tmp_path, options):
    code, said = run_tests(tmp_path, LEAVES, *options)
    assert "4 passed" in said
    assert code == 1
    section = said.partition("left behind by tests")[2]
    (process,) = [line for line in section.splitlines() if line.startswith("process ")]
    assert "is alive: " in process
    assert "import time; time.sleep(987)" in process
    assert "started in test_it.py::test_leaves_a_process (call)" in process
    written = [line for line in section.splitlines() if line.startswith("written ")]
    assert len(written) == 3
    assert any("home/.left with inner.txt" in line for line in written)
    assert any(line.endswith(str(tmp_path / "left.txt")) for line in written)
    assert any("/t/left-" in line for line in written)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n", "0"), ("-n", "2")])
def test_a_tidy_run_passes(tmp_path, options):
    code, said = run_tests(tmp_path, TIDY, *options)
    assert code == 0, said
    assert "left behind" not in said


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n", "1")])
def test_ctrl_c_can_be_tested_where_a_background_shell_ignores_it(tmp_path, options):
    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    code, said = run_tests(tmp_path, HEARS, *options, start=ignore)
    assert code == 0, said
