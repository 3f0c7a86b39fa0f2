"""Read a config from TOML, YAML, JSON or a mapping into frozen dataclasses.

A config class is a dataclass whose annotations say what a key may hold. `read_values` gives plain
values, `apply_overrides` puts `data.seed=7` on top of them, and `make_record` checks them against
the class. Types are strict ("8", true and 8.0 are not whole numbers), an unknown key is refused
with the nearest known one, and one OptionError lists every problem with its key.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardmill.arguments import choices, nearest
from shardmill.errors import OptionError, missing_extra
from shardmill.urls import scrub

Record = TypeVar("Record")
MAX_YAML_VALUES = 1_000_000


@dataclass(frozen=True, slots=True)
class Between:
    """A number of at least `least` and, if given, less than `below`, at most `most` or more than
    `above`."""

    least: float = 0
    below: int | None = None
    above: float | None = None
    most: float | None = None


Text = Annotated[str, "not empty"]
"""A string that is not empty and has no NUL; a path object counts as its string."""


class Section:
    """Base of config classes. Its repr shows no secret, since inputs may be signed URLs."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown = (f"{one.name}={getattr(self, one.name)!r}" for one in config_fields(type(self)))
        return scrub(f"{type(self).__name__}({', '.join(shown)})")


def config_fields(cls: type) -> list[Any]:
    """The fields of a config class that are keys. A field with compare=False is not."""
    return [one for one in fields(cls) if one.compare]


def written_values(record: Any) -> dict[str, Any]:
    """The keys of a config that differ from their defaults, as plain values."""
    found: dict[str, Any] = {}
    for one in config_fields(type(record)):
        value = getattr(record, one.name)
        default = one.default_factory() if callable(one.default_factory) else one.default
        if value != default:
            found[one.name] = written_values(value) if is_dataclass(value) else value
    return found


# values


def read_values(config: object, cls: type) -> tuple[str, dict[str, Any]]:
    """The name of a config in messages, and its values: those of a `cls`, of a mapping, or of a
    `.toml`, `.yaml`, `.yml` or `.json` file, which holds one table."""
    if isinstance(config, cls):
        return "config", written_values(config)
    if isinstance(config, Mapping):
        return "config", dict(config)
    if not isinstance(config, str | os.PathLike):
        raise OptionError(
            f"config is a {type(config).__name__}; wanted a {cls.__name__}, a mapping or the path "
            "of a .toml, .yaml or .json file"
        )
    path = Path(config)
    formats: dict[str, tuple[str, Callable[[str, str], object]]] = {
        ".toml": ("TOML", lambda text, _: tomllib.loads(text)),
        ".json": ("JSON", _parse_json),
        ".yaml": ("YAML", _parse_yaml),
        ".yml": ("YAML", _parse_yaml),
    }
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: cannot be read as a config: {error}") from error
    if path.suffix.lower() not in formats:
        raise OptionError(f"{path}: wanted a config that ends in {', '.join(formats)}")
    name, parse = formats[path.suffix.lower()]
    try:
        found = parse(text, str(path))
    except OptionError:
        raise
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: not {name}: {error}") from error
    if not isinstance(found, dict):
        kind = "nothing" if found is None else type(found).__name__
        raise OptionError(f"{path}: found {kind}, wanted tables")
    return str(config), found


def _parse_json(text: str, file: str) -> object:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            raise OptionError(f"{file}: the key {max(keys, key=keys.count)!r} is written twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=refuse_duplicates)


def _parse_yaml(text: str, file: str) -> object:
    try:
        import yaml
    except ImportError as missing:
        raise missing_extra("yaml", "yaml") from missing

    def at(node: Any) -> str:
        return f"{file}, line {node.start_mark.line + 1}"

    def count_values(node: Any, known: dict[int, int | None]) -> int:
        """How many values there are once every alias is expanded. Refuses duplicate keys."""
        if id(node) in known:
            found = known[id(node)]
            if found is None:
                raise OptionError(f"{at(node)}: an alias that refers to itself")
            return found
        known[id(node)] = None
        children: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            seen: set[tuple[str, str]] = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise OptionError(f"{at(key)}: a key that is not a string")
                if (key.tag, key.value) in seen:
                    raise OptionError(f"{at(key)}: the key {key.value!r} is written twice")
                seen.add((key.tag, key.value))
                children += (key, value)
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        total = 1 + sum(count_values(child, known) for child in children)
        if total > MAX_YAML_VALUES:
            raise OptionError(
                f"{at(node)}: more than {MAX_YAML_VALUES:,} values with aliases expanded; put "
                "documents into files instead of the config"
            )
        known[id(node)] = total
        return total

    try:
        loader = yaml.SafeLoader(text)  # makes plain values only, never objects
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            count_values(node, {})  # before anything is expanded
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


# overrides


def apply_overrides(
    values: Mapping[str, Any], words: Sequence[str], cls: type
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with `data.seed=7` (or `--data.seed=7`) applied; later words win.

    A value is written as in TOML. A key that holds a string takes the text as it is, unless it
    begins with a quote; `null` unsets a key that may be unset. Also returns the word that set each
    path, for messages.
    """
    if isinstance(words, str):
        raise OptionError("{overrides}: one string; wanted a list of them", overrides=words)
    result = dict(values)
    sources: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise OptionError(f"override {word!r}: found no '='; wanted KEY=VALUE: data.seed=7")
        parts = key.strip().removeprefix("--").split(".")
        value = _override_value(text.strip(), _annotation_at(cls, parts, word), word)
        result = _with_value(result, parts, value, word)
        path = ".".join(parts)
        sources = {k: w for k, w in sources.items() if not f"{k}.".startswith(f"{path}.")}
        sources[path] = f"override {word!r}"
    return result, sources


def _annotation_at(cls: type, parts: Sequence[str], word: str) -> Any:
    """The annotation of a key, which must exist."""
    found: Any = cls
    for number, part in enumerate(parts):
        path = ".".join(parts[: number + 1])
        section = _section_in(found)
        if section is None:
            if Mapping in _kinds_in(found) and number == len(parts) - 1:
                return str
            table = ".".join(parts[:number])
            raise OptionError(f"override {word!r}: {table} is not a table, so it has no {part!r}")
        hints = _hints(section)
        if part not in hints:
            raise OptionError(f"override {word!r}: {path}: {_unknown_key(part, hints)}")
        found = hints[part]
    return found


def _override_value(text: str, annotation: Any, word: str) -> Any:
    kinds = _kinds_in(annotation)
    if text == "null" and NoneType in kinds:
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
        value, is_toml = parsed["value"], parsed.keys() == {"value"}
    except (ValueError, RecursionError):
        value, is_toml = None, False
    if kinds <= {str, tuple, NoneType}:
        takes_list = tuple in kinds
        if is_toml and (isinstance(value, str) or (takes_list and isinstance(value, list))):
            return value
        if not text.startswith(("[", '"', "'") if takes_list else ('"', "'")):
            return text
        is_toml = False
    if not is_toml:
        raise OptionError(
            f"override {word!r}: {text!r} is not a TOML value: wanted a number, true, false, "
            '"a string", a [list] or a { key = table }'
        )
    return value


def _with_value(
    values: Mapping[str, Any], parts: Sequence[str], value: Any, word: str
) -> dict[str, Any]:
    """A copy of `values` with one key set."""
    first, *rest = parts
    if not rest:
        return {**values, first: value}
    inner = values.get(first)
    if inner is not None and not isinstance(inner, Mapping):
        raise OptionError(
            f"override {word!r}: {first!r} is {type(inner).__name__} in the config, wanted a table"
        )
    return {**values, first: _with_value(inner or {}, rest, value, word)}


# checks


def make_record(
    cls: type[Record], values: object, *, file: str, sources: Mapping[str, str] | None = None
) -> Record:
    """`values` as an instance of `cls`, or one OptionError with every problem.

    `file` and `sources` (from `apply_overrides`) say where a wrong value was written.
    """
    problems: list[tuple[str, str]] = []
    record = _convert(cls, values, "", problems)
    refuse((f"{key}: {problem}" for key, problem in problems), file, sources)
    return record  # type: ignore[no-any-return]


def refuse(problems: Iterable[str], file: str, sources: Mapping[str, str] | None = None) -> None:
    """Raise the problems, each of which begins with its key, as one OptionError; none: return."""
    lines = []
    for problem in problems:
        path = problem.partition(":")[0]
        where = file
        for key, word in (sources or {}).items():
            if path == key or path.startswith((f"{key}.", f"{key}[")):
                where = word
        lines.append(f"{where}: {problem}")
    if len(lines) == 1:
        raise OptionError(lines[0])
    if lines:
        raise OptionError(f"{len(lines)} problems:\n" + "\n".join(f"  {line}" for line in lines))


def _convert(kind: Any, value: Any, path: str, problems: list[tuple[str, str]]) -> Any:
    """`value` as `kind`. What does not fit is added to `problems`."""
    base, rules = _without_rules(kind)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    options = get_args(base) if get_origin(base) in (Union, UnionType) else ()
    if options:
        if value is None:
            return None
        inner = next(one for one in options if one is not NoneType)
        return _convert(Annotated[inner, *rules] if rules else inner, value, path, problems)
    origin = get_origin(base) or base
    if is_dataclass(base):
        return _convert_table(base, value, path, problems)
    if origin is tuple:
        item = get_args(base)[0]
        if isinstance(value, str) and _section_in(item) is None:
            return (_convert(item, value, path, problems),)
        if not isinstance(value, list | tuple):
            kinds = (
                "a string or a list of strings" if _section_in(item) is None else "a list of tables"
            )
            return _add(problems, path, value, kinds)
        if "not empty" in rules and not value:
            return _add(problems, path, value, "at least one string")
        return tuple(
            _convert(item, one, f"{path}[{number}]", problems) for number, one in enumerate(value)
        )
    if origin is Mapping and isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            return _add(problems, f"{path}[{wrong[0]}]", wrong[0], "a string")
        item = get_args(base)[1]
        return {key: _convert(item, one, f"{path}.{key}", problems) for key, one in value.items()}
    wanted = _wanted(base, origin, value, rules)
    if wanted is not None:
        return _add(problems, path, value, wanted)
    for rule in rules:
        if callable(rule):
            value = rule(value)
    return value


def _convert_table(cls: Any, value: Any, path: str, problems: list[tuple[str, str]]) -> Any:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        return _add(problems, path, value, "a table")
    prefix, hints, found = f"{path}." if path else "", _hints(cls), {}
    for one in config_fields(cls):
        if one.name in value:
            found[one.name] = _convert(
                hints[one.name], value[one.name], prefix + one.name, problems
            )
        elif one.default is MISSING and one.default_factory is MISSING:
            section = _section_in(hints[one.name])
            needed = [] if section is None else _required(section)
            wanted = (
                f"wanted a table with {' and '.join(needed)}" if needed else "it has no default"
            )
            problems.append((f"{prefix}{one.name}", f"missing; {wanted}"))
    for key in value:
        if key not in hints:
            problem = (
                _unknown_key(key, hints) if isinstance(key, str) else "wanted keys that are strings"
            )
            problems.append((f"{prefix}{key}", problem))
    return None if problems else cls(**found)


def _wanted(base: Any, origin: Any, value: Any, rules: Sequence[Any]) -> str | None:
    """What was wanted instead of this scalar; None: it is fine."""
    if origin is Literal:
        known = get_args(base)
        if value in known and type(value) is type(known[0]):
            return None
        near = nearest(value, known) if isinstance(value, str) else None
        listed = ", ".join(f'"{one}"' for one in known[:-1]) + f' or "{known[-1]}"'
        return f"one of {listed}" + (f'; did you mean "{near}"?' if near else "")
    if origin is bool:
        return None if isinstance(value, bool) else "true or false"
    if origin is str:
        if not isinstance(value, str):
            return "a string"
        if "not empty" in rules and not value:
            return "a string that is not empty"
        return "a string without NUL" if "not empty" in rules and "\x00" in value else None
    if origin is int:
        if type(value) is not int:
            return "a whole number"
    elif origin is float:
        if type(value) not in (int, float):
            return "a number"
        try:
            finite = math.isfinite(value)
        except OverflowError:  # an integer that no float can hold
            finite = False
        if not finite:
            return "a finite number"
    else:
        return "a table"
    for rule in rules:
        if isinstance(rule, Between):
            if rule.above is not None and value <= rule.above:
                return f"more than {rule.above:,}"
            if value < rule.least:
                return f"at least {rule.least:,}"
            if rule.below is not None and value >= rule.below:
                return f"less than {rule.below:,}"
            if rule.most is not None and value > rule.most:
                return f"at most {rule.most:,}"
    return None


def _add(problems: list[tuple[str, str]], path: str, value: object, wanted: str) -> Any:
    problems.append((path, f"found {_shown(value)}, wanted {wanted}"))


def _shown(value: object) -> str:
    """A value as a config shows it, with its kind, in a few words."""
    kinds = {bool: "a boolean", int: "an integer", float: "a float", str: "a string"}
    kinds |= {list: "a list", tuple: "a list", dict: "a table", NoneType: "nothing"}
    kind = kinds.get(type(value), type(value).__name__)
    if isinstance(value, Mapping | list | tuple) or value is None:
        return kind
    if isinstance(value, bool):
        return f"{str(value).lower()} ({kind})"
    if isinstance(value, int) and abs(value) >= 2**128:
        return f"{kind} of {value.bit_length()} bits"
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    return f"{shown if len(shown) <= 60 else shown[:60] + '...'} ({kind})"


def _unknown_key(key: str, known: Iterable[str]) -> str:
    return f"unknown key; {choices(key, sorted(known))}"


# annotations


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The keys of a config class and their annotations."""
    hints = get_type_hints(cls, include_extras=True)
    return {one.name: hints[one.name] for one in config_fields(cls)}


def _required(cls: type) -> list[str]:
    return [
        one.name
        for one in config_fields(cls)
        if one.default is MISSING and one.default_factory is MISSING
    ]


def _without_rules(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without Annotated, and what Annotated adds to it."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[0], get_args(kind)[1:]
    return kind, ()


def _kinds_in(kind: Any) -> set[Any]:
    """The plain types that a key may hold; a choice of words is a string."""
    base, _ = _without_rules(kind)
    if get_origin(base) in (Union, UnionType):
        return set().union(*map(_kinds_in, get_args(base)))
    if get_origin(base) is Literal:
        return {type(choice) for choice in get_args(base)}
    return {get_origin(base) or base}


def _section_in(kind: Any) -> Any:
    """The config class that an annotation names, or None."""
    return next((one for one in _kinds_in(kind) if is_dataclass(one)), None)
