"""The sources and the order that a config means, opened.

In: a `DataConfig`, sequence length, samples of a step.  Out: a `SampleStream`.
Promise: steps become samples in one place, here; what was opened is closed when something fails.
Not here: reading and checking the config (read, checks).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.loading.config.records import DataConfig, DatasetConfig
from shardmill.loading.sources import EVERY_FILE, TokenSource
from shardmill.loading.stream import SampleStream
from shardmill.mapped.splits import find_split
from shardmill.shards import Store


def open_stream(
    config: DataConfig, *, seq_len: int, global_batch_size: int, seed: int | None = None
) -> SampleStream:
    """The order of the config's sources, opened. `seed` takes the place of the config's.

    `global_batch_size`: samples of one step over all ranks, by which a phase's step becomes the
    sample at which it begins. Run on with another one, and phases begin at other samples: another
    order, whose state is refused.
    """
    batch = whole_number(global_batch_size, "global_batch_size")
    changes = config.weight_phases()
    with ExitStack() as undo:
        sources = []
        for entry in config.sources:
            sources.append(_open_source(config, entry, seq_len))
            undo.callback(sources[-1].close)
        stream = SampleStream(
            sources,
            weights=changes[0][1] if changes else None,
            seed=config.seed if seed is None else seed,
            shuffle=config.shuffle,
            temperature=config.mix_temperature,
            phases=[(step * batch, weights) for step, weights in changes[1:]],
        )
        undo.pop_all()
    return stream


def meant_split(path: str | Path, split: str | None) -> tuple[Store, str] | None:
    """The split of a store that is asked for, else named by the path, else "train", else the only
    one; None when there is no store."""
    if split is not None:
        return find_split(path, split)
    try:
        return find_split(path, "train")
    except OptionError:
        return find_split(path)


def _open_source(config: DataConfig, entry: DatasetConfig, seq_len: int) -> TokenSource:
    """What the table says of patterns and dtypes is for folders; a store knows its own."""
    name = entry.name or None
    found = meant_split(entry.path, entry.split or config.split)
    if found is not None:
        pattern = entry.file_pattern or EVERY_FILE
        return TokenSource(
            entry.path,
            seq_len=seq_len,
            split=found[1],
            name=name,
            file_pattern=pattern,
            dtype=entry.dtype,
        )
    own = entry.split or (config.split if config.dataset_path else None)
    if own is not None:
        raise OptionError(
            f"{config.file}: split = {own!r}, but {entry.path} is no store, so it has no splits"
        )
    return TokenSource(
        entry.path,
        seq_len=seq_len,
        name=name,
        file_pattern=entry.file_pattern or config.file_pattern,
        dtype=entry.dtype or config.dtype,
    )
