"""What it takes to convert a legacy packed file, a pickle of dicts of lists, to a memmap shard.

    python benchmarks/legacy.py [--gb 2] [--folder DIR] [--json]

Bins of 4,096 random ids below 50,000 with random masks are written as a legacy `.npy` to a
temporary folder (which needs twice the file's size and is removed at the end), by
`LegacyPickleWriter`. Then `convert_legacy_to_memmap` runs in a fresh process: two passes over the
file, the new shard, its hashes, and both read again and compared.

Memory is VmHWM of that process at its end, minus VmHWM after its imports: the most that was ever
resident, so it counts Python's objects, numpy's buffers, and also pages of mapped files. For scale,
another fresh process loads a file of the same kind with `np.load(allow_pickle=True)`; that file is
small, since this takes a multiple of its size.
Exits with 1 when the conversion takes more than the wanted 600 MB.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.formats.packed.legacy import LegacyPickleWriter

PACK_SIZE = 4096
BIN_BYTES = 5 * PACK_SIZE  # about: three bytes for an id, two for its mask
WANTED_MB = 600
SMALL = 40 * 10**6  # bytes of the file that numpy loads
MB = 10**6

MEASURED = """
import json, re, sys, time
from pathlib import Path
{imports}
def most():
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", text)[1]) * 1024
before, begin = most(), time.perf_counter()
{work}
print(json.dumps({{"bytes": most() - before, "seconds": time.perf_counter() - begin}}))
"""
CONVERT = MEASURED.format(
    imports="from shardmill.formats.packed import convert_legacy_to_memmap",
    work="assert convert_legacy_to_memmap(sys.argv[1], sys.argv[2])['parity']['equal']",
)
LOAD = MEASURED.format(
    imports="import numpy as np", work="assert len(np.load(sys.argv[1], allow_pickle=True))"
)


def write_legacy(path: Path, num_bytes: int) -> int:
    """A legacy file of about so many bytes; its size."""
    rng = np.random.default_rng(0)
    with LegacyPickleWriter(path, pack_size=PACK_SIZE) as writer:
        for number in range(max(num_bytes // BIN_BYTES, 1)):
            ids = rng.integers(0, 50_000, PACK_SIZE, dtype=np.int32)
            mask = rng.integers(0, 2, PACK_SIZE, dtype=np.uint8)
            starts = np.flatnonzero(rng.random(PACK_SIZE) < 1 / 250)
            writer.write_bin(number, ids, mask, np.union1d([0], starts))
        writer.finalize()
    return path.stat().st_size


def measure(code: str, *arguments: Path) -> dict[str, float]:
    """Bytes and seconds of a fresh process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def run(folder: Path, num_bytes: int) -> dict[str, Any]:
    begin = time.perf_counter()
    size = write_legacy(folder / "large.npy", num_bytes)
    written = time.perf_counter() - begin
    converted = measure(CONVERT, folder / "large.npy", folder / "shard")
    small = write_legacy(folder / "small.npy", SMALL)
    loaded = measure(LOAD, folder / "small.npy")
    return {
        "file_mb": size / MB,
        "write_mb_a_second": size / MB / written,
        "convert_mb_a_second": size / MB / converted["seconds"],
        "convert_peak_mb": converted["bytes"] / MB,
        "wanted_peak_mb": WANTED_MB,
        "np_load_file_mb": small / MB,
        "np_load_peak_mb": loaded["bytes"] / MB,
    }


def show(found: dict[str, Any]) -> None:
    print(f"legacy file of {found['file_mb']:,.0f} MB, bins of {PACK_SIZE:,} tokens")
    print(f"  written by LegacyPickleWriter    {found['write_mb_a_second']:8,.0f} MB/s")
    print(f"  converted, checked and compared  {found['convert_mb_a_second']:8,.0f} MB/s")
    times = found["np_load_peak_mb"] / found["np_load_file_mb"]
    print(
        f"  np.load(allow_pickle=True) takes {found['np_load_peak_mb']:8,.0f} MB for a file of "
        f"{found['np_load_file_mb']:,.0f} MB: {times:.1f} times its size"
    )
    verdict = "ok" if found["convert_peak_mb"] < WANTED_MB else "MISSED"
    print(
        f"  peak of the conversion: found {found['convert_peak_mb']:,.0f} MB, wanted less than "
        f"{WANTED_MB:,} MB: {verdict}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the legacy file")
    parser.add_argument("--folder", help="where the temporary folder goes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardmill-legacy-", dir=args.folder) as folder:
        found = run(Path(folder), int(args.gb * 10**9)) | {"python": platform.python_version()}
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0 if found["convert_peak_mb"] < WANTED_MB else 1


if __name__ == "__main__":
    sys.exit(main())
