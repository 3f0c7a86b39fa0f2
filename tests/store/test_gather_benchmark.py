"""The gather benchmark runs, cleans up, and reports every contender."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gather.py"


@pytest.mark.slow
def test_the_gather_benchmark_reports_its_contenders_and_leaves_nothing(tmp_path):
    options = ["--tokens", "300000", "--rounds", "2", "--calls", "3", "--json"]
    options += ["--cold-rounds", "1", "--cold-calls", "2"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert done.returncode == (0 if result["passed"] else 1)
    assert result["passed"] == (result["reached"] >= 0.30)
    assert [row["name"] for row in result["rows"]] == [
        "copy and cast in order (the limit)",
        "gather",
        "gather, whole windows of an epoch",
        "gather, new uint16 array",
        "gather, reader='pread'",
        "gather, reader='pread', new uint16",
        "row by row into the buffer",
        "sample by sample, stacked x and y",
    ]
    assert result["rows"][0]["of_limit"] == 1.0
    assert [row["name"] for row in result["cold"]] == [
        "cold, mapped",
        "cold, pread",
        "cold, mapped, 8 batches asked for",
        "cold, pread, 8 batches asked for",
    ]
    assert list(tmp_path.iterdir()) == []
