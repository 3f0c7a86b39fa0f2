"""The rows of one batch as something to look at.

In: rows of a batch.  Out: headings and spans, or facts for JSON.
Promise: every token is shown or counted as left out; every document and every border between two of
them is told.
Not here: which batch is meant (show_step), reading it (inspector.batch), printing (show_print).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from shardmill.cli.show_text import Decode, Heading, Span, spans, visible
from shardmill.inspector.batch import Moment, Row
from shardmill.records import JSON, BoolArray, IntArray


def row_pieces(
    row: Row, decode: Decode, markers: IntArray, max_tokens: int
) -> Iterator[Heading | Span]:
    """The row document by document; what is a label counts as trained."""
    plan, ids = row.plan, row.window
    split = "" if plan.split is None else f", split {plan.split!r}"
    yield Heading(
        f"sample {plan.sample:,}: {visible(plan.source)} ({visible(str(plan.path))}{split}), "
        f"epoch {plan.epoch:,}, window {plan.window:,}, tokens {plan.start:,}..{plan.stop:,}"
        + ("" if plan.instead_of is None else f"; window {plan.instead_of:,} is excluded here")
    )
    trained = row.trained
    kept = np.arange(len(ids)) < max_tokens
    if plan.documents is None:
        yield Heading("nobody knows where its documents begin")
        yield from spans(ids, trained, kept, markers, decode)
        return
    for number, start, stop in plan.documents:
        part = slice(start - plan.start, stop - plan.start)
        yield Heading(f"document {number:,}, tokens {start:,}..{stop:,}{_border(trained, part)}")
        yield from spans(ids[part], trained[part], kept[part], markers, decode)


def _border(trained: BoolArray, part: slice) -> str:
    """What is trained between the document before and this one."""
    if part.start == 0:
        return ""
    if trained[part.start]:
        return "; its first token is the label of the document before"
    return "; border: its first token is no label"


def batch_facts(moment: Moment, rows: list[Row], decode: Decode) -> dict[str, JSON]:
    """All numbers."""
    return {
        **moment.facts(),
        "fingerprint": moment.stream.fingerprint,
        "rows": [_row_facts(row, decode) for row in rows],
    }


def _row_facts(row: Row, decode: Decode) -> dict[str, JSON]:
    plan, ids = row.plan, row.window
    facts: dict[str, JSON] = {one.name: getattr(plan, one.name) for one in fields(plan)}
    facts |= {
        "path": str(plan.path),
        "input_ids": row.input_ids.tolist(),
        "labels": row.labels.tolist(),
        "text": decode(ids),
        "documents": None,
    }
    if plan.documents is not None:
        facts["documents"] = [
            {
                "document": number,
                "start": start,
                "stop": stop,
                "text": decode(ids[start - plan.start : stop - plan.start]),
            }
            for number, start, stop in plan.documents
        ]
    return facts
