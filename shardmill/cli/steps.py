"""`shardmill show --step`: what a rank trains on at a step, from the numbers alone.

In: data, seed, batch size, rank, world, and a step, a number of samples or a saved state.
Out: the rows of that batch on stdout, or as JSON.
Promise: what nobody said is an error, not a guess, unless it has one default everywhere; a state of
other data or another order is refused by name.
Not here: rows (show_batch), examples and conversations (show_example).

The rows of one batch as something to look at.

In: rows of a batch.  Out: headings and spans, or facts for JSON.
Promise: every token is shown or counted as left out; every document and every border between two of
them is told.
Not here: which batch is meant (show_step), reading it (inspector.batch), printing (show_print).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.arguments import whole_number
from shardmill.cli.commands.check import choose_pattern
from shardmill.cli.printing import Decode, Heading, Span, decoder, print_pieces, spans
from shardmill.cli.terminal import visible
from shardmill.errors import MissingExtraError, OptionError, StateMismatchError, TokenizerError
from shardmill.inspect.steps import Moment, Row, read_row
from shardmill.inspect.stores import marker_ids
from shardmill.loading import PlannedSample, RowSource, SampleStream
from shardmill.loading.config import (
    DataConfig,
    DatasetConfig,
    meant_split,
    open_stream,
    read_config,
)
from shardmill.loading.order import Shuffle
from shardmill.loading.rows import Documents
from shardmill.loading.state import read_state
from shardmill.records import JSON, BoolArray, IntArray
from shardmill.store import Store, find_plan, open_store, read_plan


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


State = dict[str, Any]
MOST_ROWS = 2**20
"""Of one rank at a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """What the command was told about the training; None where it was told nothing."""

    step: int | None = None
    samples: int | None = None
    state: Path | None = None
    rank: int | None = None
    world: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    shuffle: Shuffle | None = None
    config: Path | None = None
    name: str | None = None
    documents: bool | None = None
    plan: str | None = None

    def told(self) -> list[str]:
        """The flags that were given."""
        given = [one.name for one in fields(self) if getattr(self, one.name) is not None]
        return [f"--{name.replace('_', '-')}" for name in given]


def show_step(
    folder: Path | None,
    call: StepCall,
    *,
    row: tuple[str | None, int | None],
    tokenizer: tuple[str | None, list[str] | None],
    max_tokens: int,
    as_json: bool,
) -> None:
    """Print the batch; `row`: split and sequence length, `tokenizer`: its name and specials."""
    chosen = [flag for flag in call.told() if flag in ("--step", "--samples", "--state")]
    if len(chosen) != 1:
        raise OptionError(
            f"found {' and '.join(chosen) or 'nothing to show'}; wanted one of --example, --step, "
            f"--samples and --state"
        )
    config, moment = find_moment(folder, call, row)
    with closing(moment.stream):
        planned = moment.plan()
        only = None if call.config is None else find_place(folder, moment.stream)
        shown = [plan for plan in planned if only is None or only in places_of(plan)]
        rows = [read_row(moment, plan) for plan in shown]
    stores = [open_store(one.path) for one in moment.stream.sources if one.split is not None]
    decode = _decoder(config, tokenizer, stores)
    if as_json:
        print(json.dumps(batch_facts(moment, rows, decode)))
        return
    pieces: list[Heading | Span] = [Heading(_head(moment, planned, call.step, len(rows)))]
    for one in rows:
        pieces += row_pieces(one, decode, marker_ids(*stores), max_tokens)
        max_tokens = max(0, max_tokens - len(one.window))
    print_pieces(pieces)


def find_moment(
    folder: Path | None, call: StepCall, row: tuple[str | None, int | None]
) -> tuple[DataConfig, Moment]:
    """The batch that is meant, and the config of its data. The caller closes its stream."""
    split, seq_len = row
    state = {} if call.state is None else _read_json(call.state)
    config = _config(folder, split, call, state)
    if call.plan is not None and folder is not None and seq_len is None:
        found = read_plan(find_plan(open_store(folder).folder, call.plan))
        seq_len = found.facts.options.seq_len
    return config, _moment(call, state, config, seq_len)


def token_of_step(
    folder: Path, call: StepCall, row: tuple[str | None, int | None], number: int, column: int
) -> tuple[str | None, int]:
    """The split, and the position in it, of the token at a column of a row of a batch."""
    _, moment = find_moment(folder, call, row)
    with closing(moment.stream):
        planned = moment.plan()
    if not 0 <= number < len(planned):
        raise OptionError(f"--row {number}: the batch has {len(planned)} rows")
    plan = planned[number]
    if not 0 <= column < plan.stop - plan.start:
        raise OptionError(f"--column {column}: a row has {plan.stop - plan.start:,} tokens")
    return plan.split, plan.start + column


def _config(folder: Path | None, split: str | None, call: StepCall, state: State) -> DataConfig:
    """The config that was named, or one of the folder alone."""
    if call.config is not None:
        for flag, value in (("--name", call.name), ("--split", split), ("--plan", call.plan)):
            if value is not None:
                raise OptionError(f"{flag} {value}: that is said by {call.config}; leave it away")
        return read_config(call.config)
    if folder is None:
        raise OptionError("nothing to show: name a store, a folder of tokens, or --config")
    if meant_split(folder, split) is not None:
        pattern = None
    elif split is not None:
        raise OptionError(f"--split {split}: {folder} is no store, so it has no splits")
    else:
        pattern = choose_pattern(folder)
    name = call.name or _name_in(state)  # it is part of the order; "": the folder's
    alone = DatasetConfig(
        name=name, path=str(folder), split=split, file_pattern=pattern, plan=call.plan
    )
    return DataConfig(datasets=(alone,))


def _name_in(state: State) -> str:
    """The name of the only source of a state; "" when there are others or none."""
    match state.get("sources"):
        case [[str(name), str()]]:
            return name
    return ""


def _moment(call: StepCall, state: State, config: DataConfig, seq_len: int | None) -> Moment:
    if call.batch_size is None:
        raise OptionError("--batch-size is missing: how many samples one rank had at a step")
    length = state.get("seq_len") if seq_len is None else seq_len
    if length is None:
        raise OptionError("--seq-len is missing: how many inputs a row had")
    world = whole_number(1 if call.world is None else call.world, "--world")
    batch = whole_number(call.batch_size, "--batch-size")
    if batch > MOST_ROWS:
        raise OptionError(f"--batch-size {batch:,}: wanted at most {MOST_ROWS:,} to look at")
    # a flag, else the config, else the state; `read_state` refuses what disagrees with the state
    said = state if call.config is None else {}
    stream = open_stream(
        replace(config, shuffle=call.shuffle or said.get("shuffle", config.shuffle)),
        seq_len=whole_number(length, "--seq-len"),
        global_batch_size=world * batch,
        seed=said.get("seed") if call.seed is None else call.seed,
    )
    if call.state is not None:
        samples = read_state(state, stream)
    elif call.samples is not None:
        samples = whole_number(call.samples, "--samples", least=0)
    else:
        samples = whole_number(call.step or 0, "--step", least=0) * world * batch
    return Moment(
        stream=stream,
        samples=samples,
        rank=whole_number(call.rank or 0, "--rank", least=0),
        world=world,
        batch_size=batch,
        documents=config.pack_sequences if call.documents is None else call.documents,
    )


def find_place(folder: Path | None, stream: SampleStream) -> Path | None:
    """The folder, if it is one of the sources; None: all of them are meant."""
    if folder is None:
        return None
    found = folder.absolute()
    if not any(found in places_of(source) for source in stream.sources):
        raise OptionError(
            f"{folder}: none of the config's sources, which are "
            f"{', '.join(str(source.path) for source in stream.sources)}"
        )
    return found


def places_of(of: RowSource | PlannedSample) -> list[Path]:
    """The paths that name a source or a sample of it."""
    return [of.path] if of.split is None else [of.path, of.path / of.split]


def _read_json(path: Path) -> State:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"--state {path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise StateMismatchError(
            f"--state {path}: a {type(found).__name__}, wanted what `state_dict` gave, as JSON"
        )
    return found


def _decoder(
    config: DataConfig, tokenizer: tuple[str | None, list[str] | None], stores: list[Store]
) -> Decode:
    """With the tokenizer that was named, else with the config's if it can be opened."""
    name, special = tokenizer
    if name is not None or config.tokenizer_path is None:
        return decoder(name, special, *stores)
    try:
        return decoder(config.tokenizer_path, special, *stores)
    except (TokenizerError, MissingExtraError) as error:
        print(f"shardmill: tokenizer_path: {error}", file=sys.stderr)
        return decoder(None, None)


def _head(moment: Moment, planned: list[PlannedSample], step: int | None, shown: int) -> str:
    own = f"{planned[0].sample:,}..{planned[-1].sample + 1:,}"
    at = "" if step is None else f"step {step:,}, "
    hidden = len(planned) - shown
    return (
        f"{at}samples {moment.samples:,}..{moment.stop:,}; rank {moment.rank} of {moment.world} "
        f"has {own}" + (f", {hidden} of other sources are not shown" if hidden else "")
    )
