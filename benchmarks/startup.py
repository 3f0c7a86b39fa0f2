"""How long Python and the command line take to start, against `python -c "import typer, numpy"`.

    python benchmarks/startup.py [ROUNDS]

Each round runs every program once, in an order that rotates. A ratio compares two programs of one
round; the table has the median of the rounds. CPU seconds (user and system) are compared, which a
busy machine disturbs least; elapsed seconds are shown beside them.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 31
LIMIT = "import typer, numpy"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    with tempfile.TemporaryDirectory(prefix="shardmill-startup-") as folder:
        text, store = Path(folder, "text.txt"), str(Path(folder, "store"))
        text.write_text("a short text\n" * 100)
        command = [sys.executable, "-m", "shardmill"]
        build = ["build", str(text), "--out", store, "--tokenizer", "byte", "--no-append-eot"]
        subprocess.run([*command, *build], check=True, capture_output=True)
        programs = {
            LIMIT: [sys.executable, "-c", LIMIT],
            "import shardmill": [sys.executable, "-c", "import shardmill"],
            "shardmill --version": [*command, "--version"],
            "shardmill --help": [*command, "--help"],
            "shardmill info": [*command, "info", store],
        }
        for program in programs.values():
            run(program)  # the files are in memory from now on
        cpu: dict[str, list[float]] = {name: [] for name in programs}
        wall: dict[str, list[float]] = {name: [] for name in programs}
        names = list(programs)
        for number in range(rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                for times, seconds in zip((cpu, wall), run(programs[name]), strict=True):
                    times[name].append(seconds)
    print(f"{'':22}{'CPU s':>8}{'ratio':>8}{'elapsed s':>11}{'ratio':>8}   ({rounds} rounds)")
    for name in programs:
        columns = (f"{statistics.median(cpu[name]):8.3f}", f"{ratio(cpu, name):8.2f}")
        columns += (f"{statistics.median(wall[name]):11.3f}", f"{ratio(wall, name):8.2f}")
        print(f"{name:22}{''.join(columns)}")


def run(program: list[str]) -> tuple[float, float]:
    """CPU seconds and elapsed seconds of one run."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    elapsed, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed


def ratio(times: dict[str, list[float]], name: str) -> float:
    pairs = zip(times[name], times[LIMIT], strict=True)
    return statistics.median(one / limit for one, limit in pairs)


if __name__ == "__main__":
    main()
