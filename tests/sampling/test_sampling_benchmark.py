"""The benchmark of sampling runs and reports every contender."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sampling.py"


@pytest.mark.slow
def test_the_sampling_benchmark_reports_its_contenders() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "1", "--quick", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows if row["samples"] == 1024] == [
        "Permutation",
        "Permutation, back",
        "Permutation, size just over a power of two",
        "BlockShuffle",
        "BlockShuffle, scattered",
        "Mixture, weights 7 : 2 : 1",
        "Mixture, weights without a short period",
        "the same, anywhere",
        "numpy permutation of a million, read",
        "random integers",
    ]
    assert all(row["us"] > 0 for row in rows)
    assert {row["samples"] for row in rows} == {32, 1024}
