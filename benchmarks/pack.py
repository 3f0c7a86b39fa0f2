"""Packing a million chats into rows: how many rows, how quick beside others, in how much memory.

    python benchmarks/pack.py [--sequences 1000000] [--rounds 5] [--only 4096] [--json]
    make bench-peers

Lengths are lognormal, median 250, cut at 8,192, and new in each round. Longer ones than a row are
split: ours does that in its own time, peers (peers/packers.py) get the pieces. In a round all run
right after one another in this process; the judged ratio is the median over the rounds of the
quickest peer's processor time (user and system, of all threads) over ours, since other work on the
machine changes wall time, which is told beside it. Every packing is checked to be one.
Memory: a fresh process has the lengths (a peer: what it takes), packs a few, resets its peak of
resident memory (/proc/self/clear_refs), packs, and tells by how much the peak is over what it had.
Cases: rows of `2048`, `4096` and `8192`; `scan`, a packer that looks at every row, at a size where
it ends; `large`, ten times as many sequences, ours only, each time in a fresh process. `--json` for
a machine. Exits with 1 when a wanted number is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers import Peer
from peers.packers import PACKERS, SCAN, Numbers, Packer, Rows, check, theirs

from shardmill import packing

MEDIAN, SIGMA, LONGEST = 250, 1.1, 8192
CAPACITIES = (2048, 4096, 8192)
CASES = (*map(str, CAPACITIES), "scan", "large")
SCAN_SEQUENCES, FEW = 20_000, 1000
JUDGED = "best_fit_decreasing"
OVER_BOUND, TIMES_AS_QUICK, MEGABYTES = 1.001, 30, 64
OURS: dict[str, Callable[..., packing.PackPlan]] = {
    JUDGED: packing.best_fit_decreasing,
    "best_fit_decreasing, max_per_row=64": partial(packing.best_fit_decreasing, max_per_row=64),
    "best_fit_decreasing, align_to=8": partial(packing.best_fit_decreasing, align_to=8),
    "first_fit_decreasing": packing.first_fit_decreasing,
    "first_fit_shuffle": partial(packing.first_fit_shuffle, seed=0),
    "concatenate": packing.concatenate,
}


def ours(name: str) -> Packer:
    def over_bound(plan: packing.PackPlan, _lengths: Numbers, capacity: int) -> float:
        rows = Rows(items=plan.rows.indices, counts=np.diff(plan.rows.offsets))
        check(name, rows, plan.pieces.lengths, capacity)
        return plan.metrics.num_rows / plan.metrics.lower_bound

    pack = partial(OURS[name], long="split")
    return Packer(name=name, peer=False, prepare=lambda x, _: x, pack=pack, over_bound=over_bound)


def named(name: str) -> Packer:
    if name in OURS:
        return ours(name)
    (peer,) = (peer for peer in (*PACKERS, SCAN) if peer.name == name)
    return theirs(peer)


def make_lengths(num_sequences: int, seed: int) -> Numbers:
    numbers = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, num_sequences)
    return np.clip(numbers, 1, LONGEST).astype(np.int64)


def timed(packer: Packer, prepared: Any, capacity: int) -> tuple[Any, float, float]:
    """What came out, processor seconds, wall seconds."""
    gc.collect()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    packed = packer.pack(prepared, capacity)
    return packed, time.process_time() - begin_cpu, time.perf_counter() - begin


def race(names: list[str], num_sequences: int, capacity: int, rounds: int) -> dict[str, Any]:
    """name -> columns of (processor seconds, wall seconds, rows over the bound), one a round."""
    packers = [named(name) for name in names]
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for number in range(-1, rounds):  # a first round that does not count, of a few
        lengths = make_lengths(num_sequences if number >= 0 else FEW, number + 1)
        turn = number % len(packers)
        for packer in [*packers[turn:], *packers[:turn]]:
            prepared = packer.prepare(lengths, capacity)
            packed, cpu, wall = timed(packer, prepared, capacity)
            del prepared
            over = packer.over_bound(packed, lengths, capacity)
            del packed
            if number >= 0:
                found[packer.name].append((cpu, wall, over))
    return {name: tuple(zip(*rounds_of, strict=True)) for name, rounds_of in found.items()}


def ratio(above: tuple[float, ...], below: tuple[float, ...]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def measure_case(case: str, names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of a table."""
    capacity = 4096 if case == "scan" else int(case)
    num_sequences = min(args.sequences, SCAN_SEQUENCES) if case == "scan" else args.sequences
    found = race(names, num_sequences, capacity, args.rounds)
    table = []
    for name, (cpu, wall, over) in found.items():
        row = {
            "name": name,
            "peer": name not in OURS,
            "cpu_s": round(statistics.median(cpu), 4),
            "wall_s": round(statistics.median(wall), 4),
            "times_ours": round(ratio(cpu, found[JUDGED][0]), 2),
            "times_ours_wall": round(ratio(wall, found[JUDGED][1]), 2),
            "over_bound": round(max(over), 6),
        }
        if case != "scan":
            row["megabytes"] = in_fresh_process(name, num_sequences, capacity)["megabytes"]
        table.append(row)
    return table


def measure_large(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ours with ten times as many, in fresh processes: a row for each capacity."""
    table = []
    for capacity in CAPACITIES:
        runs = [in_fresh_process(JUDGED, 10 * args.sequences, capacity) for _ in range(args.rounds)]
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        table.append({"name": f"{JUDGED}, rows of {capacity:,}", "peer": False, **medians})
    return table


def in_fresh_process(name: str, num_sequences: int, capacity: int) -> dict[str, float]:
    """What `run_alone` tells of a process of its own; its last words, when it fails."""
    with tempfile.TemporaryDirectory(prefix="shardmill-pack-") as place:
        file = Path(place) / "lengths.npy"
        np.save(file, make_lengths(num_sequences, 0))
        command = [sys.executable, __file__, "--alone", name, str(file), str(capacity)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{said[-1]:.200}")
    told: dict[str, float] = json.loads(done.stdout)
    return told


def run_alone(name: str, file: Path, capacity: int) -> dict[str, float]:
    packer, lengths = named(name), np.load(file)
    packer.pack(packer.prepare(lengths[:FEW], capacity), capacity)
    prepared = packer.prepare(lengths, capacity)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS")
    packed, cpu, wall = timed(packer, prepared, capacity)
    most = resident("VmHWM") - before
    over = packer.over_bound(packed, lengths, capacity)
    return {
        "cpu_s": round(cpu, 4),
        "wall_s": round(wall, 4),
        "over_bound": round(over, 6),
        "megabytes": round(most / 1e6, 1),
    }


def resident(key: str) -> int:
    """Bytes of this process in memory: now (VmRSS) or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"{key}:\s+(\d+) kB", status)
    assert found is not None, status
    return 1024 * int(found[1])


def able_peers(only: str) -> tuple[list[Peer], dict[str, str]]:
    """Pack a few in a process of its own: who can, and why not."""
    able, absent = [], {}
    for peer in PACKERS:
        if only not in peer.name:
            absent[peer.name] = "not asked for"
        elif not peer.is_installed():
            absent[peer.name] = f"not installed (pip install {peer.package})"
        else:
            try:
                in_fresh_process(peer.name, FEW, CAPACITIES[0])
                able.append(peer)
            except RuntimeError as failed:
                absent[peer.name] = f"does not run here: {failed}"
    return able, absent


def verdicts(case: str, table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (row,) = (row for row in table if row["name"] == JUDGED)
    peers = [row for row in table if row["peer"]]
    best = min(peers, key=lambda peer: float(peer["cpu_s"]), default=None)
    said = [
        ("rows, of the lower bound", "at most", OVER_BOUND, row["over_bound"]),
        ("MB beyond the lengths", "at most", MEGABYTES, row["megabytes"]),
    ]
    if best is not None:
        what = f"times as quick as {best['name']}"
        said.append((what, "at least", TIMES_AS_QUICK, best["times_ours"]))
    return [
        {
            "case": case,
            "name": what,
            "against": against,
            "wanted": wanted,
            "reached": reached,
            "passed": reached <= wanted if against == "at most" else reached >= wanted,
        }
        for what, against, wanted, reached in said
    ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cases = [case for case in CASES if args.only in case]
    peers, absent = able_peers(args.peers)
    tables, judged = {}, []
    for case in cases:
        if case == "large":
            tables[case] = measure_large(args)
        elif case == "scan":
            tables[case] = measure_case(case, [JUDGED, SCAN.name], args)
        else:
            tables[case] = measure_case(case, [*OURS, *(peer.name for peer in peers)], args)
            judged += verdicts(case, tables[case])
    return {
        "sequences": args.sequences,
        "rounds": args.rounds,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            **{peer.package: peer.version() for peer in peers},
        },
        "absent": absent,
        "cases": tables,
        "wanted": judged,
        "passed": all(verdict["passed"] for verdict in judged),
    }


def print_result(result: dict[str, Any]) -> None:
    for name, reason in result["absent"].items():
        print(f"absent: {name}: {reason}")
    columns = {
        "cpu_s": ("cpu s", "9.3f"),
        "wall_s": ("wall s", "9.3f"),
        "times_ours": ("x ours", "8.2f"),
        "times_ours_wall": ("by wall", "8.2f"),
        "over_bound": ("of bound", "9.5f"),
        "megabytes": ("MB", "8.1f"),
    }
    for case, table in result["cases"].items():
        shown = {key: column for key, column in columns.items() if key in table[0]}
        heads = (f"{head:>{form.split('.')[0]}}" for head, form in shown.values())
        print(f"\n{case:40}", *heads)
        for row in table:
            numbers = (f"{row[key]:{form}}" for key, (_, form) in shown.items())
            print(f"{('  peer: ' if row['peer'] else '  ') + row['name']:40}", *numbers)
    print()
    for said in result["wanted"]:
        word = "reached" if said["passed"] else "MISSED"
        print(
            f"{word}: {said['case']}: {said['name']}: {said['reached']}, wanted "
            f"{said['against']} {said['wanted']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help=f"cases with this in their name: {CASES}")
    parser.add_argument("--peers", default="", help="peers with this in their name")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        name, file, capacity = args.alone
        print(json.dumps(run_alone(name, Path(file), int(capacity))))
        return 0
    if args.sequences < FEW or args.rounds < 1:
        parser.error(f"--sequences from {FEW:,} on, --rounds from 1 on")
    if not any(args.only in case for case in CASES):
        parser.error(f"--only {args.only}: no such case among {', '.join(CASES)}")
    result = measure(args)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print_result(result)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
