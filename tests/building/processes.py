"""Looking at processes."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import wait_for

__all__ = ["lives", "wait_for"]


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
