"""Time contenders against each other: as `shardmill bench` does, which owns the rule."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from shardmill.cli.commands.bench import Contender, alternate, speed_of


def microseconds(times: Mapping[str, Sequence[float]], name: str) -> float:
    return statistics.median(times[name]) * 1e6


__all__ = ["Contender", "alternate", "microseconds", "speed_of"]
