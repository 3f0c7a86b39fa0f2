"""Small things several test folders need."""

from __future__ import annotations

import hashlib
import io
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardmill.cli.app import run

STUCK_SECONDS = 120.0


def folder_digest(folder: Path) -> str:
    """One hash over every file's relative name and bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(
                f"{path.relative_to(folder).as_posix()}\n{path.stat().st_size}\n".encode()
            )
            digest.update(path.read_bytes())
    return digest.hexdigest()


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, as long as anything moves.

    It fails when for two minutes the other threads of this process and its descendants have hardly
    used a CPU: then nothing will ever come. A busy machine makes it wait longer and nothing else.
    """
    work, since = _cpu_seconds(), time.monotonic()
    checked = since
    while not condition():
        time.sleep(0.01)
        now = time.monotonic()
        if now < checked + 1:
            continue
        before, work, checked = work, _cpu_seconds(), now
        if abs(work - before) > 0.05:  # less than before, too: a process has ended
            since = now
        assert now - since < STUCK_SECONDS, f"nothing has moved for {STUCK_SECONDS:.0f} seconds"


def _cpu_seconds() -> float:
    """CPU time of all threads but this one, and of all descendants."""
    total = time.process_time() - time.thread_time()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            used = process.cpu_times()
            total += used.user + used.system
    return total


def is_in(thread: threading.Thread, part: str) -> bool:
    """Whether a thread is inside a function of a file whose path contains `part`."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if part in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class CommandResult:
    exit_code: int
    stdout: str
    stderr: str


def run_command(*words: str) -> CommandResult:
    """The `shardmill` command, in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run(list(words))
    return CommandResult(exit_code=code, stdout=out.getvalue(), stderr=err.getvalue())
