"""Done means done, under SIGKILL: the target always holds the whole old store or the new one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_often.py")


def kill_often(place: Path, mode: str, kills: int = 0, seed: int = 0) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(place), mode, str(kills), str(seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


@pytest.mark.slow
def test_a_kill_before_any_file_operation_leaves_the_old_store_or_the_new_one(tmp_path) -> None:
    counts = kill_often(tmp_path, "at-events")
    # the first and the last build were left alone, all between them were killed
    assert counts["killed"] == counts["builds"] - 2
    assert counts["killed"] > 30
    assert counts["openable leftovers"] >= 1, "no kill hit a store between finish and publish"
    assert counts["replaced"] >= 3, "no kill hit a store after its publication"


@pytest.mark.slow
def test_a_kill_at_a_random_moment_leaves_the_old_store_or_the_new_one(tmp_path: Path) -> None:
    counts = kill_often(tmp_path, "at-times", 60, seed=1)
    assert counts["killed"] == 60
    assert counts["replaced"] >= 3
