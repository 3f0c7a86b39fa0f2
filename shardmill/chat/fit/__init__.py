"""Examples to rows of one length.

cuts.py  where each policy cuts
plan.py  which tokens of each example its row holds
rows.py  the rows themselves, and their shift to inputs and labels
"""

from __future__ import annotations

from shardmill.chat.fit.plan import FIT_REASONS, FIT_SENTENCES, Fit, FitCounts, FitPlan, plan_fit
from shardmill.chat.fit.rows import FittedRows, collate_rows, fit_rows, next_token_pairs

__all__ = [
    "FIT_REASONS",
    "FIT_SENTENCES",
    "Fit",
    "FitCounts",
    "FitPlan",
    "FittedRows",
    "collate_rows",
    "fit_rows",
    "next_token_pairs",
    "plan_fit",
]
