"""How close random windows come to a plain copy-and-cast of as many tokens read in order.

    python benchmarks/gather.py [--tokens 400000000] [--rounds 15] [--calls 500]
                                [--cold-rounds 5] [--cold-calls 40] [--json]

400M random uint16 tokens in six shards of 128 MiB, written to a temporary folder (TMPDIR) that is
removed at the end. One batch is 32 windows of 1,025 tokens into int64. The limit is one thread
casting the same number of tokens, in the order they lie in, into a reused int64 buffer.

Warm, all pages in memory: all contenders alternate in this process; a number is the median of the
ratios of each round. Cold: before each measurement the kernel is told to forget the files
(POSIX_FADV_DONTNEED, which works when nothing maps them), and a new space reads random batches,
alone or with the next batches asked for (`prefetch`); a number is the median of the rounds.
Exits with 1 when "gather" stays below the wanted 0.30.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import Contender, alternate, microseconds, speed_of

from shardmill.records import TokenFile
from shardmill.store.readers import TokenSpace, Windows

BATCH, SEQ_LEN = 32, 1024
LENGTH = SEQ_LEN + 1
SHARD_TOKENS = 64 * 2**20  # 128 MiB of uint16
LIMIT, OURS, WANTED = "copy and cast in order (the limit)", "gather", 0.30

Starts = npt.NDArray[np.int64]


def write_corpus(folder: Path, num_tokens: int) -> list[TokenFile]:
    rng = np.random.default_rng(0)
    files = []
    for number, start in enumerate(range(0, num_tokens, SHARD_TOKENS)):
        ids = rng.integers(0, 16_000, min(SHARD_TOKENS, num_tokens - start), dtype=np.uint16)
        path = folder / f"shard_{number:05d}.bin"
        ids.astype("<u2").tofile(path)
        files.append(TokenFile(path=path, num_tokens=len(ids), dtype="uint16"))
    return files


class Contest:
    """The contenders over one set of files, all writing into the same int64 buffer."""

    def __init__(self, files: list[TokenFile]) -> None:
        self.maps = [np.memmap(file.path, "<u2", mode="r") for file in files]
        self.arrays = [np.asarray(shard) for shard in self.maps]
        self.space = TokenSpace(files, reader="mapped")
        self.windows = Windows(self.space, seq_len=SEQ_LEN)
        self.pread = TokenSpace(files, reader="pread")
        self.out = np.empty((BATCH, LENGTH), np.int64)
        self.flat = self.out.reshape(-1)
        self.rng = np.random.default_rng(1)
        self.place = (0, 0)  # where the sequential reader stands: shard, token
        for array in self.arrays:  # every page of every map is touched before the clock runs
            int(array[:: 4096 // 2].sum())
        for space in (self.space, self.pread):
            for start in range(0, space.num_tokens, 2**20):
                space.read(start, min(start + 2**20, space.num_tokens))

    def random_starts(self, calls: int) -> Starts:
        return self.rng.integers(0, self.space.num_tokens - LENGTH + 1, (calls, BATCH))

    def random_windows(self, calls: int) -> Starts:
        return self.rng.integers(0, len(self.windows), (calls, BATCH))

    def places_in_shards(self, calls: int) -> Starts:
        """Windows that lie in one shard each, as loaders with a map per file draw them."""
        shard = self.rng.integers(0, len(self.arrays), (calls, BATCH))
        sizes = np.array([len(array) for array in self.arrays])[shard]
        return np.stack([shard, self.rng.integers(0, sizes - LENGTH + 1)], axis=-1)

    def places_in_order(self, calls: int) -> Iterator[tuple[int, int]]:
        for _ in range(calls):
            shard, start = self.place
            if start + BATCH * LENGTH > len(self.arrays[shard]):
                shard, start = (shard + 1) % len(self.arrays), 0
                if len(self.arrays[shard]) < BATCH * LENGTH:
                    shard = 0
            yield shard, start
            self.place = (shard, start + BATCH * LENGTH)

    def cast_in_order(self, place: tuple[int, int]) -> None:
        shard, start = place
        self.flat[:] = self.arrays[shard][start : start + BATCH * LENGTH]

    def row_by_row(self, places: Starts) -> None:
        for row, (shard, start) in enumerate(places.tolist()):
            self.out[row] = self.arrays[shard][start : start + LENGTH]

    def sample_by_sample(self, places: Starts) -> tuple[Any, Any]:
        """As the usual loaders do: a new x and y for each sample, then stacked."""
        shards = [(self.maps[shard], start) for shard, start in places]
        x = np.stack([shard[s : s + SEQ_LEN].astype(np.int64) for shard, s in shards])
        y = np.stack([shard[s + 1 : s + LENGTH].astype(np.int64) for shard, s in shards])
        return x, y

    def contenders(self) -> list[Contender]:
        starts, places = self.random_starts, self.places_in_shards
        space, windows, out = self.space, self.windows, self.out
        pread = self.pread
        table: list[tuple[str, Any, Any]] = [
            (LIMIT, self.places_in_order, self.cast_in_order),
            (OURS, starts, lambda s: space.gather(s, LENGTH, out)),
            (
                "gather, whole windows of an epoch",
                self.random_windows,
                lambda i: windows.gather(i, out),
            ),
            ("gather, new uint16 array", starts, lambda s: space.gather(s, LENGTH)),
            ("gather, reader='pread'", starts, lambda s: pread.gather(s, LENGTH, out)),
            ("gather, reader='pread', new uint16", starts, lambda s: pread.gather(s, LENGTH)),
            ("row by row into the buffer", places, self.row_by_row),
            ("sample by sample, stacked x and y", places, self.sample_by_sample),
        ]
        return [Contender(name=name, prepare=draw, run=run) for name, draw, run in table]


def forget(files: list[TokenFile]) -> None:
    """Let the kernel drop the pages of these files. Nothing may map them."""
    for file in files:
        with file.path.open("rb") as raw:
            os.fsync(raw.fileno())
            os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_cold(files: list[TokenFile], reader: Any, *, ahead: int, calls: int, seed: int) -> float:
    """Seconds of a batch when nothing is in memory; `ahead` batches are asked for before."""
    forget(files)
    with TokenSpace(files, reader=reader) as space:
        rng = np.random.default_rng(seed)
        starts = rng.integers(0, space.num_tokens - LENGTH + 1, (calls, BATCH))
        out = np.empty((BATCH, LENGTH), np.int64)
        begun = time.perf_counter()
        for asked in starts[:ahead]:
            space.prefetch(asked, LENGTH)
        for number, chosen in enumerate(starts):
            if ahead and number + ahead < calls:
                space.prefetch(starts[number + ahead], LENGTH)
            space.gather(chosen, LENGTH, out)
        return (time.perf_counter() - begun) / calls


def measure_cold(files: list[TokenFile], *, rounds: int, calls: int) -> list[dict[str, Any]]:
    if not hasattr(os, "posix_fadvise"):
        return []
    cases = [(reader, ahead) for ahead in (0, 8) for reader in ("mapped", "pread")]
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for seed in range(rounds):
        for reader, ahead in cases:
            taken = read_cold(files, reader, ahead=ahead, calls=calls, seed=seed)
            times[reader, ahead].append(taken)
    forget(files)
    return [
        {
            "name": f"cold, {reader}" + (f", {ahead} batches asked for" if ahead else ""),
            "microseconds": round(1e6 * statistics.median(taken), 1),
        }
        for (reader, ahead), taken in times.items()
    ]


def measure(
    num_tokens: int, *, rounds: int, calls: int, cold_rounds: int, cold_calls: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shardmill-gather-") as folder:
        files = write_corpus(Path(folder), num_tokens)
        cold = measure_cold(files, rounds=cold_rounds, calls=cold_calls)  # before they are mapped
        contest = Contest(files)
        contenders = contest.contenders()
        alternate(contenders, rounds=1, calls=calls)
        times = alternate(contenders, rounds=rounds, calls=calls)
    rows = [
        {
            "name": one.name,
            "microseconds": round(microseconds(times, one.name), 2),
            "of_limit": round(speed_of(times, one.name, limit=LIMIT), 4),
        }
        for one in contenders
    ]
    reached = speed_of(times, OURS, limit=LIMIT)
    facts = {"tokens": num_tokens, "batch": BATCH, "length": LENGTH, "rounds": rounds}
    versions = {"numpy": np.__version__, "python": platform.python_version()}
    verdict = {"wanted": WANTED, "reached": round(reached, 4), "passed": reached >= WANTED}
    return {**facts, "calls": calls, **versions, "rows": rows, "cold": cold, **verdict}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=400_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--cold-rounds", type=int, default=5)
    parser.add_argument("--cold-calls", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    least = min(args.rounds, args.calls, args.cold_rounds, args.cold_calls)
    if args.tokens < 2 * BATCH * LENGTH or least < 1:
        parser.error(f"--tokens from {2 * BATCH * LENGTH:,} on, rounds and calls from 1 on")
    result = measure(
        args.tokens,
        rounds=args.rounds,
        calls=args.calls,
        cold_rounds=args.cold_rounds,
        cold_calls=args.cold_calls,
    )
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{'contender':40} {'us a batch':>10} {'of the limit':>13}")
        for row in result["rows"]:
            print(f"{row['name']:40} {row['microseconds']:10.1f} {row['of_limit']:13.3f}")
        for row in result["cold"]:
            print(f"{row['name']:40} {row['microseconds']:10.1f}")
        print(f"gather reached {result['reached']:.3f} of the limit, wanted {WANTED:.2f}")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
