"""From a file, a mapping or a config to a config.

In: `.toml`, `.yaml`, `.yml` or `.json`, or the same as a mapping, and overrides.
Out: a `StreamConfig`; the other way round `config_dict`.
Promise: the same values give the same config, whatever they were written in; what is refused is
refused with an OptionError that names the file and the key. `read_config(config_dict(c)) == c`.
The file may be the whole config of a training run: what does not concern the data is left out, and
named in one warning.
Not here: opening anything that the config names (open, tokenizers).

Words like `data.seed=7` on top of a config.

In: the values of a config as a mapping, and words.  Out: the values with the words put in.
Promise: the key must exist; a value is what TOML takes it for, except that a key which holds a
string holds just what was written unless that begins with a quote; `null` is nothing, where a key
may be nothing. Later wins.
Not here: whether the value makes sense (models).

What pydantic found, in the words of the one who wrote the config.

In: a ValidationError, the model, and where the values came from.  Out: one OptionError.
Promise: each problem names its key with the whole path, what was found and what was wanted; a key
that nobody knows comes with the nearest one that is known; several problems are told at once.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from shardmill.arguments import choices, nearest
from shardmill.errors import OptionError
from shardmill.loading.streaming.config.models import (
    BACKENDS_OF,
    KINDS_OF,
    NEEDED,
    ModelSection,
    StreamConfig,
    StreamValues,
    TrainSection,
    unused_keys,
)
from shardmill.records import JSON

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


_WANTED = {
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "a string",
    "float_type": "a number",
    "finite_number": "a finite number",
    "dict_type": "a table",
    "model_type": "a table",
    "tuple_type": "a string or a list of strings",
    "string_too_short": "a string that is not empty",
    "string_pattern_mismatch": "a string without NUL",
    "too_short": "at least one string",
    "invalid_key": "keys that are strings",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
}
_KINDS = {bool: "a boolean", int: "an integer", float: "a float", str: "a string"}
_KINDS |= {list: "a list", tuple: "a list", dict: "a table", type(None): "nothing"}
_MOST_SHOWN = 60


def option_error(
    error: ValidationError, model: type[BaseModel], *, file: str, overrides: Mapping[str, str]
) -> OptionError:
    """All problems as one error; `overrides` maps paths to the words that set them."""
    problems: list[str] = []
    for detail in error.errors(include_url=False):
        for path, sentence in _sentences(detail, model):
            where = next((text for key, text in overrides.items() if _covers(key, path)), file)
            problems.append(f"{where}: {sentence}")
    if len(problems) == 1:
        return OptionError(problems[0])
    return OptionError(f"{len(problems)} problems:\n" + "\n".join(f"  {one}" for one in problems))


def unknown_key(key: str, known: Collection[str]) -> str:
    """For a message about a key that nobody knows."""
    return f"unknown key; {choices(key, sorted(known))}"


def found_value(value: object) -> str:
    """A value as a config shows it, and its kind; never long, whatever it holds."""
    kind = _KINDS.get(type(value), type(value).__name__)
    if isinstance(value, Mapping | list | tuple) or value is None:
        return kind  # not its contents: aliases in YAML can make them endless
    if isinstance(value, bool):
        return f"{str(value).lower()} ({kind})"
    if isinstance(value, int) and abs(value) >= 2**128:
        return f"{kind} of {value.bit_length()} bits"
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    return f"{shown if len(shown) <= _MOST_SHOWN else shown[:_MOST_SHOWN] + '...'} ({kind})"


def path_text(parts: Sequence[int | str]) -> str:
    """("data", "files", 1) is data.files[1]."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text


def section_at(model: type[BaseModel], parts: Sequence[int | str]) -> type[BaseModel] | None:
    """The model that a path leads to, or None when it leads to something else."""
    found: type[BaseModel] | None = model
    for part in parts:
        field = found.model_fields.get(str(part)) if found is not None else None
        found = None if field is None else _model_in(field.annotation)
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inside = get_args(annotation) if get_origin(annotation) is UnionType else ()
    return next((one for one in map(_model_in, inside) if one is not None), None)


def _sentences(detail: ErrorDetails, model: type[BaseModel]) -> list[tuple[str, str]]:
    """Pairs of path and sentence; our own checks tell several at once."""
    kind, loc = detail["type"], [part for part in detail["loc"] if part != "[key]"]
    path = path_text(loc)
    if kind == "value_error":
        lines = str(detail["ctx"]["error"]).splitlines()
        return [(line.partition(":")[0], line) for line in lines]
    if kind == "extra_forbidden":
        section = section_at(model, loc[:-1])
        assert section is not None, "only a model forbids keys"
        return [(path, f"{path}: {unknown_key(str(loc[-1]), section.model_fields)}")]
    if kind == "missing":
        return [(path, f"{path}: missing; {_wanted_of_missing(section_at(model, loc))}")]
    return [(path, f"{path}: found {found_value(detail['input'])}, wanted {_wanted(detail)}")]


def _wanted_of_missing(section: type[BaseModel] | None) -> str:
    if section is None:
        return "it has no default"
    needed = [name for name, field in section.model_fields.items() if field.is_required()]
    return f"wanted a table with {' and '.join(needed)}" if needed else "wanted a table"


def _wanted(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        known = re.findall("'([^']*)'", context["expected"])
        near = nearest(detail["input"], known) if isinstance(detail["input"], str) else None
        guess = f'; did you mean "{near}"?' if near else ""
        return f"one of {context['expected']}".replace("'", '"') + guess
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"{words} {context[bound]:,}"
    return _WANTED.get(kind) or detail["msg"]


def _covers(key: str, path: str) -> bool:
    return path == key or path.startswith((f"{key}.", f"{key}["))


_MISSING = object()


def apply_overrides(
    values: Mapping[str, Any], words: Sequence[str], model: type[BaseModel]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The new values, and the words that count, by the path that they set."""
    if isinstance(words, str):
        raise OptionError(f"overrides={words!r}: one string; wanted a list of them")
    result = dict(values)
    said: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise OptionError(f"override {word!r}: found no '='; wanted KEY=VALUE: data.seed=7")
        parts = key.strip().split(".")
        annotation = _annotation_of(model, parts, word)
        result = _put(result, parts, _value_of(text.strip(), annotation, word), word)
        path = path_text(parts)
        said = {k: w for k, w in said.items() if not f"{k}.".startswith(f"{path}.")}
        said[path] = f"override {word!r}"
    return result, said


def _annotation_of(model: type[BaseModel], parts: Sequence[str], word: str) -> Any:
    """The type of the key; refused when there is no such key."""
    for number, part in enumerate(parts):
        section = section_at(model, parts[:number])
        assert section is not None, "a part before this one was no table"
        if part not in section.model_fields:
            path = path_text(parts[: number + 1])
            raise OptionError(
                f"override {word!r}: {path}: {unknown_key(part, section.model_fields)}"
            )
        field = section.model_fields[part]
        rest = parts[number + 1 :]
        if rest and section_at(model, parts[: number + 1]) is None:
            if len(rest) == 1 and dict in _kinds_in(field.annotation):
                return str
            path = path_text(parts[: number + 1])
            raise OptionError(f"override {word!r}: {path} is no table, so it has no {rest[0]!r}")
    return field.annotation


def _value_of(text: str, annotation: Any, word: str) -> Any:
    kinds = _kinds_in(annotation)
    if text == "null" and type(None) in kinds:
        return None
    value = _toml_overrides(text)
    if kinds <= {str, tuple, type(None)}:
        many = tuple in kinds
        if isinstance(value, str) or (many and isinstance(value, list)):
            return value
        if not text.startswith(("[", '"', "'") if many else ('"', "'")):
            return text
        value = _MISSING  # it was meant as TOML
    if value is _MISSING:
        raise OptionError(
            f"override {word!r}: {text!r} is no value of TOML: wanted a number, true, false, "
            '"a string", a [list] or a { key = table }'
        )
    return value


def _toml_overrides(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return _MISSING
    return found["value"] if found.keys() == {"value"} else _MISSING


def _kinds_in(annotation: Any) -> set[Any]:
    """The plain types a key may have; a choice of words is a string."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds_in(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return set().union(*map(_kinds_in, get_args(annotation)))
    if origin is Literal:
        return {type(choice) for choice in get_args(annotation)}
    return {origin or annotation}


def _put(values: Mapping[str, Any], parts: Sequence[str], value: Any, word: str) -> dict[str, Any]:
    """A copy with the value in it; nothing that is given is changed."""
    first, *rest = parts
    if not rest:
        return {**values, first: value}
    inner = values.get(first)
    if inner is None:
        inner = {}
    if not isinstance(inner, Mapping):
        raise OptionError(
            f"override {word!r}: {first!r} is {type(inner).__name__} in the config, wanted a table"
        )
    return {**values, first: _put(inner, rest, value, word)}


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
    from shardmill.loading.streaming.config.yaml import parse_yaml

    return parse_yaml(text, file)
