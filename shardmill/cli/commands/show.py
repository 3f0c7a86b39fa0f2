"""`shardmill show`: one example of a store, or the batch of a training step.

One example of a store, or one row of a pack plan, with what is trained and what is not.

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
from typing import Annotated, Any

import numpy as np
import typer

from shardmill.arguments import whole_number
from shardmill.chat.fit import FIT_REASONS, FIT_SENTENCES, Fit, FitPlan, plan_fit
from shardmill.cli.printing import Decode, Heading, Span, chat_pieces, decoder, print_pieces, spans
from shardmill.cli.steps import StepCall, packed_pieces, show_step
from shardmill.cli.terminal import complete_split
from shardmill.errors import OptionError
from shardmill.inspect.steps import pack_columns
from shardmill.inspect.stores import marker_ids
from shardmill.loading import PackSource
from shardmill.loading.order import Shuffle
from shardmill.records import ROLES, BoolArray, ChatExamples, Ragged
from shardmill.store import Store, open_store
from shardmill.store.readers import ChatSpace, open_tokens


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
        rows, documents = source.rows([number]), source.span(number).documents or ()
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


_FITS = "; ".join(f"{fit.value}: {sentence}" for fit, sentence in FIT_SENTENCES.items())


def show(
    folder: Annotated[
        Path | None, typer.Argument(help="The store to look into, or a folder of tokens.")
    ] = None,
    example: Annotated[int | None, typer.Option(help="Which example or document, from 0.")] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Of which split. Default: 'train'.", autocompletion=complete_split),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="Rows of this pack plan: its name, or its length if only one has it."),
    ] = None,
    row: Annotated[int | None, typer.Option(help="Which row of --plan. Default: 0.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The store's tokenizer; without it ids are shown.")
    ] = None,
    special: Annotated[
        list[str] | None, typer.Option(help="NAME=STRING, as the store was built with.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Show the row that training gets at this length.")
    ] = None,
    fit: Annotated[Fit, typer.Option(help=_FITS)] = Fit.DROP_OLDEST_TURNS,
    max_tokens: Annotated[int, typer.Option(help="Show so many tokens of it.")] = 20_000,
    step: Annotated[
        int | None, typer.Option(help="Show the batch of this step, from 0, in place of --example.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="The batch after so many samples of all ranks.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="The batch after this state of a Loader, a JSON file.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Of this rank. Default: 0.")] = None,
    world: Annotated[int | None, typer.Option(help="Number of ranks. Default: 1.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of one rank at a step.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order. Default: 0.")] = None,
    shuffle: Annotated[
        Shuffle | None, typer.Option(help="As the training had it. Default: global.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file whose \\[data] table names the sources.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The source's name, if it is not that of its folder.")
    ] = None,
    documents: Annotated[
        bool | None,
        typer.Option("--documents/--no-documents", help="Labels at borders are ignored."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ids, mask and turns.")] = False,
) -> None:
    """Show an example, a packed row, or the batch of a step: trained green, others grey.

    Prints text, or ids when there is no --tokenizer; structure is bold. Without colours what is
    trained stands in [[ ]]. Invisible characters are written out.

    Example: shardmill show store --example 7 --tokenizer spm.model

    Example: shardmill show chats --plan train-4095 --row 0 --tokenizer spm.model

    Example: shardmill show store --step 31 --rank 3 --world 8 --batch-size 4 --seq-len 64

    Exit 0: shown. Exit 2: a mistake in the call, no such store or example, another tokenizer.
    """
    whole_number(max_tokens, "--max-tokens", least=0)
    call = StepCall(
        step=step,
        samples=samples,
        state=state,
        rank=rank,
        world=world,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        config=config,
        name=name,
        documents=documents,
        plan=plan,
    )
    if row is not None and (plan is None or call.told() != ["--plan"]):
        raise OptionError(f"--row {row}: that is a row of --plan alone, without --step or --config")
    if example is None and call.told() == ["--plan"]:
        show_row(
            folder,
            plan or "",
            row or 0,
            said=(split, seq_len),
            tokenizer=(tokenizer, special),
            max_tokens=max_tokens,
            as_json=as_json,
        )
        return
    if example is None:
        show_step(
            folder,
            call,
            row=(split, seq_len),
            tokenizer=(tokenizer, special),
            max_tokens=max_tokens,
            as_json=as_json,
        )
        return
    if call.told():
        raise OptionError(f"{call.told()[0]} is for --step, --samples or --state, not --example")
    if folder is None:
        raise OptionError(f"--example {example}: name the store to look into")
    show_example(
        folder,
        split or "train",
        example,
        tokenizer=(tokenizer, special),
        row=(seq_len, fit),
        max_tokens=max_tokens,
        as_json=as_json,
    )
