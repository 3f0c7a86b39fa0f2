"""The batch of a training step, from the options that describe the training.

Options that were not given are taken from the config or the saved state; what neither says is an
error, unless it has one default everywhere.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shardmill.arguments import whole_number
from shardmill.cli.options import Split, read_state
from shardmill.cli.tokens import choose_pattern
from shardmill.errors import OptionError
from shardmill.inspect.rows import Moment
from shardmill.loading import PlannedSample, RowSource, SampleStream
from shardmill.loading.config import (
    DataConfig,
    DatasetConfig,
    meant_split,
    open_stream,
    read_config,
)
from shardmill.loading.order import Shuffle
from shardmill.loading.state import read_state as read_position
from shardmill.store import find_plan, open_store, read_plan

MOST_ROWS = 2**20
"""Of one rank at a step."""
Rank = Annotated[int | None, typer.Option(help="Of this rank. Default: 0.")]
SourceName = Annotated[
    str | None, typer.Option(help="The source's name, if it is not that of its folder.")
]


@dataclass(frozen=True, kw_only=True)
class TrainingOrder:
    """Options of every command that looks at the steps of a training."""

    split: Split = None
    seq_len: Annotated[int | None, typer.Option(help="Inputs of a row.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Samples of one rank at a step.")] = None
    world: Annotated[int | None, typer.Option(help="Number of ranks. Default: 1.")] = None
    seed: Annotated[int | None, typer.Option(help="Of the order. Default: 0.")] = None
    shuffle: Annotated[
        Shuffle | None, typer.Option(help="As the training had it. Default: global.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """What a command was given about a training; None: not given."""

    split: str | None = None
    seq_len: int | None = None
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

    @classmethod
    def of(cls, options: TrainingOrder) -> StepCall:
        """From the options of a command, which has some of these."""
        names = [field.name for field in fields(cls) if hasattr(options, field.name)]
        return cls(**{name: getattr(options, name) for name in names})

    def given(self) -> list[str]:
        """The flags that were given, but for those that also concern examples."""
        names = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        return [f"--{one.replace('_', '-')}" for one in names if one not in ("split", "seq_len")]


def find_moment(folder: Path | None, call: StepCall) -> tuple[DataConfig, Moment]:
    """The config of the data and the batch that is meant. The caller closes its stream."""
    state = {} if call.state is None else read_state(call.state)
    config = _config(folder, call, state)
    seq_len = call.seq_len
    if call.plan is not None and folder is not None and seq_len is None:
        plan = read_plan(find_plan(open_store(folder).folder, call.plan))
        seq_len = plan.facts.options.seq_len
    return config, _moment(replace(call, seq_len=seq_len), state, config)


def token_of_step(folder: Path, call: StepCall, row: int, column: int) -> tuple[str | None, int]:
    """The split, and the position in it, of the token at a column of a row of a batch."""
    _, moment = find_moment(folder, call)
    with closing(moment.stream):
        planned = moment.plan()
    if not 0 <= row < len(planned):
        raise OptionError(f"--row {row}: the batch has {len(planned)} rows")
    plan = planned[row]
    if not 0 <= column < plan.stop - plan.start:
        raise OptionError(f"--column {column}: a row has {plan.stop - plan.start:,} tokens")
    return plan.split, plan.start + column


def source_path(folder: Path | None, call: StepCall, stream: SampleStream) -> Path | None:
    """The folder as the path of a source of the config; None: all sources are meant."""
    if call.config is None or folder is None:
        return None
    found = folder.absolute()
    if not any(found in paths_of(source) for source in stream.sources):
        raise OptionError(
            f"{folder}: none of the config's sources, which are "
            f"{', '.join(str(source.path) for source in stream.sources)}"
        )
    return found


def paths_of(of: RowSource | PlannedSample) -> list[Path]:
    """The paths that name a source or a sample of it."""
    return [of.path] if of.split is None else [of.path, of.path / of.split]


def _config(folder: Path | None, call: StepCall, state: dict[str, Any]) -> DataConfig:
    """The config that was named, or one of the folder alone."""
    split = call.split
    if call.config is not None:
        for flag, value in (("--name", call.name), ("--split", split), ("--plan", call.plan)):
            if value is not None:
                raise OptionError(f"{flag} {value}: {call.config} says that; leave it out")
        return read_config(call.config)
    if folder is None:
        raise OptionError("nothing to show: name a store, a folder of tokens, or --config")
    if meant_split(folder, split) is not None:
        pattern = None
    elif split is not None:
        raise OptionError(f"--split {split}: {folder} is not a store, so it has no splits")
    else:
        pattern = choose_pattern(folder)
    name = call.name or ""  # it is part of the order; "": the folder's
    match state.get("sources"):
        case [[str(only), str()]] if not name:
            name = only
    dataset = DatasetConfig(
        name=name, path=str(folder), split=split, file_pattern=pattern, plan=call.plan
    )
    return DataConfig(datasets=(dataset,))


def _moment(call: StepCall, state: dict[str, Any], config: DataConfig) -> Moment:
    if call.batch_size is None:
        raise OptionError("--batch-size is missing: how many samples one rank had at a step")
    seq_len = state.get("seq_len") if call.seq_len is None else call.seq_len
    if seq_len is None:
        raise OptionError("--seq-len is missing: how many inputs a row had")
    world = whole_number(1 if call.world is None else call.world, "world")
    batch_size = whole_number(call.batch_size, "batch_size")
    if batch_size > MOST_ROWS:
        raise OptionError(f"--batch-size {batch_size:,}: wanted at most {MOST_ROWS:,} to look at")
    # an option, else the config, else the state; `read_position` refuses what contradicts the state
    recorded = state if call.config is None else {}
    stream = open_stream(
        replace(config, shuffle=call.shuffle or recorded.get("shuffle", config.shuffle)),
        seq_len=whole_number(seq_len, "seq_len"),
        global_batch_size=world * batch_size,
        seed=recorded.get("seed") if call.seed is None else call.seed,
    )
    if call.state is not None:
        samples = read_position(state, stream)
    elif call.samples is not None:
        samples = whole_number(call.samples, "samples", least=0)
    else:
        samples = whole_number(call.step or 0, "step", least=0) * world * batch_size
    return Moment(
        stream=stream,
        samples=samples,
        rank=whole_number(call.rank or 0, "rank", least=0),
        world=world,
        batch_size=batch_size,
        documents=config.pack_sequences if call.documents is None else call.documents,
    )
