"""A terabyte in 100,000 shards, 1,023,999,999 windows: sparse files, so only numbers are large.

Times are for `benchmarks/read.py --scale`; here are counts, memory and what was read.
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

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "read.py"


def measure(place: Path, shards: int) -> dict:
    options = ["--scale", "--shards", str(shards), "--rounds", "3", "--json"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(place)},
    )
    result = json.loads(done.stdout)
    assert done.returncode == (0 if result["passed"] else 1)
    assert list(place.iterdir()) == []
    return result


def assert_rows_are_their_windows(rows: dict) -> None:
    """Input j of window w was written as (w + j) % 65,521 + 1; everything else is 0."""
    windows = rows["window"]
    assert len(set(windows)) == 32
    expected = [[(window + j) % 65_521 + 1 for j in range(512)] for window in windows]
    assert rows["first_input"] == [row[0] for row in expected]
    assert rows["last_input"] == [row[-1] for row in expected]
    assert rows["first_label"] == [row[1] for row in expected]
    assert rows["input_sum"] == [sum(row) for row in expected]


@pytest.mark.slow
def test_a_terabyte_is_opened_shuffled_and_resumed_in_bounded_memory(tmp_path):
    found = measure(tmp_path, 100_000)
    assert found["num_tokens"] == 524_288_000_000
    assert found["num_windows"] == 1_023_999_999
    assert found["private_mib"] < 300
    assert found["state_bytes"] < 1024
    assert_rows_are_their_windows(found["first"])
    assert_rows_are_their_windows(found["late"])
    assert not set(found["first"]["window"]) & set(found["late"]["window"])
    assert max(found["first"]["window"]) > 500_000_000  # from all over the store
    assert found["windows_seen"] == found["samples_seen"] == 1_000_000  # none came twice
    assert (found["last_epoch"], found["next_epoch"]) == (0, 1)
