"""How close random windows come to a plain copy-and-cast of as many tokens read in order.

    python benchmarks/gather.py [--tokens 400000000] [--rounds 15] [--calls 500] [--json]

400M random uint16 tokens in six shards of 128 MiB, written to a temporary folder that is removed
at the end; the page cache is warm. One batch is 32 windows of 1,025 tokens into int64. The limit is
one thread casting the same number of tokens, in the order they lie in, into a reused int64 buffer.
All contenders alternate in this process; a number is the median of the ratios of each round.
Exits with 1 when "gather" stays below the wanted 0.30.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import Contender, alternate, microseconds, speed_of

from shardmill.mapped import TokenSpace, Windows
from shardmill.records import TokenFile

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
        self.space = TokenSpace(files)
        self.windows = Windows(self.space, seq_len=SEQ_LEN)
        self.grouped = TokenSpace(files, reader="grouped")
        self.out = np.empty((BATCH, LENGTH), np.int64)
        self.flat = self.out.reshape(-1)
        self.rng = np.random.default_rng(1)
        self.place = (0, 0)  # where the sequential reader stands: shard, token
        for array in self.arrays:  # every page of every map is touched before the clock runs
            int(array[:: 4096 // 2].sum())
        for space in (self.space, self.grouped):
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
        space, grouped, windows, out = self.space, self.grouped, self.windows, self.out
        table: list[tuple[str, Any, Any]] = [
            (LIMIT, self.places_in_order, self.cast_in_order),
            (OURS, starts, lambda s: space.gather(s, LENGTH, out)),
            (
                "gather, whole windows of an epoch",
                self.random_windows,
                lambda i: windows.gather(i, out),
            ),
            ("gather, new uint16 array", starts, lambda s: space.gather(s, LENGTH)),
            ("gather, portable reader", starts, lambda s: grouped.gather(s, LENGTH, out)),
            ("row by row into the buffer", places, self.row_by_row),
            ("sample by sample, stacked x and y", places, self.sample_by_sample),
        ]
        return [Contender(name=name, prepare=draw, run=run) for name, draw, run in table]


def measure(num_tokens: int, *, rounds: int, calls: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shardmill-gather-") as folder:
        contest = Contest(write_corpus(Path(folder), num_tokens))
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
    return {**facts, "calls": calls, **versions, "rows": rows, **verdict}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=400_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.tokens < 2 * BATCH * LENGTH or args.rounds < 1 or args.calls < 1:
        parser.error(f"--tokens from {2 * BATCH * LENGTH:,} on, --rounds and --calls from 1 on")
    result = measure(args.tokens, rounds=args.rounds, calls=args.calls)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{'contender':40} {'us a batch':>10} {'of the limit':>13}")
        for row in result["rows"]:
            print(f"{row['name']:40} {row['microseconds']:10.1f} {row['of_limit']:13.3f}")
        print(f"gather reached {result['reached']:.3f} of the limit, wanted {WANTED:.2f}")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
