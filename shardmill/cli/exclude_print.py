"""Exclusions as something to look at.

In: entries, a store.  Out: lines, and facts for JSON.
Promise: no character of a reason reaches a terminal that is not visible.
Not here: changing them (exclude).
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardmill.cli.show_text import visible
from shardmill.shards import ExcludeEntry, Exclusions, Manifest

_SHOWN = 5  # documents told by number


def entry_line(entry: ExcludeEntry) -> str:
    """One line on an entry."""
    reason = visible(entry.reason).replace("\n", " ")
    return f"entry {entry.number}, {entry.split}: {what(entry)}: {reason}"


def what(entry: ExcludeEntry) -> str:
    """What is excluded, without the why."""
    tokens = f"{entry.num_tokens:,} tokens"
    if entry.steps is not None:
        steps = entry.steps
        return (
            f"steps {steps.start:,}..{steps.stop:,} of source {visible(steps.source)!r} "
            f"({steps.world} x {steps.batch_size} samples, seq_len {steps.seq_len:,}, seed "
            f"{steps.seed}), {tokens}"
        )
    if entry.documents is not None:
        few = ", ".join(f"{number:,}" for number in entry.documents[:_SHOWN])
        more = ", ..." if len(entry.documents) > _SHOWN else ""
        return f"{len(entry.documents):,} documents ({few}{more}), {tokens}"
    return f"{len(entry.spans):,} spans, {tokens}"


def entry_facts(entry: ExcludeEntry) -> dict[str, Any]:
    """The same as JSON, all of it."""
    facts: dict[str, Any] = msgspec.to_builtins(entry)
    return facts | {"tokens": entry.num_tokens}


def excluded_lines(manifest: Manifest, found: Exclusions) -> dict[str, str]:
    """Split by split, for a table."""
    splits = dict.fromkeys(entry.split for entry in found.entries)
    return {
        f"excluded {split}": f"{found.num_tokens(split):,} of "
        f"{manifest.splits[split].tokens:,} tokens, "
        f"by {sum(entry.split == split for entry in found.entries):,} entries "
        "(shardmill exclude --list)"
        for split in splits
    }
