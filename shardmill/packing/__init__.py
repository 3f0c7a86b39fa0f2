"""Lengths become a plan of which examples share a row.

In: how long each example is, and how much a row holds.  Out: a `PackPlan`: pieces and rows as flat
arrays, with its metrics.
Promise: a plan is a partition, no row is over capacity, same input, same plan.
Not here: tokens. A plan is an index, never a copy.
"""

from __future__ import annotations

from shardmill.packing.packers import (
    PACKERS,
    best_fit_decreasing,
    concatenate,
    first_fit_decreasing,
    first_fit_shuffle,
)
from shardmill.packing.plan import BinAssignment, Long, PackMetrics, PackPlan, Pieces, plan_of_bins

__all__ = [
    "PACKERS",
    "BinAssignment",
    "Long",
    "PackMetrics",
    "PackPlan",
    "Pieces",
    "best_fit_decreasing",
    "concatenate",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "plan_of_bins",
]
