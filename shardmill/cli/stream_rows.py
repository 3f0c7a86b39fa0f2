"""The rows of a stream's batch as something to look at.

In: a batch and the tokenizer of its stream.  Out: headings and spans, or facts for JSON.
Promise: every token of a row is shown, padding is counted; each document begins with a heading, and
what no label trains is told apart from what is trained.
Not here: printing (show_print).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardmill.cli.show_text import Decode, Heading, Span, spans
from shardmill.errors import TokenizerError
from shardmill.records import IGNORE_INDEX, JSON, IntArray

if TYPE_CHECKING:
    from shardmill.streaming import Batch
    from shardmill.streaming.tokenizers import StreamTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class StreamRow:
    """One row of a batch."""

    step: int  # of this call, from 0
    row: int  # of the batch, from 0, micro-batch after micro-batch
    input_ids: IntArray  # (seq_len,)
    labels: IntArray  # (seq_len,)
    segment_ids: IntArray  # (seq_len,)


def batch_rows(batch: Batch, step: int, most: int) -> list[StreamRow]:
    """Its first rows, at most `most`, copied."""
    arrays = (batch.input_ids, batch.labels, batch.segment_ids)
    flat = [array.reshape(-1, array.shape[-1])[:most].copy() for array in arrays]
    return [StreamRow(step, row, *parts) for row, parts in enumerate(zip(*flat, strict=True))]


def row_pieces(row: StreamRow, decode: Decode, markers: IntArray) -> Iterator[Heading | Span]:
    """The row document by document; what is a label counts as trained."""
    yield Heading(f"step {row.step:,}, row {row.row:,}")
    trained = np.append(False, row.labels != IGNORE_INDEX)  # the first token is nobody's label
    ids, segments = _window(row)
    edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
    for start, stop in pairwise(edges):
        if not segments[start]:
            yield Heading(f"padding, tokens {start:,}..{stop:,}")
            continue
        part = slice(start, stop)
        yield Heading(
            f"document {segments[start]:,}, tokens {start:,}..{stop:,}, "
            f"{int(trained[part].sum()):,} trained"
        )
        everything = np.ones(stop - start, bool)
        yield from spans(ids[part], trained[part], everything, markers, decode)


def row_facts(row: StreamRow, decode: Decode) -> dict[str, JSON]:
    """All numbers, and the text of each document."""
    ids, segments = _window(row)
    documents: list[JSON] = [
        decode(ids[segments == number]) for number in range(1, int(segments.max(initial=0)) + 1)
    ]
    return {
        "step": row.step,
        "row": row.row,
        "input_ids": row.input_ids.tolist(),
        "labels": row.labels.tolist(),
        "segment_ids": row.segment_ids.tolist(),
        "documents": documents,
    }


def stream_decoder(tokenizer: StreamTokenizer) -> tuple[Decode, IntArray]:
    """Ids to text, and the ids that are structure; those without a string are shown as <eos>."""
    base = tokenizer.tokenizer
    names = {
        number: f"<{name}>"
        for name, number in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
        if number is not None and not _has_string(base, number)
    }
    structure = {*base.special_token_ids().values(), tokenizer.bos_id, tokenizer.eos_id} - {None}

    def decode(ids: IntArray) -> str:
        places = np.flatnonzero(np.isin(ids, list(names))).tolist()
        edges = [0, *(edge for place in places for edge in (place, place + 1)), len(ids)]
        parts = [ids[start:stop] for start, stop in pairwise(edges) if stop > start]
        return "".join(names.get(int(part[0])) or base.decode(part) for part in parts)

    return decode, np.array(sorted(number for number in structure if number is not None), np.int64)


def _has_string(tokenizer: object, number: int) -> bool:
    try:
        tokenizer.decode([number])  # type: ignore[attr-defined]  # every Tokenizer has it
    except TokenizerError:
        return False
    return True


def _window(row: StreamRow) -> tuple[IntArray, IntArray]:
    """The inputs, and the last label behind them if it is one; with their segments."""
    ids, segments, last = row.input_ids, row.segment_ids, int(row.labels[-1])
    if last == IGNORE_INDEX:
        return ids, segments
    # a label that is trained on belongs to the document before it, or begins the next one where
    # borders are trained across: the batch does not say which
    return np.append(ids, last), np.append(segments, segments[-1])
