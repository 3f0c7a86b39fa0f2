"""One process of the fuzz test: `python -W error -m tests.formats.fuzz_worker DATA FIRST STEP END`.

For each case it prints a line before and a line after; so a crash or a hang is that of the last
case that began. To see one case again: FIRST the case, STEP 1, END one more.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import ShardmillError
from tests.formats.fuzz_damage import damage
from tests.formats.fuzz_formats import FORMATS, Format

SEED = 20_260_726
SECONDS = 20  # that a case may take; it takes some ms
MEMORY = 8 * 2**30  # of addresses: more is asked for only by who believes a damaged size


def run_case(number: int, data: Path, wanted: dict[str, Any]) -> dict[str, str]:
    """Damage, read, compare: the case, and what came of it."""
    name = list(FORMATS)[number % len(FORMATS)]
    with tempfile.TemporaryDirectory(prefix="case-", dir=data) as scratch:
        folder = Path(scratch, "x")
        shutil.copytree(data / name / "0", folder)
        rng = np.random.default_rng([SEED, number])
        what = damage(folder, data / name / "1", FORMATS[name].targets, rng)
        found = outcome(FORMATS[name], folder, wanted[name])
    return {"format": name, "damage": what, "outcome": found}


def outcome(kind: Format, folder: Path, wanted: Any) -> str:
    """ "refused" by who reads it, "found" by who verifies it, "right", "other" data, "failed"."""
    try:
        found = kind.read(folder)
        if kind.verify(folder):
            return "found"
    except ShardmillError:
        return "refused"
    except BaseException:  # noqa: BLE001  every other exception is what this test looks for
        return "failed: " + traceback.format_exc()
    if found == wanted:
        return "right"
    return "failed: other data, unnoticed" if kind.is_checked else "other"


def main(data: Path, first: int, step: int, end: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    wanted = {name: kind.read(data / name / "0") for name, kind in FORMATS.items()}
    for name, kind in FORMATS.items():
        assert kind.verify(data / name / "0") == [], name
    for number in range(first, end, step):
        print(json.dumps({"case": number}), flush=True)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        result = run_case(number, data, wanted)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"case": number} | result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(text) for text in sys.argv[2:5]))
