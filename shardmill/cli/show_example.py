"""One example of a store, or one row of a pack plan, with what is trained and what is not.

In: a store, a split or a plan, and a number.  Out: the example or row on stdout, or as JSON.
Promise: every token is shown or counted as left out; text only with the store's own tokenizer.
Not here: options (show), batches of a training (show_step).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.chat.fit import FIT_REASONS, Fit, FitPlan, plan_fit
from shardmill.cli.decoding import decoder, marker_ids
from shardmill.cli.show_batch import packed_pieces
from shardmill.cli.show_print import print_pieces
from shardmill.cli.show_text import Decode, Heading, Span, chat_pieces, spans
from shardmill.errors import OptionError
from shardmill.inspector.batch import pack_columns
from shardmill.loading import PackSource
from shardmill.mapped import ChatSpace, open_tokens
from shardmill.records import ROLES, BoolArray, ChatExamples, Ragged
from shardmill.shards import Store, open_store


def show_example(
    folder: Path,
    split: str,
    number: int,
    *,
    tokenizer: tuple[str | None, list[str] | None],
    row: tuple[int | None, Fit],
    max_tokens: int,
    as_json: bool,
) -> None:
    """Print it; `tokenizer`: its name and special tokens, `row`: sequence length and fit."""
    store, (seq_len, fit) = open_store(folder), row
    found, unit = _read(store, split, number), store.manifest.unit
    decode = decoder(*tokenizer, store)
    plan = None
    if seq_len is not None:
        if not store.is_chat:
            raise OptionError(
                f"--seq-len {seq_len}: {folder} holds documents, which are not fitted"
            )
        plan = plan_fit(found, seq_len, fit)
    head = f"{folder}, split {split!r}, {unit} {number:,}: {_counts(store, found)}"
    if as_json:
        print(json.dumps(_facts(store, split, number, found, plan, decode)))
        return
    pieces = [Heading(head), *_pieces(store, found, plan, decode, max_tokens)]
    if plan is not None:
        pieces.append(Heading(_told(plan, int(seq_len or 0))))
    print_pieces(pieces)


def show_row(
    folder: Path | None,
    plan: str,
    number: int,
    *,
    said: tuple[str | None, int | None],
    tokenizer: tuple[str | None, list[str] | None],
    max_tokens: int,
    as_json: bool,
) -> None:
    """Print a row of a pack plan; `said`: split and sequence length, if they were given."""
    if folder is None:
        raise OptionError(f"--plan {plan}: name the store to look into")
    store = open_store(folder)
    decode = decoder(*tokenizer, store)
    with closing(PackSource(folder, plan)) as source:
        wanted = zip(("--split", "--seq-len"), said, (source.split, source.seq_len), strict=True)
        for flag, value, found in wanted:
            if value not in (None, found):
                raise OptionError(f"{flag} {value}: the plan {source.plan.stem!r} has {found}")
        if not 0 <= number < len(source):
            raise OptionError(f"--row {number}: the plan has {len(source):,} rows, from 0")
        rows, documents = source.rows([number]), source.place(number).documents or ()
    ids, trained, columns = rows.ids[0], rows.trained[0].copy(), pack_columns(rows, documents)
    trained[0] = False  # the first token of a row is nobody's label
    if as_json:
        examples = [
            {
                "example": example,
                "columns": [first, last],
                "tokens": [start, stop],
                "text": decode(ids[first:last]),
            }
            for (example, start, stop), (first, last) in zip(documents, columns, strict=True)
        ]
        facts = {
            "store": str(store.folder),
            "plan": source.plan.stem,
            "split": source.split,
            "row": number,
            "ids": ids.tolist(),
            "trained": trained.astype(int).tolist(),
            "examples": examples,
        }
        print(json.dumps(facts))
        return
    head = (
        f"{folder}, plan {source.plan.stem!r}, split {source.split!r}, row {number:,} of "
        f"{len(source):,}: {len(documents):,} examples, {len(ids):,} tokens, "
        f"{int(trained.sum()):,} trained"
    )
    kept = np.arange(len(ids)) < max_tokens
    pieces = packed_pieces(
        documents, columns, ids, trained, kept, decode=decode, markers=marker_ids(store)
    )
    print_pieces([Heading(head), *pieces])


def _read(store: Store, split: str, number: int) -> ChatExamples:
    """The example; a document is one without turns and mask."""
    total = store.num_documents(split)
    if not 0 <= number < total:
        wanted = f"0 to {total - 1:,}" if total else "none: the split is empty"
        raise OptionError(f"--example {number:,}: split {split!r} has {total:,}; wanted {wanted}")
    if store.is_chat:
        return ChatSpace(store, split).examples([number])
    starts = store.document_starts(split)
    stop = int(starts[number + 1]) if number + 1 < total else store.num_tokens(split)
    ids = open_tokens(store, split).read(int(starts[number]), stop)
    return ChatExamples(
        ids=Ragged.from_lengths(ids, [len(ids)]),
        mask=np.zeros(len(ids), np.bool_),
        turn_starts=np.empty(0, np.int64),
        turn_roles=np.empty(0, np.uint8),
    )


def _counts(store: Store, found: ChatExamples) -> str:
    tokens = f"{len(found.mask):,} tokens"
    if not store.is_chat:
        return tokens
    return f"{len(found.turn_starts):,} turns, {tokens}, {int(found.mask.sum()):,} trained"


def _kept(found: ChatExamples, plan: FitPlan | None) -> BoolArray:
    """Which tokens the row holds; all of them without a plan."""
    if plan is None:
        return np.ones(len(found.mask), np.bool_)
    place = np.arange(len(found.mask))
    kept: BoolArray = (place < plan.head[0]) | ((place >= plan.start[0]) & (place < plan.stop[0]))
    return kept


def _pieces(
    store: Store, found: ChatExamples, plan: FitPlan | None, decode: Decode, max_tokens: int
) -> Iterator[Heading | Span]:
    kept = _kept(found, plan)
    if plan is not None and kept.any():  # the first token of a row is nobody's label
        mask = found.mask.copy()
        mask[kept.argmax()] = False
        found = replace(found, mask=mask)
    kept[np.flatnonzero(kept)[max_tokens:]] = False
    if store.is_chat:
        yield from chat_pieces(found, kept, marker_ids(store), decode)
    else:
        yield from spans(found.ids.values, found.mask, kept, marker_ids(store), decode)


def _told(plan: FitPlan, seq_len: int) -> str:
    for reason in plan.dropped:
        return f"no row at seq_len {seq_len:,}: {reason}: {FIT_REASONS[reason]}"
    length = int(plan.lengths[0])
    return (
        f"row of {seq_len + 1:,} tokens: {length:,} of the example, "
        f"{plan.counts.tokens_cut:,} left out, {seq_len + 1 - length:,} padding"
    )


def _facts(
    store: Store,
    split: str,
    number: int,
    found: ChatExamples,
    plan: FitPlan | None,
    decode: Decode,
) -> dict[str, Any]:
    ids, edges = found.ids.values, [*found.turn_starts.tolist(), len(found.mask)]
    facts: dict[str, Any] = {
        "store": str(store.folder),
        "split": split,
        "example": number,
        "ids": ids.tolist(),
        "text": decode(ids),
    }
    if store.is_chat:
        facts["mask"] = found.mask.astype(int).tolist()
        facts["turns"] = [
            {
                "role": ROLES[role],
                "start": start,
                "stop": stop,
                "trained": int(found.mask[start:stop].sum()),
                "text": decode(ids[start:stop]),
            }
            for role, start, stop in zip(
                found.turn_roles.tolist(), edges[:-1], edges[1:], strict=True
            )
        ]
    if plan is not None:
        kept = _kept(found, plan)
        facts["row"] = {"kept": np.flatnonzero(kept).tolist(), "dropped": list(plan.dropped)}
    return facts
