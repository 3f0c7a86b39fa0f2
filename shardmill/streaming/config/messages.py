"""What pydantic found, in the words of the one who wrote the config.

In: a ValidationError, the model, and where the values came from.  Out: one OptionError.
Promise: each problem names its key with the whole path, what was found and what was wanted; a key
that nobody knows comes with the nearest one that is known; several problems are told at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel

from shardmill.arguments import choices, nearest
from shardmill.errors import OptionError

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
