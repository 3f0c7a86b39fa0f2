"""Whether a build kept enough: something at all, and not less than it may lose.

Lost is a row that was meant to be kept and gave nothing: it cannot be read, has no text, or holds
what the template cannot write. Not lost is what was asked to be left out (`NOT_LOST`), what has no
text to begin with, and what is over a budget. A build that lost too much publishes nothing and
keeps its work, so that accepting the loss encodes nothing again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from shardmill.chat import REASONS
from shardmill.errors import LossError, OptionError
from shardmill.protocols import ConversationSource, Source
from shardmill.sources import CHAT_REASONS
from shardmill.sources.rows import row_inputs, row_snippets
from shardmill.store import Manifest

MAX_LOSS = 0.05
"""The share of the rows read that may be lost, where nothing else is said."""

NOT_LOST = {
    "filtered": "left out by a filter",
    "map_none": "left out by the caller's own function",
    "other_language": "not in the language asked for",
    "deleted": "marked as deleted, and those were not wanted",
    "below_left_out": "an answer to one of these",
    "too_deep": "beyond the longest thread asked for",
    "no_messages": "an empty list, as an empty text",
}
"""Reasons of drops that are no loss."""

_DOCUMENT_REASONS = {
    "no_text": "the field is null or not there",
    "no_tokens": "the tokenizer made nothing of it",
}
_SENTENCES: Mapping[str, str] = _DOCUMENT_REASONS | CHAT_REASONS | REASONS
_NO_REASONS = ("read", "kept", "dropped")  # of the ledger's buckets
_SHOWN = 5  # reasons
_LOOK_DROPS = 10**6


def check_max_loss(max_loss: float) -> None:
    if isinstance(max_loss, bool) or not isinstance(max_loss, int | float):
        raise OptionError("{max_loss}: wanted a share from 0 to 1", max_loss=max_loss)
    if not 0 <= max_loss <= 1:
        raise OptionError(
            "{max_loss}: wanted a share from 0 to 1, as 0.05 for 5 %", max_loss=max_loss
        )


def check_kept(
    where: object,
    manifest: Manifest,
    staged: Path,
    sources: Sequence[Source | ConversationSource],
    *,
    max_loss: float,
    allow_empty: bool,
    keeps_work: bool = True,
) -> None:
    """Raise a `LossError` if the finished store in `staged` keeps too little to be published.

    `keeps_work`: a build that lost too much can be resumed.
    """
    rows = manifest.ledger.documents
    options: dict[str, Any]
    if not rows.kept:
        if allow_empty:
            return
        buckets = msgspec.structs.asdict(rows)
        others = {name: buckets[name] for name in buckets if name not in _NO_REASONS}
        reasons = {why: count for why, count in {**rows.dropped, **others}.items() if count}
        head = f"{where}: nothing is kept of {rows.read:,} rows"
        end = "correct the input or the options, or build an empty store with {allow_empty}"
        options = {"allow_empty": True}
    else:
        reasons = {why: count for why, count in rows.dropped.items() if why not in NOT_LOST}
        num_lost = sum(reasons.values())
        if num_lost <= max_loss * rows.read:
            return
        share = num_lost / rows.read
        head = f"{where}: {num_lost:,} of {rows.read:,} rows are lost: {share:.1%}, above the limit"
        head += f" of {max_loss:.1%}"
        again, accepted = " and start again with {overwrite}", "{resume} and {max_loss}"
        accepted += ", which encodes nothing again"
        if not keeps_work:
            again, accepted = "", "{max_loss}"
        end = f"correct the input or the options{again}, or accept the loss with {accepted}"
        options = {"max_loss": math.ceil(100 * share) / 100, "resume": True, "overwrite": True}
    examples = _examples(manifest, staged, sources, reasons)
    lines = [f"{head}; nothing was published", *_loss_lines(reasons, examples), end]
    raise LossError(
        "\n  ".join(lines),
        reasons=reasons,
        num_read=rows.read,
        num_kept=rows.kept,
        examples=examples,
        **options,
    )


def _loss_lines(
    reasons: Mapping[str, int], examples: Mapping[str, tuple[str, str | None]]
) -> list[str]:
    """A line for each reason, the commonest first, with a row of it."""
    lines = []
    for why, count in sorted(reasons.items(), key=lambda one: -one[1]):
        sentence = f" ({_SENTENCES[why]})" if why in _SENTENCES else ""
        id, snippet = examples.get(why, (None, None))
        as_in = f", as {id}" if id else ""
        shown = f": {snippet}" if snippet else ""
        lines.append(f"{count:,} {why}{sentence}{as_in}{shown}")
    return lines


def _examples(
    manifest: Manifest,
    staged: Path,
    sources: Sequence[Source | ConversationSource],
    reasons: Mapping[str, int],
) -> dict[str, tuple[str, str | None]]:
    """Of the commonest reasons the first row that was dropped for it, and how it begins."""
    if manifest.dropped is None:
        return {}
    wanted = sorted(reasons, key=lambda why: -reasons[why])[:_SHOWN]
    first: dict[str, str] = {}
    with (staged / manifest.dropped.file).open(encoding="utf-8") as file:
        for line in islice(file, _LOOK_DROPS):
            drop = json.loads(line)
            if drop["reason"] in wanted:
                first.setdefault(drop["reason"], drop["id"])
            if len(first) == len(wanted):
                break
    inputs = [one for source in sources for one in row_inputs(source)]
    snippets = row_snippets(inputs, first.values())
    return {why: (first[why], snippets.get(first[why])) for why in wanted if why in first}
