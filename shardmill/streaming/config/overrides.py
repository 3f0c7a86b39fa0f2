"""Words like `data.seed=7` on top of a config.

In: the values of a config as a mapping, and words.  Out: the values with the words put in.
Promise: the key must exist; a value is what TOML takes it for, except that a key which holds a
string holds just what was written unless that begins with a quote; `null` is nothing, where a key
may be nothing. Later wins.
Not here: whether the value makes sense (models).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from shardmill.errors import OptionError
from shardmill.streaming.config.messages import path_text, section_at, unknown_key

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
    value = _toml(text)
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


def _toml(text: str) -> Any:
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
