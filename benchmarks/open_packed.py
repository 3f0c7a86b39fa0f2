"""How long it takes to open a large memmap shard.

    python benchmarks/open_packed.py [--bins 100000] [--pack-size 4096] [--opens 9] [--json]

A shard of 100,000 bins of 4,096 places (2 GB) is written to a temporary folder by
`MemmapShardWriter`; each bin holds a few tokens, so that the files are sparse. Every open is that
of a fresh process: the clock runs from before `open_memmap_shard` until it returns, and, told
beside it, until the bin in the middle is read as well. Imports are not timed; the page cache is as
the writer left it.
Exits with 1 when the median of the opens is not below the wanted 50 ms.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.formats.packed.memmap import MemmapShardWriter

WANTED_MS = 50
OPEN = """
import json, sys, time
from shardmill.formats.packed import open_memmap_shard
begin = time.perf_counter()
shard = open_memmap_shard(sys.argv[1])
opened = time.perf_counter()
assert len(shard.read_bin(len(shard) // 2))
print(json.dumps([1e3 * (opened - begin), 1e3 * (time.perf_counter() - begin)]))
"""


def write_shard(folder: Path, num_bins: int, pack_size: int) -> None:
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 50_000, (num_bins, 8), np.int32), np.ones(8, np.uint8)
    with MemmapShardWriter(folder, num_bins, pack_size, 2 * num_bins) as writer:
        for number in range(num_bins):
            writer.write_bin(number, ids[number], mask, [0, 1 + number % 7])
        writer.finalize()


def run(folder: Path, num_bins: int, pack_size: int, opens: int) -> dict[str, Any]:
    write_shard(folder / "shard", num_bins, pack_size)
    command = [sys.executable, "-c", OPEN, str(folder / "shard")]
    times = [
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(opens)
    ]
    return {
        "bins": num_bins,
        "pack_size": pack_size,
        "open_ms": [opened for opened, _ in times],
        "median_open_ms": statistics.median(opened for opened, _ in times),
        "median_open_and_read_ms": statistics.median(read for _, read in times),
        "wanted_ms": WANTED_MS,
        "python": platform.python_version(),
    }


def show(found: dict[str, Any]) -> None:
    print(f"memmap shard of {found['bins']:,} x {found['pack_size']:,}")
    print(f"  opened, and a bin read: {found['median_open_and_read_ms']:.2f} ms")
    verdict = "ok" if found["median_open_ms"] < WANTED_MS else "MISSED"
    print(
        f"  opened, median of {len(found['open_ms'])} fresh processes: found "
        f"{found['median_open_ms']:.2f} ms (the slowest {max(found['open_ms']):.2f}), wanted less "
        f"than {WANTED_MS} ms: {verdict}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bins", type=int, default=100_000)
    parser.add_argument("--pack-size", type=int, default=4096)
    parser.add_argument("--opens", type=int, default=9)
    parser.add_argument("--folder", help="where the temporary folder goes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardmill-open-", dir=args.folder) as folder:
        found = run(Path(folder), args.bins, args.pack_size, args.opens)
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0 if found["median_open_ms"] < WANTED_MS else 1


if __name__ == "__main__":
    sys.exit(main())
