"""What an index costs: orders and mixtures that are computed, against an order kept in memory.

    python benchmarks/sampling.py [--items 1000000000] [--rounds 9] [--json]

Each contender gives the items of the next 32 samples (a batch), of 1,024 (what a loader that reads
ahead asks for) and of a million; "anywhere" is a first call at a random place, as on resume. For
scale: numpy's `permutation` of a million items, which is an array in memory, made once, then read.
All contenders alternate in this process; a number is the median over the rounds. Exits with 1 when
`Permutation` stays below the wanted 30 million indices a second in arrays of a million.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from common import Contender, alternate, microseconds

from shardmill.sampling import BlockShuffle, Mixture, Permutation

SIZES = {32: 200, 1024: 40, 10**6: 1}  # samples a call: calls a round
BLOCK_ITEMS, WANTED = 2048, 30.0
OURS, SCALE = "Permutation", "numpy permutation of a million, made"


def contenders(num_items: int, num_samples: int) -> list[Contender]:
    rng = np.random.default_rng(0)
    ahead = itertools.count(num_items // 2, num_samples)

    def neighbours(calls: int) -> Iterator[npt.NDArray[np.int64]]:
        for start in itertools.islice(ahead, calls):
            yield np.arange(start, start + num_samples) % num_items

    def anywhere(calls: int) -> Iterator[npt.NDArray[np.int64]]:
        for start in rng.integers(0, 10**12, calls):
            yield np.arange(start, start + num_samples)

    def scattered(calls: int) -> Iterator[npt.NDArray[np.int64]]:
        return (rng.integers(0, num_items, num_samples) for _ in range(calls))

    def contender(
        name: str,
        run: Callable[[Any], object],
        prepare: Callable[[int], Iterator[npt.NDArray[np.int64]]] = neighbours,
    ) -> Contender:
        return Contender(name=name, prepare=prepare, run=run)

    order = Permutation(num_items, 0)
    worst = Permutation(2 ** (num_items.bit_length() - 2) + 1, 0)  # half of its steps go too far
    blocks = BlockShuffle(num_items, 0, block_items=BLOCK_ITEMS)
    sizes = [num_items, num_items // 3, num_items // 7]
    round_ones = Mixture(sizes, [0.7, 0.2, 0.1], seed=0)
    odd_ones = Mixture(sizes, [0.7123456789, 0.2, 0.1], seed=0)
    stored = np.random.default_rng(0).permutation(10**6)
    return [
        contender(OURS, order.take),
        contender("Permutation, back", order.find),
        contender(
            "Permutation, size just over a power of two", lambda x: worst.take(x % len(worst))
        ),
        contender("BlockShuffle", blocks.take),
        contender("BlockShuffle, scattered", blocks.take, scattered),
        contender("Mixture, weights 7 : 2 : 1", round_ones.take),
        contender("Mixture, weights without a short period", odd_ones.take),
        contender("the same, anywhere", odd_ones.take, anywhere),
        contender("numpy permutation of a million, read", lambda x: stored[x % 10**6]),
        contender(SCALE, lambda _: rng.permutation(10**6))
        if num_samples == 10**6
        else contender("random integers", lambda x: rng.integers(0, num_items, len(x))),
    ]


def measure(num_items: int, rounds: int, sizes: dict[int, int]) -> list[dict[str, Any]]:
    rows = []
    for num_samples, calls in sizes.items():
        entrants = contenders(num_items, num_samples)
        times = alternate(entrants, rounds=rounds, calls=calls)
        for name in times:
            taken = microseconds(times, name)
            rows.append(
                {"name": name, "samples": num_samples, "us": taken, "millions": num_samples / taken}
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=10**9)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="leave the arrays of a million out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = {32: 5, 1024: 2} if options.quick else SIZES
    rows = measure(options.items, options.rounds, sizes)
    most = max(row["millions"] for row in rows if row["name"] == OURS)
    result = {"items": options.items, "rows": rows, "reached": most, "passed": most >= WANTED}
    if options.json:
        print(json.dumps(result))
    else:
        for row in rows:
            print(
                f"{row['samples']:>9,}  {row['us']:>10,.1f} us  {row['millions']:>8.2f} M/s  "
                f"{row['name']}"
            )
    return 0 if result["passed"] or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
