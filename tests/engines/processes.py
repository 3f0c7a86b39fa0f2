"""Looking at processes and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} seconds"
        time.sleep(0.02)
