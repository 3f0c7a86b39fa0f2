"""Thousands of shards in a browser: sparse files, so only the numbers are large.

A terabyte, and times, are for `benchmarks/view.py`; here are counts and memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, needs sparse files"),
]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "view.py"


def measure(place: Path, shards: int) -> dict:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--shards", str(shards), "--rounds", "1", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(place)},
    )
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["passed"] else 1)
    assert list(place.iterdir()) == []
    return found


@pytest.mark.slow
def test_20_000_shards_are_looked_at_in_bounded_memory(tmp_path):
    found = measure(tmp_path, 20_000)
    assert (found["tokens"], found["shards"]) == (104_857_600_000, 20_000)
    assert found["looked_at"] == found["documents"] == 200_000
    assert found["private_mib"] < 120
