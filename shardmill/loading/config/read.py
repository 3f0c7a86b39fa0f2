"""The `[data]` table of a training config, read.

In: a TOML file, `--data.key=value` flags, or the same as a mapping.  Out: a `DataConfig`.
Promise: what is returned makes sense as a whole: known keys only, strict types, weights that can be
mixed, names that exist, phases in order. A refusal names the file and the key. Written with
`config_toml` and read again it is the same config.
Not here: other tables of the file; models, optimizers; `lr_scale` is only handed on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from shardmill.arguments import nearest
from shardmill.errors import OptionError
from shardmill.loading.config.checks import check_mixture
from shardmill.loading.config.records import DataConfig, DatasetConfig, PhaseConfig
from shardmill.loading.config.table import Table, open_table
from shardmill.loading.config.toml import flag_values
from shardmill.loading.sources import EVERY_FILE
from shardmill.loading.stream import SHUFFLES, Shuffle
from shardmill.mapped.space import READERS, ReaderName

_DTYPES = ("uint16", "uint32")
_MOST_SEED = 2**64


def read_config(path: str | Path | None = None, flags: Sequence[str] = ()) -> DataConfig:
    """The `[data]` table of a TOML file, with `--data.key=value` flags on top; flags alone do, too.

    Other tables of the file are not looked at.
    """
    values = flag_values(flags)
    if path is None:
        return parse_config(values, file="--data flags")
    table = _data_table(path)
    if not values or not isinstance(table, Mapping):
        return parse_config(table, file=str(path))
    return parse_config({**table, **values}, file=f"{path} and --data flags")


def _data_table(path: str | Path) -> object:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: cannot be read as a config: {error}") from error
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: not TOML: {error}") from error
    if "data" not in found:
        there = ", ".join(sorted(found)) or "nothing"
        near = [name for name in found if nearest(name, ["data"])]
        guess = f"; is [{near[0]}] meant for it?" if near else ""
        raise OptionError(f"{path}: no [data] table; found {there}{guess}")
    return found["data"]


def parse_config(data: object, *, file: str = "config") -> DataConfig:
    """The config in a `data` mapping, checked; `file` names it in messages."""
    table = open_table(data, "data", _keys(DataConfig) - {"file"}, file)
    config = DataConfig(
        dataset_path=table.text("dataset_path"),
        file_pattern=table.text("file_pattern") or EVERY_FILE,
        dtype=table.text("dtype", among=_DTYPES),
        split=table.text("split"),
        plan=table.text("plan"),
        pack_sequences=table.flag("pack_sequences", False),
        tokenizer_path=table.text("tokenizer_path"),
        datasets=tuple(map(_dataset, table.tables("datasets", _keys(DatasetConfig)))),
        mix_temperature=table.number("mix_temperature", 1.0, above=True),
        phases=tuple(map(_phase, table.tables("phases", _keys(PhaseConfig)))),
        anneal_start_step=table.whole("anneal_start_step", 0),
        anneal_weights=table.weights("anneal_weights"),
        seed=table.whole("seed", 0),
        shuffle=cast(Shuffle, table.text("shuffle", "global", among=SHUFFLES)),
        reader=cast(ReaderName, table.text("reader", "auto", among=READERS)),
        num_workers=table.whole("num_workers", 0),
        pin_memory=table.flag("pin_memory", False),
        prefetch_factor=table.whole("prefetch_factor", 2, least=1),
        file=file,
    )
    if config.seed >= _MOST_SEED:
        raise table.refuse("seed", config.seed, "less than 2**64")
    check_mixture(config)
    return config


def _dataset(table: Table) -> DatasetConfig:
    name, path = table.text("name"), table.text("path")
    for key, value in (("name", name), ("path", path)):
        if value is None:
            raise OptionError(f"{table.at(key)}: missing; wanted a string that is not empty")
    return DatasetConfig(
        name=cast(str, name),
        path=cast(str, path),
        weight=table.number("weight", 1.0),
        file_pattern=table.text("file_pattern"),
        dtype=table.text("dtype", among=_DTYPES),
        split=table.text("split"),
        plan=table.text("plan"),
    )


def _phase(table: Table) -> PhaseConfig:
    return PhaseConfig(
        start_step=table.whole("start_step", None),
        dataset_weights=table.weights("dataset_weights"),
        lr_scale=table.number("lr_scale", 1.0, above=True),
    )


def _keys(record: type) -> set[str]:
    return set(record.__dataclass_fields__)  # type: ignore[attr-defined]
