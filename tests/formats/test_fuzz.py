"""1,000 damaged files: an error of ours or right data, never a crash, a hang or wrong tokens.

Every case is decided by its number. fuzz_formats.py lists which call finds what. Formats without
checksums cannot notice another token: for them the test is that nothing worse happens.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.formats.fuzz_formats import FORMATS

CASES = 1000
WORKERS = 2
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    for name, kind in FORMATS.items():
        for number in (0, 1):
            (folder / name / str(number)).mkdir(parents=True)
            kind.make(folder / name / str(number), number)
    return folder


def run(data: Path, first: int) -> list[dict]:
    """All cases of one worker; if it dies, another continues after the case that killed it."""
    results: list[dict] = []
    while first < CASES:
        command = [sys.executable, "-W", "error", "-m", "tests.formats.fuzz_worker"]
        command += [str(data), str(first), str(WORKERS), str(CASES)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines, done.stderr
        results += [line for line in lines if "outcome" in line]
        last = lines[-1]
        if "outcome" not in last:
            how = f"failed: the process died ({done.returncode}): {done.stderr[-2000:]}"
            results.append(last | {"format": "?", "damage": "?", "outcome": how})
        first = last["case"] + WORKERS
    return results


@pytest.mark.slow
def test_1000_corruptions_give_an_error_of_ours_or_right_data(data: Path) -> None:
    with ThreadPoolExecutor(WORKERS) as pool:
        results = [one for part in pool.map(lambda n: run(data, n), range(WORKERS)) for one in part]
    failed = [one for one in results if one["outcome"].startswith("failed")]
    assert not failed, "\n".join(f"{one}" for one in failed[:20])
    assert sorted(one["case"] for one in results) == list(range(CASES))
    counts = {name: Counter[str]() for name in FORMATS}
    for one in results:
        counts[one["format"]][one["outcome"]] += 1
    for name, kind in FORMATS.items():
        assert sum(counts[name].values()) >= CASES // len(FORMATS), counts
        assert counts[name]["refused"] > 0, (name, counts)
        # undamaged, each is read right: the workers begin with that. Of a plan every byte is under
        # a hash, so that no damage to it is ever read right
        assert (counts[name]["other"] == 0) == kind.is_checked, (name, counts)
    assert sum(count["right"] for count in counts.values()) > 0, counts
    for name in ("store", "chat store", "memmap", "spool"):
        assert counts[name]["found"] > 0, (name, counts)
