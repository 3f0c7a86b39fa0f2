"""Time contenders against each other: as `shardmill bench` does, which owns the rule."""

from __future__ import annotations

from shardmill.cli.commands.bench import Contender, alternate, microseconds, speed_of

__all__ = ["Contender", "alternate", "microseconds", "speed_of"]
