"""Time contenders against each other on a machine that is never quiet.

In: contenders.  Out: seconds a call, round by round, and medians of ratios.
Promise: in each round all contenders run right after one another in this process, in an order that
rotates; a ratio compares two times of the same round; every call gets arguments no call had before,
so nobody finds in the cache what another one fetched.
Not here: what is measured (bench_read, the benchmarks), printing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to do the work."""

    name: str
    prepare: Callable[[int], Iterable[Any]]  # fresh arguments for that many calls, not timed
    run: Callable[[Any], object]  # one call


def alternate(
    contenders: Sequence[Contender], *, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Seconds a call of each contender, one number a round."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    gc.collect()
    gc.freeze()  # what was there before is not looked through before every turn
    try:
        for number in range(rounds):
            turn = number % len(contenders)
            for contender in [*contenders[turn:], *contenders[:turn]]:
                times[contender.name].append(_time(contender, calls))
    finally:
        gc.unfreeze()
    return times


def _time(contender: Contender, calls: int) -> float:
    arguments = list(contender.prepare(calls))
    run = contender.run
    gc.collect()
    start = time.perf_counter()
    for argument in arguments:
        run(argument)
    return (time.perf_counter() - start) / len(arguments)


def speed_of(times: Mapping[str, Sequence[float]], name: str, *, limit: str) -> float:
    """How much of the limit's speed a contender reaches: the median of the rounds' ratios."""
    pairs = zip(times[limit], times[name], strict=True)
    return statistics.median(bound / taken for bound, taken in pairs)


def microseconds(times: Mapping[str, Sequence[float]], name: str) -> float:
    return statistics.median(times[name]) * 1e6
