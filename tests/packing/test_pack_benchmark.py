"""The benchmark of packing runs, judges itself honestly and names absent peers."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pack.py"
ALONE = ["--peers", "none of them", "--rounds", "1", "--json"]


def run(place: Path, *options: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *ALONE, *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(place)},
    )
    assert done.stderr == ""
    assert list(place.iterdir()) == []
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def packers(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("peers.packers")


@pytest.mark.slow
def test_rows_and_memory_of_every_packer_are_reported_and_judged(tmp_path) -> None:
    code, result = run(tmp_path, "--sequences", "30000", "--only", "4096")
    rows = result["cases"].pop("4096")
    assert result["cases"] == {}
    assert [row["name"] for row in rows] == [
        "best_fit_decreasing",
        "best_fit_decreasing, max_per_row=64",
        "best_fit_decreasing, align_to=8",
        "first_fit_decreasing",
        "first_fit_shuffle",
        "concatenate",
    ]
    assert all(row["cpu_s"] > 0 and row["wall_s"] > 0 and row["megabytes"] > 0 for row in rows)
    assert rows[0]["times_ours"] == rows[0]["times_ours_wall"] == 1
    best = rows[0]
    wanted = [("rows, of the lower bound", 1.001), ("MB beyond the lengths", 64)]
    assert [(said["name"], said["wanted"]) for said in result["wanted"]] == wanted
    reached = [said["reached"] for said in result["wanted"]]
    assert reached == [best["over_bound"], best["megabytes"]]
    assert [said["passed"] for said in result["wanted"]] == [True, True]
    assert (code, result["passed"]) == (0, True)


@pytest.mark.slow
def test_a_missed_target_sets_the_exit_code(packers, monkeypatch, capsys) -> None:
    pack = importlib.import_module("pack")
    monkeypatch.setattr(pack, "OVER_BOUND", 0.5)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *ALONE, "--sequences", "1000", "--only", "8192"])
    monkeypatch.setattr(pack, "OURS", {pack.JUDGED: pack.OURS[pack.JUDGED]})
    assert pack.main() == 1
    result = json.loads(capsys.readouterr().out)
    assert [said["passed"] for said in result["wanted"]] == [False, True]
    assert result["absent"] == {
        "multipack": "not asked for",
        "OLMo-core": "not asked for",
        "TRL": "not asked for",
    }


def test_a_scan_is_shown_beside_ours_and_not_judged(tmp_path) -> None:
    code, result = run(tmp_path, "--sequences", "1000", "--only", "scan")
    assert [(row["name"], row["peer"]) for row in result["cases"]["scan"]] == [
        ("best_fit_decreasing", False),
        ("first-fit scan", True),
    ]
    assert (code, result["wanted"]) == (0, [])


@pytest.mark.slow
def test_the_large_case_uses_fresh_processes(tmp_path) -> None:
    code, result = run(tmp_path, "--sequences", "1000", "--only", "large")
    assert [row["name"] for row in result["cases"]["large"]] == [
        "best_fit_decreasing, rows of 2,048",
        "best_fit_decreasing, rows of 4,096",
        "best_fit_decreasing, rows of 8,192",
    ]
    assert code == 0


@pytest.mark.parametrize(
    ("items", "counts", "message"),
    [
        ([0, 1, 1], [2, 1], "not every item is in exactly one row"),
        ([0, 1], [2], "not every item is in exactly one row"),
        ([2, 0, 1], [3, 0], "an empty row"),
        ([2, 0, 1], [2, 2], "rows of more items than there are"),
        ([2, 0, 1], [1, 2], "row 1 holds 11, capacity 10"),
    ],
)
def test_an_invalid_packing_is_not_measured(packers, items, counts, message) -> None:
    rows = packers.Rows(items=np.array(items), counts=np.array(counts))
    with pytest.raises(ValueError, match=message):
        packers.check("somebody", rows, [6, 5, 4], 10)
    packers.check(
        "somebody", packers.Rows(items=np.arange(3), counts=np.array([1, 2])), [6, 5, 4], 10
    )


def test_peers_get_pieces_that_fit_and_nothing_is_lost(packers) -> None:
    pieces = packers.split(np.array([3, 10, 25, 20]), 10)
    assert pieces.tolist() == [3, 10, 10, 10, 5, 10, 10]


def test_the_scan_is_first_fit_longest_first(packers) -> None:
    scan = importlib.import_module("peers.pack_scan")
    lengths = np.array([4, 6, 5, 5, 3, 7])
    rows = scan.rows(scan.pack(scan.prepare(lengths, 10), 10), lengths)
    assert (rows.items.tolist(), rows.counts.tolist()) == ([5, 4, 1, 0, 2, 3], [2, 2, 2])


@pytest.mark.parametrize("options", [["--sequences", "5"], ["--only", "no"], ["--rounds", "0"]])
def test_impossible_options_are_refused(packers, monkeypatch, capsys, options) -> None:
    pack = importlib.import_module("pack")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    with pytest.raises(SystemExit) as refusal:
        pack.main()
    assert refusal.value.code == 2
    assert options[0] in capsys.readouterr().err.splitlines()[-1]
