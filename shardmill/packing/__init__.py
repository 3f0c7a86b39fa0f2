"""Packing: from the lengths of examples to a plan of which examples share a row.

A plan holds indices, never tokens. `packers.py` has the algorithms and their registry `PACKERS`,
`plan.py` the plan and the rules for examples that are longer than a row.
"""

from __future__ import annotations

from shardmill.packing.packers import (
    PACKERS,
    Algorithm,
    best_fit_decreasing,
    concatenate,
    first_fit_decreasing,
    first_fit_shuffle,
    packer_named,
    takes_seed,
)
from shardmill.packing.plan import (
    BinAssignment,
    Long,
    PackMetrics,
    PackPlan,
    Pieces,
    cut_examples,
    plan_of_bins,
)

__all__ = [
    "PACKERS",
    "Algorithm",
    "BinAssignment",
    "Long",
    "PackMetrics",
    "PackPlan",
    "Pieces",
    "best_fit_decreasing",
    "concatenate",
    "cut_examples",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "packer_named",
    "plan_of_bins",
    "takes_seed",
]
