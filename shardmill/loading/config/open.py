"""The sources and the order that a config means, opened.

In: a `DataConfig`, sequence length, samples of a step.  Out: a `SampleStream`.
Promise: steps become samples in one place, here; what was opened is closed when something fails. A
tokenizer is opened only for `pack_sequences` on folders that are no store.
Not here: reading and checking the config (read, checks).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.loading.config.records import DataConfig, DatasetConfig, plain_folders
from shardmill.loading.order import SampleStream
from shardmill.loading.packed_rows import PackSource
from shardmill.loading.rows import EVERY_FILE, TokenSource
from shardmill.store import Store
from shardmill.store.readers.token_space import find_split
from shardmill.tokenizers import open_tokenizer
from shardmill.tokenizers.special_tokens import usual_id


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
    ends = eos_token_id(config) if config.pack_sequences and plain_folders(config) else None
    with ExitStack() as undo:
        sources: list[TokenSource | PackSource] = []
        for entry in config.sources:
            sources.append(_open_source(config, entry, seq_len, ends))
            undo.callback(sources[-1].close)
        stream = SampleStream(
            sources,
            weights=changes[0][1] if changes else None,
            seed=config.seed if seed is None else seed,
            shuffle=config.shuffle,
            temperature=config.mix_temperature,
            phases=[(step * batch, weights) for step, weights in changes[1:]],
            documents=config.pack_sequences,
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


def eos_token_id(config: DataConfig) -> int:
    """The id that ends a document, as the tokenizer at `tokenizer_path` says."""
    at = f"{config.file}: data.tokenizer_path"
    if config.tokenizer_path is None:
        raise OptionError(f"{at}: missing; wanted the tokenizer that made the tokens")
    named = open_tokenizer(config.tokenizer_path).special_token_ids()
    found = usual_id("eos", named)
    if found is None:
        raise OptionError(
            f"{at} = {config.tokenizer_path!r}: this tokenizer has no end-of-document token (its "
            f"special tokens: {', '.join(sorted(named)) or 'none'}), so nothing says where "
            f"documents end; name another one, or set data.pack_sequences = false"
        )
    return found


def _open_plan(config: DataConfig, entry: DatasetConfig, plan: str, seq_len: int) -> PackSource:
    found = meant_split(entry.path, None)
    if found is None:
        raise OptionError(
            f"{config.file}: plan = {plan!r}, but {entry.path} is no store, so it has no plans"
        )
    source = PackSource(found[0].folder, plan, name=entry.name or None, reader=config.reader)
    said = entry.split or config.split
    problem = None
    if said not in (None, source.split):
        problem = f"is of split {source.split!r}, but split = {said!r}"
    elif source.seq_len != seq_len:
        problem = f"has seq_len {source.seq_len:,}, but the run has {seq_len:,}"
    if problem is not None:
        source.close()
        raise OptionError(f"{config.file}: plan {plan!r} of {entry.path} {problem}")
    return source


def _open_source(
    config: DataConfig, entry: DatasetConfig, seq_len: int, ends: int | None
) -> TokenSource | PackSource:
    """What the table says of patterns and dtypes is for folders; a store knows its own."""
    if entry.plan is not None:
        return _open_plan(config, entry, entry.plan, seq_len)
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
            reader=config.reader,
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
        eos_token_id=ends,
        reader=config.reader,
    )
