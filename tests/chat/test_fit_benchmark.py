"""The benchmark of fitting runs: all contenders agree, and it says what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "chat_fit.py"


@pytest.mark.slow
def test_the_fit_benchmark_checks_its_contenders_and_reports_them() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "2", "--calls", "2", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert done.returncode == (0 if result["passed"] else 1)
    assert result["passed"] == (result["reached"] >= 20)
    assert 0.2 < result["too_long"] < 0.6
    assert [row["name"] for row in result["rows"]] == [
        "loop over tokens",
        "arrays",
        "arrays, the mask was stored",
    ]
    assert result["rows"][0]["times_the_loop"] == 1.0
