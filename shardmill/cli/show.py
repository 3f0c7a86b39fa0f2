"""`shardmill show`: one example of a store, with what is trained and what is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from shardmill.arguments import whole_number
from shardmill.chat.fit import FIT_REASONS, FIT_SENTENCES, Fit, FitPlan, plan_fit
from shardmill.cli.show_text import Decode, Heading, Span, bracketed, chat_pieces, spans
from shardmill.cli.tokenizer import parse_specials
from shardmill.errors import OptionError
from shardmill.mapped import ChatSpace, open_tokens
from shardmill.records import ROLES, BoolArray, ChatExamples, IntArray, Ragged
from shardmill.shards import Store, open_store

_FITS = "; ".join(f"{fit.value}: {sentence}" for fit, sentence in FIT_SENTENCES.items())


def show(
    folder: Annotated[Path, typer.Argument(help="The store to look into.")],
    example: Annotated[int, typer.Option(help="Which example or document, from 0.")],
    split: Annotated[str, typer.Option(help="Of which split.")] = "train",
    tokenizer: Annotated[
        str | None, typer.Option(help="The store's tokenizer; without it ids are shown.")
    ] = None,
    special: Annotated[
        list[str] | None, typer.Option(help="name=string, as the store was built with.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Show the row that training gets at this length.")
    ] = None,
    fit: Annotated[Fit, typer.Option(help=_FITS)] = Fit.DROP_OLDEST_TURNS,
    max_tokens: Annotated[int, typer.Option(help="Show so many tokens of it.")] = 20_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print ids, mask and turns.")] = False,
) -> None:
    """Show one example: trained tokens green, masked grey, structure bold.

    Without colours what is trained stands in [[ ]]. Invisible characters are written out.

    Example: shardmill show store --example 17 --tokenizer spm.model
    """
    whole_number(max_tokens, "--max-tokens", least=0)
    store = open_store(folder)
    found, unit = _read(store, split, example), store.manifest.unit
    decode = _decoder(store, tokenizer, special)
    plan = None
    if seq_len is not None:
        if not store.is_chat:
            raise OptionError(
                f"--seq-len {seq_len}: {folder} holds documents, which are not fitted"
            )
        plan = plan_fit(found, seq_len, fit)
    head = f"{folder}, split {split!r}, {unit} {example:,}: {_counts(store, found)}"
    if as_json:
        print(json.dumps(_facts(store, split, example, found, plan, decode)))
        return
    pieces = [Heading(head), *_pieces(store, found, plan, decode, max_tokens)]
    if plan is not None:
        pieces.append(Heading(_told(plan, int(seq_len or 0))))
    _print(pieces)


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


def _decoder(store: Store, name: str | None, special: list[str] | None) -> Decode:
    """Ids to text with the very tokenizer of the store; without one, the ids themselves."""
    if name is None:
        print("shardmill: no --tokenizer, so ids are shown", file=sys.stderr)
        return lambda ids: " ".join(map(str, ids.tolist())) + " "
    from shardmill.tokenizer import model_sha256_of, open_tokenizer

    opened = open_tokenizer(name, specials=parse_specials(special) if special else None)
    manifest = store.manifest
    known = {manifest.tokenizer_fingerprint, manifest.tokenizer_sha256} - {None}
    if not known & {opened.fingerprint, model_sha256_of(opened)}:
        raise OptionError(
            f"--tokenizer {name}: not the tokenizer of this store (fingerprint "
            f"{opened.fingerprint[:16]}, the store's is "
            f"{(manifest.tokenizer_fingerprint or 'unknown')[:16]}); its ids would be read as "
            "other words: name the one that the store was built with, with the same --special"
        )
    return lambda ids: opened.decode(ids)


def _markers(store: Store) -> IntArray:
    chat = store.manifest.options.get("chat", {})
    ids = {*store.manifest.special_token_ids.values(), *chat.get("marker_ids", ())}
    return np.array(sorted(ids), np.int64)


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
        yield from chat_pieces(found, kept, _markers(store), decode)
    else:
        yield from spans(found.ids.values, found.mask, kept, _markers(store), decode)


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


def _print(pieces: list[Heading | Span]) -> None:
    """Colours on a terminal that has them, else brackets."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, emoji=False, markup=False)
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    line_open = False
    for piece in pieces if coloured else bracketed(pieces):
        text = piece.text
        if isinstance(piece, Heading):
            text = ("\n" if line_open else "") + f"-- {text}\n"
        line_open = not text.endswith("\n") if text else line_open
        safe = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
        console.print(Text(safe, style=_style(piece) if coloured else ""), end="")
    if line_open:
        console.print()


def _style(piece: Heading | Span) -> str:
    if isinstance(piece, Heading):
        return "cyan"
    return ("green" if piece.trained else "bright_black") + (" bold" if piece.marker else "")
