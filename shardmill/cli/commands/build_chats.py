"""`shardmill build chats`: conversations to a store with loss mask and turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from shardmill.chat import KNOWN_TEMPLATES
from shardmill.cli.build_output import BuildOptions, run_build
from shardmill.cli.options import Special, parse_special
from shardmill.sources import SHAPES


@dataclass(frozen=True, kw_only=True)
class ChatOptions(BuildOptions):
    """What `shardmill build chats` takes."""

    inputs: Annotated[
        list[str],
        typer.Argument(help="Folders, files or globs of .jsonl .json .parquet, or hub:owner/name."),
    ]
    template: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(KNOWN_TEMPLATES)}; a .json or .toml file of the same kind; 'jinja' "
            "for the tokenizer's own template, or a .jinja file."
        ),
    ]
    special: Special = None
    shape: Annotated[
        str | None,
        typer.Option(help=f"Shape of the records: {', '.join(SHAPES)}. Default: found."),
    ] = None
    train_on: Annotated[
        Literal["assistant", "last-assistant", "all"], typer.Option(help="Which turns are trained.")
    ] = "assistant"
    train_on_eot: Annotated[bool, typer.Option(help="A trained turn trains its end token too.")] = (
        True
    )
    val_fraction: Annotated[
        float, typer.Option(help="About this share of conversations goes to 'val'.")
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Decides which conversations go to 'val'.")] = 0


def chats(options: ChatOptions) -> None:
    """Render conversations into a store, each whole, with loss mask and turns.

    Prints one line: conversations, turns, tokens, how many are trained, what was left out and why.
    The template's mask is proved first; a template that fails is refused. To tokenise the texts of
    a folder called chats, write ./chats.

    Example: shardmill build chats c.jsonl --out c --tokenizer spm.model --template chatml

    Exit 0: built. Exit 2: a mistake in the call or its input; what is done is kept. Exit 130:
    stopped with Ctrl-C; continue with --resume.
    """
    run_build(options, special=parse_special(options.special))
