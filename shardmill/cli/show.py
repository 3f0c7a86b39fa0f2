"""`shardmill show`: one example of a store, or the batch of a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmill.arguments import whole_number
from shardmill.chat.fit import FIT_SENTENCES, Fit
from shardmill.cli.completing import complete_split
from shardmill.cli.show_example import show_example, show_row
from shardmill.cli.show_step import StepCall, show_step
from shardmill.errors import OptionError
from shardmill.loading.stream import Shuffle

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
