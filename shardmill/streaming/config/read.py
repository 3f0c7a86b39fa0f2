"""From a file, a mapping or a config to a config.

In: `.toml`, `.yaml`, `.yml` or `.json`, or the same as a mapping, and overrides.
Out: a `StreamConfig`; the other way round `config_dict`.
Promise: the same values give the same config, whatever they were written in; what is refused is
refused with an OptionError that names the file and the key. `read_config(config_dict(c)) == c`.
The file may be the whole config of a training run: what does not concern the data is left out, and
named in one warning.
Not here: opening anything that the config names (open, tokenizers).
"""

from __future__ import annotations

import difflib
import json
import logging
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shardmill.errors import OptionError
from shardmill.records import JSON
from shardmill.streaming.config.checks import BACKENDS_OF, KINDS_OF, NEEDED, unused_keys
from shardmill.streaming.config.messages import option_error
from shardmill.streaming.config.models import (
    ModelSection,
    StreamConfig,
    StreamValues,
    TrainSection,
)
from shardmill.streaming.config.overrides import apply_overrides

_log = logging.getLogger(__name__)

TRAINER_SECTIONS = {"optim", "checkpoint", "logging", "debug", "variables", "derived"}
"""Sections of chomp that are never taken for a misspelt section of ours."""
TRAINER_DATA_KEYS = {
    *("device_put", "recreate_eval_cache"),
    *("packing_strict_segments", "packing_group_docs"),  # the model's attention; another mode's
}
"""Keys of chomp's `data` that change no batch. Any other unknown key of `data` is refused: it may
be one that decides which batches come."""
TRAINER_TOKENIZER_KEYS = {"hf_use_fast", "hf_trust_remote_code"}
_SHARED_KEYS = {
    *("hf_dataset", "hf_name", "hf_split", "hf_eval_split", "hf_revision", "text_key"),
    *("max_retries", "retry_delay_sec", "local_text"),
}
"""Keys of one backend that a config of chomp writes whatever the backend is."""
_SHARED_TOKENIZER_KEYS = {"hf_name_or_path", "byte_offset"}
_NEAR_SECTION, _NEAR_KEY = 0.8, 0.85  # how alike two names are that are taken for the same


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
    values, unused = _without_trainer(values)
    try:
        StreamValues.model_validate(values)  # also what another backend would look at
        values, others = _without_others(values, said)
        found = StreamConfig.model_validate(values)
    except ValidationError as error:
        raise option_error(error, StreamConfig, file=file, overrides=said) from error
    if unused or others:
        _log.warning(
            "%s: not used, since it does not concern these data or this tokenizer: %s",
            *(file, ", ".join(unused + others)),
        )
    return found


def config_dict(config: StreamConfig) -> dict[str, JSON]:
    """What is effective, defaults included, as JSON: for checkpoints, and for `read_config`.

    Keys that the chosen backend or kind of tokenizer does not look at are left out.
    """
    unused = unused_keys(config)
    found: dict[str, JSON] = json.loads(config.model_dump_json())
    return _without(found, unused, "")


def _without_trainer(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values without what belongs to the trainer, and the keys of that.

    A key that is nearly one of ours stays, and so is refused as misspelt.
    """
    kept, unused = dict(values), []
    for key in values:
        if key in TRAINER_SECTIONS or not _near(key, StreamConfig, _NEAR_SECTION):
            del kept[key]
            unused.append(key)
    for name, model in (("model", ModelSection), ("train", TrainSection)):
        section = kept.get(name)
        if isinstance(section, Mapping):
            foreign = [key for key in section if not _near(key, model, _NEAR_KEY)]
            kept[name] = _dropped(section, foreign, name, unused)
    if isinstance(kept.get("data"), Mapping):
        kept["data"] = data = _dropped(kept["data"], TRAINER_DATA_KEYS, "data", unused)
        if isinstance(data.get("tokenizer"), Mapping):
            foreign = sorted(TRAINER_TOKENIZER_KEYS)
            data["tokenizer"] = _dropped(data["tokenizer"], foreign, "data.tokenizer", unused)
    return kept, unused


def _without_others(
    values: Mapping[str, Any], overrides: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """The values without those that only another backend or kind of tokenizer looks at.

    One that an override sets stays, and is refused: it was meant for this run. All stay when what
    the backend needs is missing, so that the message names both.
    """
    unused: list[str] = []
    data = dict(values["data"])
    backend = data.get("backend", "hf")
    others = {key for key in _SHARED_KEYS if backend not in BACKENDS_OF[key]}
    if data.get(NEEDED[backend]) is not None:
        foreign = {key for key in others if f"data.{key}" not in overrides}
        data = _dropped(data, foreign, "data", unused)
    tokenizer = data.get("tokenizer", {})
    kind = tokenizer.get("kind", "hf")
    others = {key for key in _SHARED_TOKENIZER_KEYS if kind not in KINDS_OF[key]}
    foreign = {key for key in others if f"data.tokenizer.{key}" not in overrides}
    data["tokenizer"] = _dropped(tokenizer, foreign, "data.tokenizer", unused)
    return {**values, "data": data}, unused


def _dropped(
    section: Mapping[str, Any], foreign: Collection[str], at: str, unused: list[str]
) -> dict[str, Any]:
    unused += [f"{at}.{key}" for key in section if key in foreign and section[key] is not None]
    return {key: value for key, value in section.items() if key not in foreign}


def _near(key: object, model: type[BaseModel], cutoff: float) -> bool:
    """Whether it is a key of the section, or nearly one; what is no string is for the model."""
    if not isinstance(key, str):
        return True
    word = key.strip().lower().replace("-", "_")
    return bool(difflib.get_close_matches(word, model.model_fields, n=1, cutoff=cutoff))


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
