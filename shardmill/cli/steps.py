"""The batch of a training step, from the options that describe the training.

Options that were not given are taken from the config or the saved state; what neither says is an
error, unless it has one default everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from shardmill.arguments import whole_number
from shardmill.cli.options import Split, read_state
from shardmill.errors import OptionError
from shardmill.inspect.rows import Moment
from shardmill.loading import SampleStream
from shardmill.loading.config import (
    DataConfig,
    DatasetConfig,
    meant_split,
    open_stream,
    read_config,
)
from shardmill.loading.fim import fim_options
from shardmill.loading.order import Shuffle
from shardmill.loading.state import read_loader_state as read_position
from shardmill.store import find_plan, open_store, read_plan
from shardmill.store.readers.foreign import FORMATS

MOST_ROWS = 2**20
"""Of one rank at a step."""
Rank = Annotated[int | None, "Of this rank. Default: 0."]
SourceName = Annotated[str | None, "The source's name, if it is not that of its folder."]


@dataclass(frozen=True, kw_only=True)
class TrainingOrder:
    """What names a batch of a training; None: not given.

    The described fields are options of every command that looks at steps. A command describes those
    of the others that it has.
    """

    split: Split = None
    seq_len: Annotated[int | None, "Inputs of a row."] = None
    batch_size: Annotated[int | None, "Samples of one rank at a step."] = None
    world: Annotated[int | None, "Number of ranks. Default: 1."] = None
    seed: Annotated[int | None, "Of the order. Default: 0."] = None
    shuffle: Annotated[Shuffle | None, "As the training had it. Default: global."] = None
    step: int | None = None
    samples: int | None = None
    state: Path | None = None
    rank: int | None = None
    config: Path | None = None
    name: str | None = None
    documents: bool | None = None
    plan: str | None = None
    fim: float | None = None

    def given(self) -> list[str]:
        """The flags that were given, but for those that also concern examples."""
        names = [one.name for one in fields(TrainingOrder) if getattr(self, one.name) is not None]
        return [f"--{one.replace('_', '-')}" for one in names if one not in ("split", "seq_len")]


def find_moment(folder: Path | None, call: TrainingOrder) -> tuple[DataConfig, Moment]:
    """The config of the data, and the batch that the options name. The caller closes its stream."""
    state = {} if call.state is None else read_state(call.state)
    config = _config(folder, call, state)
    seq_len = state.get("seq_len") if call.seq_len is None else call.seq_len
    if call.seq_len is None and call.plan is not None and folder is not None:
        plan = read_plan(find_plan(open_store(folder).folder, call.plan))
        seq_len = plan.facts.options.seq_len
    if call.batch_size is None:
        raise OptionError("--batch-size is missing: how many samples one rank had at a step")
    if seq_len is None:
        raise OptionError("--seq-len is missing: how many inputs a row had")
    world = whole_number(1 if call.world is None else call.world, "world")
    batch_size = whole_number(call.batch_size, "batch_size")
    if batch_size > MOST_ROWS:
        raise OptionError(f"--batch-size {batch_size:,}: wanted at most {MOST_ROWS:,} to look at")
    # an option, else the config, else the state; `read_position` refuses what contradicts the state
    recorded = state if call.config is None else {}
    shuffle = call.shuffle or recorded.get("shuffle", config.shuffle)
    stream = open_stream(
        replace(config, shuffle=shuffle, **_fim(call, recorded)),
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
    return config, Moment(
        stream=stream,
        samples=samples,
        rank=whole_number(call.rank or 0, "rank", least=0),
        world=world,
        batch_size=batch_size,
        documents=config.pack_sequences if call.documents is None else call.documents,
    )


def _fim(call: TrainingOrder, recorded: dict[str, Any]) -> dict[str, Any]:
    """The keys of the config that say how documents are filled in; none: as the config says."""
    if call.fim is not None:
        if call.config is not None:
            raise OptionError(f"--fim {call.fim}: {call.config} says that; leave it out")
        fim_options(call.fim)  # checks it
        return {"fim_rate": call.fim}
    match recorded.get("fim"):
        case {"rate": rate, "spm_rate": spm_rate, "seed": seed, "tokens": dict(tokens)}:
            ids = {name: number for name, number in tokens.items() if number is not None}
            return {
                "fim_rate": rate,
                "fim_spm_rate": spm_rate,
                "fim_seed": seed,
                "fim_tokens": ids,
            }
    return {}


def meant_sources(folder: Path | None, call: TrainingOrder, stream: SampleStream) -> list[str]:
    """Names of the sources that the folder means: those of the config at its path, else all."""
    if call.config is None or folder is None:
        return [source.name for source in stream.sources]
    path = folder.absolute()
    found = [one.name for one in stream.sources if path in (one.path, one.path / (one.split or ""))]
    if not found:
        raise OptionError(
            f"{folder}: none of the config's sources, which are "
            f"{', '.join(str(source.path) for source in stream.sources)}"
        )
    return found


def _config(folder: Path | None, call: TrainingOrder, state: dict[str, Any]) -> DataConfig:
    """The config that was named, or one of the folder alone."""
    split = call.split
    if call.config is not None:
        for flag, value in (("--name", call.name), ("--split", split), ("--plan", call.plan)):
            if value is not None:
                raise OptionError(f"{flag} {value}: {call.config} says that; leave it out")
        return read_config(call.config)
    if folder is None:
        raise OptionError("nothing to show: name a store, a folder of tokens, or --config")
    is_store = meant_split(folder, split) is not None
    pattern = None if is_store else choose_pattern(folder, split)
    name = call.name or ""  # it is part of the order; "": the folder's
    match state.get("sources"):
        case [[str(only), str()]] if not name:
            name = only
    dataset = DatasetConfig(
        name=name, path=str(folder), split=split, file_pattern=pattern, plan=call.plan
    )
    return DataConfig(datasets=(dataset,))


def choose_pattern(folder: Path, split: str | None = None, given: str | None = None) -> str:
    """Of a folder that is no store: the pattern that was given, else that of the only kind of token
    files that is there; "*.npy" when there are none."""
    if split is not None:
        raise OptionError(f"--split {split}: {folder} is not a store, so it has no splits")
    if given is not None:
        return given
    there = {path.suffix for path in folder.iterdir()} if folder.is_dir() else set()
    kinds = [suffix for suffix in FORMATS if suffix in there]
    if len(kinds) > 1:
        raise OptionError(
            f"{folder}: there are {' and '.join(kinds)} files, perhaps the same tokens twice; "
            f"choose with --file-pattern '*{kinds[0]}' or '*{kinds[1]}'"
        )
    return f"*{kinds[0]}" if kinds else "*.npy"
