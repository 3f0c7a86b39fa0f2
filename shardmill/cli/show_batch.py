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
from shardmill.loading.rows import Documents
from shardmill.records import JSON, BoolArray, IntArray


def row_pieces(
    row: Row, decode: Decode, markers: IntArray, max_tokens: int
) -> Iterator[Heading | Span]:
    """The row document by document; what is a label counts as trained."""
    plan, ids = row.plan, row.window
    split = "" if plan.split is None else f", split {plan.split!r}"
    unit = "row" if row.packed else "window"
    tokens = "" if row.packed else f", tokens {plan.start:,}..{plan.stop:,}"
    yield Heading(
        f"sample {plan.sample:,}: {visible(plan.source)} ({visible(str(plan.path))}{split}), "
        f"epoch {plan.epoch:,}, {unit} {plan.window:,}{tokens}"
        + ("" if plan.instead_of is None else f"; {unit} {plan.instead_of:,} is excluded here")
    )
    trained = row.trained
    kept = np.arange(len(ids)) < max_tokens
    if plan.documents is None or row.columns is None:
        yield Heading("it is not known where its documents begin")
        yield from spans(ids, trained, kept, markers, decode)
        return
    if row.packed:
        yield from packed_pieces(
            plan.documents, row.columns, ids, trained, kept, decode=decode, markers=markers
        )
        return
    for (number, start, stop), (first, last) in zip(plan.documents, row.columns, strict=True):
        part = slice(first, last)
        yield Heading(f"document {number:,}, tokens {start:,}..{stop:,}{_border(trained, part)}")
        yield from spans(ids[part], trained[part], kept[part], markers, decode)


def packed_pieces(
    documents: Documents,
    columns: tuple[tuple[int, int], ...],
    ids: IntArray,
    trained: BoolArray,
    kept: BoolArray,
    *,
    decode: Decode,
    markers: IntArray,
) -> Iterator[Heading | Span]:
    """A row of a pack plan: its examples one by one, padding only counted."""
    following = [first for first, _ in columns[1:]] + [len(ids)]
    for (number, start, stop), (first, last), end in zip(
        documents, columns, following, strict=True
    ):
        part = slice(first, last)
        yield Heading(
            f"columns {first}..{last}: example {number}, tokens {start}..{stop}, "
            f"{int(trained[part].sum()):,} trained"
        )
        yield from spans(ids[part], trained[part], kept[part], markers, decode)
        if last < end:
            yield Heading(f"columns {last}..{end}: padding")


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
    if plan.documents is not None and row.columns is not None:
        facts["documents"] = [
            {
                "document": number,
                "start": start,
                "stop": stop,
                "text": decode(ids[first:last]),
            }
            for (number, start, stop), (first, last) in zip(
                plan.documents, row.columns, strict=True
            )
        ]
    return facts
