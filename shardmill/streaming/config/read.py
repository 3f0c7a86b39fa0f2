"""From a file, a mapping or a config to a config.

In: `.toml`, `.yaml`, `.yml` or `.json`, or the same as a mapping, and overrides.
Out: a `StreamConfig`; the other way round `config_dict`.
Promise: the same values give the same config, whatever they were written in; what is refused is
refused with an OptionError that names the file and the key. `read_config(config_dict(c)) == c`.
Not here: opening anything that the config names (open, tokenizers).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shardmill.errors import OptionError
from shardmill.records import JSON
from shardmill.streaming.config.checks import unused_keys
from shardmill.streaming.config.messages import option_error
from shardmill.streaming.config.models import StreamConfig
from shardmill.streaming.config.overrides import apply_overrides


def read_config(
    config: StreamConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()
) -> StreamConfig:
    """The config with the overrides on top of it: `["data.seed=7"]`."""
    if isinstance(config, StreamConfig):
        if not overrides:
            return config
        file, values = "config", config.model_dump(exclude_unset=True)
    elif isinstance(config, Mapping):
        file, values = "config", _plain(config)
    elif isinstance(config, str | Path):
        file, values = str(config), _read_file(Path(config))
    else:
        raise OptionError(
            f"config is a {type(config).__name__}; wanted a StreamConfig, a mapping or the path of "
            "a .toml, .yaml or .json file"
        )
    values, said = apply_overrides(values, overrides, StreamConfig)
    try:
        return StreamConfig.model_validate(values)
    except ValidationError as error:
        raise option_error(error, StreamConfig, file=file, overrides=said) from error


def config_dict(config: StreamConfig) -> dict[str, JSON]:
    """What is effective, defaults included, as JSON: for checkpoints, and for `read_config`.

    Keys that the chosen backend or kind of tokenizer does not look at are left out.
    """
    unused = unused_keys(config)
    found: dict[str, JSON] = json.loads(config.model_dump_json())
    return _without(found, unused, "")


def _without(values: Mapping[str, JSON], unused: set[str], at: str) -> dict[str, JSON]:
    return {
        key: _without(value, unused, f"{at}{key}.") if isinstance(value, dict) else value
        for key, value in values.items()
        if f"{at}{key}" not in unused
    }


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Any mapping as dicts, and sections as what was said in them."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, BaseModel):
            inner = inner.model_dump(exclude_unset=True)
        found[key] = _plain(inner) if isinstance(inner, Mapping) else inner
    return found


def _read_file(path: Path) -> dict[str, Any]:
    parsers = {".toml": _toml, ".json": _json, ".yaml": _yaml, ".yml": _yaml}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise OptionError(f"{path}: wanted a config that ends in {', '.join(parsers)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: cannot be read as a config: {error}") from error
    found = parse(text, str(path))
    if not isinstance(found, dict):
        kind = "nothing" if found is None else type(found).__name__
        raise OptionError(f"{path}: found {kind}, wanted the tables data and train")
    return _plain(found)


def _toml(text: str, file: str) -> object:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{file}: not TOML: {error}") from error


def _json(text: str, file: str) -> object:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            twice = max(keys, key=keys.count)
            raise OptionError(f"{file}: the key {twice!r} is said twice; say it once")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except OptionError:
        raise
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{file}: not JSON: {error}") from error


def _yaml(text: str, file: str) -> object:
    from shardmill.streaming.config.yaml import parse_yaml

    return parse_yaml(text, file)
