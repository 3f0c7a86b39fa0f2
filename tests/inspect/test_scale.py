"""A terabyte in a browser: sparse files, so only the numbers are large.

Times are for `benchmarks/view.py`; here are counts and memory.
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
def test_a_terabyte_is_looked_at_in_bounded_memory(tmp_path):
    found = measure(tmp_path, 100_000)
    assert (found["tokens"], found["shards"]) == (524_288_000_000, 100_000)
    assert found["looked_at"] == found["documents"] == 1_000_000
    assert found["private_mib"] < 300


@pytest.mark.slow
def test_a_small_sparse_store_is_looked_at_the_same_way(tmp_path):
    found = measure(tmp_path, 200)
    assert (found["tokens"], found["documents"]) == (1_048_576_000, 2000)
