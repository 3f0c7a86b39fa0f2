"""`shardmill blame`: from a token of a store to its file, its row and its characters."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardmill.cli.commands.build_chats import open_template
from shardmill.cli.printing import named_tokenizer
from shardmill.cli.steps import StepCall, token_of_step
from shardmill.cli.terminal import visible
from shardmill.errors import OptionError
from shardmill.inspect.blame import AnySource, blame_document, blame_tokens
from shardmill.inspect.blame_records import Blame
from shardmill.loading.order import Shuffle
from shardmill.sources import open_chats, open_source
from shardmill.store import Store, open_store

_AROUND = 60
"""Characters that are shown on each side."""


def blame(
    folder: Annotated[Path, typer.Argument(help="The store.")],
    tokenizer: Annotated[str, typer.Option(help="The tokenizer that the store was built with.")],
    split: Annotated[str | None, typer.Option(help="Of which split. Default: 'train'.")] = None,
    token: Annotated[int | None, typer.Option(help="Position of the token in the split.")] = None,
    stop: Annotated[int | None, typer.Option(help="Up to this one: several tokens.")] = None,
    document: Annotated[
        int | None, typer.Option(help="In place of --token: which document, from 0.")
    ] = None,
    offset: Annotated[int | None, typer.Option(help="Which token of it. Default: 0.")] = None,
    source: Annotated[
        list[str] | None,
        typer.Option("--input", help="What the store was built from, as `build` was told it."),
    ] = None,
    field: Annotated[str | None, typer.Option(help="As the build had it.")] = None,
    on_bad: Annotated[
        Literal["error", "skip"] | None, typer.Option(help="As the build had it.")
    ] = None,
    file_seed: Annotated[
        int | None, typer.Option(help="The --seed of the build, if it had one.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Of chats, as the build had it.")] = None,
    template: Annotated[
        str | None, typer.Option(help="Of chats: needed only for a Jinja template.")
    ] = None,
    special: Annotated[
        list[str] | None, typer.Option(help="name=string, as the store was built with.")
    ] = None,
    fill: Annotated[
        str | None, typer.Option(help="Order of the splits, e.g. val,train, if nobody can tell.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="In place of --token: a step of a training, from 0.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Of this rank. Default: 0.")] = None,
    world: Annotated[int | None, typer.Option(help="Number of ranks. Default: 1.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of one rank at a step.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Inputs of a row.")] = None,
    row: Annotated[int, typer.Option(help="Which row of the batch.")] = 0,
    column: Annotated[int, typer.Option(help="Which token of the row.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Of the order. Default: 0.")] = None,
    shuffle: Annotated[
        Shuffle | None, typer.Option(help="As the training had it. Default: global.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Tell where tokens came from: source, file, row, characters.

    The row is read and encoded again, and must give the stored tokens. In place of --token, a
    token of a document (--document, --offset) or of a training's batch (--step, --batch-size,
    --seq-len, --row, --column) can be asked for.

    Prints source, file, row and characters of each token, with the text around it.

    Example: shardmill blame store --token 99 --input 'data/*.jsonl' --tokenizer spm.model

    Exit 0: found and proved. Exit 2: a mistake in the call, or another input than the build had.
    """
    store = open_store(folder)
    call = StepCall(
        step=step, rank=rank, world=world, batch_size=batch_size, seed=seed, shuffle=shuffle
    )
    chosen = [
        name for name, one in (("--token", token), ("--document", document)) if one is not None
    ]
    if len(chosen) + (step is not None) != 1 or (step is None and call.told()):
        raise OptionError(
            f"found {' and '.join([*chosen, *call.told()]) or 'no token'}; wanted one of --token, "
            "--document and --step, with its own options"
        )
    if step is not None:
        split, token = token_of_step(folder, call, (split, seq_len), row, column)
    named = split or "train"
    if document is not None:
        inside = blame_document(store, named, document)
        token = inside.start + (offset or 0)
        if token not in inside or (offset or 0) < 0:
            raise OptionError(f"--offset {offset}: the document has {len(inside):,} tokens")
    assert token is not None, "one of the three tells it"
    options = {"field": field, "on_bad": on_bad, "seed": file_seed, "shape": shape}
    found = blame_tokens(
        store,
        named,
        range(token, token + 1 if stop is None else stop),
        inputs=_opened(store, source, options),
        tokenizer=named_tokenizer(tokenizer, special, store),
        template=None if template is None else open_template(template, tokenizer, special).template,
        fill=None if fill is None else fill.split(","),
    )
    if as_json:
        print(json.dumps({"store": str(folder), "tokens": [asdict(one) for one in found]}))
        return
    for one in found:
        print("\n".join(_lines(one)))


def _opened(store: Store, inputs: list[str] | None, options: dict[str, Any]) -> AnySource | None:
    if inputs is None:
        return None
    given = {key: value for key, value in options.items() if value is not None}
    return open_chats(inputs, **given) if store.is_chat else open_source(inputs, **given)


def _lines(one: Blame) -> list[str]:
    """A few lines for a person."""
    own = f" (id {visible(one.own_id)})" if one.own_id is not None else ""
    where = f"{visible(one.source)}, {visible(one.row_id)}{own}"
    turn = "" if one.turn is None else f", turn {one.turn} ({one.role})"
    part = f" {one.part}" if one.part not in (None, "content") else ""
    lines = [
        f"split {one.split!r}, token {one.token:,} = id {one.token_id}: document {one.document:,}, "
        f"token {one.offset:,} of it",
        f"  from {where}{turn}{part}; found by {one.found_by}",
    ]
    if one.start is None or one.stop is None:
        return [*lines, f"  {_TEXTLESS[one.kind]}"]
    before = one.text[max(0, one.start - _AROUND) : one.start]
    behind = one.text[one.stop : one.stop + _AROUND]
    shown = f"{_inline(before)}[[{_inline(one.characters)}]]{_inline(behind)}"
    return [*lines, f"  characters {one.start:,}..{one.stop:,}: {shown}"]


_TEXTLESS = {
    "end": "appended by the build, no text",
    "template": "of the template, no text",
    "turn": "of a turn that a Jinja template wrote; it tells no words from marks",
    "text": "the tokenizer does not tell its characters",
}


def _inline(text: str) -> str:
    """One line, nothing invisible, no brackets of our own."""
    shown = visible(text).replace("\\n\n", "\\n")
    return shown.replace("[[", "[\\[").replace("]]", "]\\]")
