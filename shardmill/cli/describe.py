"""Plans and exclusions of a store in words and as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from shardmill.cli.terminal import visible
from shardmill.errors import StoreError
from shardmill.store import Exclusions, Manifest, StoredPlan
from shardmill.store.exclusions import ExcludeEntry


def plan_line(plan: StoredPlan | StoreError) -> str:
    """One line on a plan of a list, which may be unusable."""
    if isinstance(plan, StoreError):
        return f"CANNOT BE USED: {plan}"
    metrics = plan.facts.metrics
    return (
        f"{metrics.num_rows:,} rows of {plan.facts.row_len:,} tokens, "
        f"{plan.facts.utilisation:.2%} full, {metrics.num_pieces:,} pieces"
    )


def plan_facts(plan: StoredPlan | StoreError) -> dict[str, Any]:
    """The same as JSON, with everything the plan records."""
    if isinstance(plan, StoreError):
        return {"problem": str(plan)}
    recorded: dict[str, Any] = msgspec.to_builtins(plan.facts)
    return {
        "plan": str(plan.path),
        "bytes": plan.path.stat().st_size,
        **recorded,
        "utilisation": plan.facts.utilisation,
        "fingerprint": plan.fingerprint,
    }


def entry_line(entry: ExcludeEntry) -> str:
    """One line on an entry of the exclusions: what, and why."""
    reason = visible(entry.reason).replace("\n", " ")
    return f"entry {entry.number}, {entry.split}: {excluded_words(entry)}: {reason}"


def excluded_words(entry: ExcludeEntry) -> str:
    """What an entry excludes."""
    tokens = f"{entry.num_tokens:,} tokens"
    if entry.steps is not None:
        steps = entry.steps
        return (
            f"steps {steps.start:,}..{steps.stop:,} of source {visible(steps.source)!r} "
            f"({steps.world} x {steps.batch_size} samples, seq_len {steps.seq_len:,}, seed "
            f"{steps.seed}), {tokens}"
        )
    if entry.documents is not None:
        return f"{len(entry.documents):,} documents ({some(entry.documents)}), {tokens}"
    return f"{len(entry.spans):,} spans, {tokens}"


def entry_facts(entry: ExcludeEntry) -> dict[str, Any]:
    """An entry as JSON."""
    return {**msgspec.to_builtins(entry), "tokens": entry.num_tokens}


def exclusion_rows(manifest: Manifest, found: Exclusions) -> dict[str, str]:
    """How much of each split is excluded, for a table."""
    splits = [entry.split for entry in found.entries]
    return {
        f"excluded {split}": f"{found.num_tokens(split):,} of "
        f"{manifest.splits[split].tokens:,} tokens, by {splits.count(split):,} entries "
        "(shardmill exclude --list)"
        for split in dict.fromkeys(splits)
    }


def some(numbers: Any) -> str:
    """The first five of some numbers."""
    few = ", ".join(f"{number:,}" for number in numbers[:5])
    return f"{few}, ..." if len(numbers) > 5 else few
