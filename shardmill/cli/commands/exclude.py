"""`shardmill exclude`: documents or steps that are not to be trained on any more.

Exclusions as something to look at.

In: entries, a store.  Out: lines, and facts for JSON.
Promise: no character of a reason reaches a terminal that is not visible.
Not here: changing them (exclude).

The tokens that all ranks saw at some steps, store by store.

In: data, seed, batch size, world, and steps.  Out: an entry for every store that gave samples.
Promise: the samples are those that loaders opened now give there, as `show --step` shows them:
where something is excluded already, its stand-ins. No loop over samples.
Not here: writing entries (exclude).
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from shardmill.cli.describe import entry_facts, entry_line
from shardmill.cli.steps import StepCall, find_moment, find_place, places_of
from shardmill.errors import OptionError
from shardmill.inspect.steps import Moment
from shardmill.loading import TokenSource
from shardmill.loading.config import meant_split
from shardmill.loading.order import Shuffle
from shardmill.records import OffsetArray
from shardmill.sampling.order import by_value
from shardmill.store import (
    ExcludedSteps,
    ExcludeEntry,
    Store,
    add_exclusion,
    open_store,
    read_exclusions,
    remove_exclusion,
)
from shardmill.store.exclusions import (
    NO_SPANS,
    as_spans,
    count_tokens,
    documents_entry,
    merge_spans,
    spans_entry,
)

_CHUNK = 2**16  # samples looked at together
_MOST_SAMPLES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one store is to exclude."""

    store: Store
    entry: ExcludeEntry  # not written yet
    windows: tuple[int, int] | None = None  # with an excluded token of it, of how many
    stand_ins: int = 0  # samples of the steps that stand in for others already


def find_parts(
    folder: Path | None,
    call: StepCall,
    steps: str,
    *,
    row: tuple[str | None, int | None],
    reason: str,
) -> list[Part]:
    """The entries of these steps; `row`: split and sequence length."""
    first, stop = parse_steps(steps)
    _, moment = find_moment(folder, replace(call, step=first), row)
    with closing(moment.stream) as stream:
        only = None if call.config is None else find_place(folder, stream)
        spans, stand_ins = _collect(moment, stop - first)
        parts = []
        for number, source in enumerate(stream.sources):
            if not len(spans[number]) or (only is not None and only not in places_of(source)):
                continue
            if source.split is None or not isinstance(source, TokenSource):
                raise OptionError(
                    f"source {source.name!r}: {source.path} is no store, so nothing can be "
                    "recorded there; only stores have exclusions"
                )
            told = ExcludedSteps(
                source=source.name,
                start=first,
                stop=stop,
                world=moment.world,
                batch_size=moment.batch_size,
                seq_len=stream.seq_len,
                seed=stream.seed,
                shuffle=stream.shuffle,
            )
            store = open_store(source.path)
            entry = spans_entry(store, spans[number], reason=reason, split=source.split, steps=told)
            windows = source.windows_of(spans[number])
            parts.append(
                Part(store=store, entry=entry, windows=windows, stand_ins=stand_ins[number])
            )
    return parts


def parse_steps(text: str) -> tuple[int, int]:
    """`A` or `A:B`, the latter without B."""
    first, colon, stop = text.partition(":")
    words = [first, stop] if colon else [first]
    if not all(word.isascii() and word.isdigit() and len(word) < 16 for word in words):
        raise OptionError(f"--step {text}: wanted a step, as 31207, or steps, as 31200:31210")
    start = int(first)
    behind = int(stop) if colon else start + 1
    if behind <= start:
        raise OptionError(f"--step {text}: no step lies in it; {start}:{start + 1} is one step")
    return start, behind


def _collect(moment: Moment, num_steps: int) -> tuple[list[OffsetArray], list[int]]:
    """Of each source: the tokens of its samples, and how many of them are stand-ins."""
    stream, size = moment.stream, moment.stop - moment.samples
    stop = moment.samples + num_steps * size
    if stop - moment.samples > _MOST_SAMPLES:
        raise OptionError(
            f"{num_steps:,} steps of {size:,} samples: wanted at most {_MOST_SAMPLES:,} samples; "
            "exclude fewer steps at a time"
        )
    spans = [NO_SPANS for _ in stream.sources]
    stand_ins = [0 for _ in stream.sources]
    for start in range(moment.samples, stop, _CHUNK):
        samples = np.arange(start, min(start + _CHUNK, stop))
        found, meant = stream.take(samples), stream.take_all(samples)
        for number, chosen in by_value(found.source):
            source, items = stream.sources[number], found.item[chosen]
            if not isinstance(source, TokenSource):
                raise OptionError(
                    f"source {source.name!r}: these steps saw rows of a pack plan of "
                    f"{source.path}, and --step excludes windows only; exclude the conversations "
                    "with --document (`shardmill show --plan` prints which a row has)"
                )
            spans[number] = merge_spans(np.concatenate((spans[number], source.spans(items))))
            stand_ins[number] += int((items != meant.item[chosen]).sum())
    return spans, stand_ins


def exclude(
    folder: Annotated[
        Path | None, typer.Argument(help="The store; not needed with --config and --step.")
    ] = None,
    document: Annotated[
        list[int] | None, typer.Option(help="A document or conversation, from 0. Repeatable.")
    ] = None,
    documents: Annotated[
        Path | None, typer.Option(help="A file of such numbers, one a line.")
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="A step, or steps A:B up to but without B, of all ranks.")
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Why, in words.")] = None,
    split: Annotated[str | None, typer.Option(help="Of which split. Default: 'train'.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of one rank at a step.")] = None,
    world: Annotated[int | None, typer.Option(help="Number of ranks. Default: 1.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Inputs of a row. With documents: count such windows.")
    ] = None,
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
    list_all: Annotated[
        bool, typer.Option("--list", help="Tell the entries of the store, and change nothing.")
    ] = False,
    remove: Annotated[int | None, typer.Option(help="Take the entry of this number back.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be excluded; write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")] = False,
) -> None:
    """Record what is not to be trained on: by document, or by the steps that saw it.

    Tokens stay as they are. Readers pass over every sample that has an excluded token: another
    sample of the same source takes its place, and everything else keeps its place.

    Prints what is excluded now: documents or steps, tokens, windows that have one of them.

    Example: shardmill exclude store --document 17 --reason "takedown 4711"

    Example: shardmill exclude store --step 3:5 --batch-size 4 --seq-len 64 --reason spike

    Exit 0: recorded, listed or taken back. Exit 2: a mistake in the call or its input.
    """
    call = StepCall(
        world=world,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        config=config,
        name=name,
    )
    by_document = bool(document) or documents is not None
    _check_one(list_all, remove is not None, by_document, step is not None)
    if step is None and call.told():
        raise OptionError(f"{call.told()[0]} is for --step")
    if list_all or remove is not None:
        store = _store(folder, split)[0]
        if remove is not None:
            _print_removed(store, remove, dry_run=dry_run, as_json=as_json)
        else:
            _print_list(store, as_json=as_json)
        return
    if reason is None:
        raise OptionError("--reason is missing: why, in words; whoever comes later will ask")
    if step is not None:
        parts = find_parts(folder, call, step, row=(split, seq_len), reason=reason)
    else:
        numbers = _numbers(document or [], documents)
        parts = [_documents_part(*_store(folder, split), numbers, seq_len, reason)]
    _write(parts, dry_run=dry_run, as_json=as_json)


def _check_one(*asked: bool) -> None:
    if sum(asked) != 1:
        raise OptionError(
            f"found {sum(asked)} things to do; wanted one of --document (and --documents), --step, "
            "--list and --remove"
        )


def _store(folder: Path | None, split: str | None) -> tuple[Store, str]:
    if folder is None:
        raise OptionError("name the store")
    found = meant_split(folder, split)
    if found is None:
        raise OptionError(
            f"{folder}: no store, so nothing can be recorded there; only stores have exclusions"
        )
    return found


def _numbers(given: list[int], path: Path | None) -> OffsetArray:
    wrong = next((number for number in given if not 0 <= number < 2**62), None)
    if wrong is not None:
        raise OptionError(f"--document {wrong!s:.40}: wanted a number from 0")
    if path is None:
        return np.array(given, np.int64)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise OptionError(f"--documents {path}: cannot be read: {error}") from error
    found = list(given)
    for at, line in enumerate(lines, start=1):
        word = line.strip()
        digits = word.isascii() and word.isdigit() and len(word) < 20
        if word and not (digits and int(word) < 2**62):
            raise OptionError(f"--documents {path}, line {at:,}: {line!r:.80}; wanted one number")
        found += [int(word)] if word else []
    if not found:
        raise OptionError(f"--documents {path}: no number in it")
    return np.array(found, np.int64)


def _documents_part(
    store: Store, split: str, numbers: OffsetArray, seq_len: int | None, reason: str
) -> Part:
    entry = documents_entry(store, numbers, reason=reason, split=split)
    if seq_len is None:
        return Part(store=store, entry=entry)
    if store.is_chat:
        raise OptionError(
            f"--seq-len {seq_len}: {store.folder} holds conversations, which are not cut into "
            "windows; leave it away"
        )
    with closing(TokenSource(store.folder, seq_len=seq_len, split=split)) as source:
        return Part(store=store, entry=entry, windows=source.windows_of(as_spans(entry.spans)))


def _write(parts: list[Part], *, dry_run: bool, as_json: bool) -> None:
    told = []
    for part in parts:
        before = read_exclusions(part.store)
        both = merge_spans(
            np.concatenate((before.spans(part.entry.split), as_spans(part.entry.spans)))
        )
        fresh = count_tokens(both) - before.num_tokens(part.entry.split)
        entry = part.entry if dry_run else add_exclusion(part.store, part.entry)
        told.append(_facts(part, entry, fresh, written=not dry_run))
        if not as_json:
            typer.echo(_line(part, entry, fresh, dry_run=dry_run))
    if as_json:
        typer.echo(json.dumps({"excluded": told}, indent=2))


def _line(part: Part, entry: ExcludeEntry, fresh: int, *, dry_run: bool) -> str:
    shown = msgspec.structs.replace(entry, number=0) if dry_run else entry
    text = entry_line(shown)
    if dry_run:
        text = f"would be excluded, {text.partition(', ')[2]}"
    notes = [f"{fresh:,} of these tokens were not excluded before"]
    if part.windows is not None:
        notes.append(f"{part.windows[0]:,} of {part.windows[1]:,} windows have one of them")
    if part.stand_ins:
        notes.append(f"{part.stand_ins:,} samples of these steps are stand-ins already")
    return f"{part.store.folder}: {text} ({'; '.join(notes)})"


def _facts(part: Part, entry: ExcludeEntry, fresh: int, *, written: bool) -> dict[str, Any]:
    return {
        "store": str(part.store.folder),
        "written": written,
        "new_tokens": fresh,
        "windows": None if part.windows is None else part.windows[0],
        "of_windows": None if part.windows is None else part.windows[1],
        "stand_ins": part.stand_ins,
        "entry": entry_facts(entry) | ({} if written else {"number": None}),
    }


def _print_removed(store: Store, number: int, *, dry_run: bool, as_json: bool) -> None:
    if dry_run:
        raise OptionError("--dry-run: nothing to try out with --remove; see --list")
    gone = remove_exclusion(store, number)
    if as_json:
        typer.echo(json.dumps({"store": str(store.folder), "removed": entry_facts(gone)}, indent=2))
        return
    typer.echo(f"{store.folder}: taken back: {entry_line(gone)}")


def _print_list(store: Store, *, as_json: bool) -> None:
    found = read_exclusions(store)
    if as_json:
        facts = {"store": str(store.folder), "sha256": found.sha256}
        entries = [entry_facts(entry) for entry in found.entries]
        typer.echo(json.dumps(facts | {"entries": entries}, indent=2))
        return
    for entry in found.entries:
        typer.echo(entry_line(entry))
    for split in dict.fromkeys(entry.split for entry in found.entries):
        tokens, total = found.num_tokens(split), store.num_tokens(split)
        typer.echo(f"{store.folder}, {split}: {tokens:,} of {total:,} tokens are excluded")
    if not found.entries:
        typer.echo(f"{store.folder}: nothing is excluded")
