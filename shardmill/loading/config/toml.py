"""A config as people would write it: TOML, or `--data.key=value` flags.

In: a `DataConfig`.  Out: its `[data]` table as TOML, or as flags; from flags the table again.
Promise: only what differs from the defaults; `read_config` of either gives the same config.
Not here: reading TOML, whether values make sense (read).
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from shardmill.arguments import choices
from shardmill.errors import OptionError
from shardmill.loading.config.records import DataConfig

_FLAG = "--data."


def config_toml(config: DataConfig) -> str:
    """The `[data]` table, ending in a line break."""
    lines, lists = ["[data]"], []
    for key, value in _said(config):
        if isinstance(value, tuple):
            lists += [line for record in value for line in _block(f"data.{key}", record)]
        else:
            lines.append(f"{key} = {_value(value)}")
    return "\n".join([*lines, *lists]) + "\n"


def config_flags(config: DataConfig) -> list[str]:
    """One `--data.key=value` a key, as a shell takes it. Only for a single source."""
    if config.datasets or config.phases:
        raise OptionError("datasets and phases are tables, which no flag holds: write TOML")
    return [
        _shell(f"{_FLAG}{key}={value if isinstance(value, str) else _value(value)}")
        for key, value in _said(config)
    ]


def flag_values(flags: Sequence[str]) -> dict[str, object]:
    """The table that `--data.key=value` words say, one word each; later ones win.

    A key of text takes just what is written; other values are written as in TOML.
    """
    defaults = {entry.name: entry.default for entry in fields(DataConfig) if entry.compare}
    found: dict[str, object] = {}
    for word in flags:
        name, equals, text = word.partition("=")
        key = name.removeprefix(_FLAG)
        if not name.startswith(_FLAG):
            raise OptionError(f"{word}: wanted {_FLAG}KEY=VALUE")
        if key not in defaults:
            raise OptionError(f"{name}: unknown key; {choices(key, sorted(defaults))}")
        if key in ("datasets", "phases"):
            raise OptionError(f"{name}: a list of tables, which no flag holds: write it in TOML")
        if not equals:
            raise OptionError(f"{name}: found no '='; wanted {name}=VALUE")
        is_text = defaults[key] is None or isinstance(defaults[key], str)
        found[key] = text if is_text else _toml_value(text)
    return found


def _toml_value(text: str) -> object:
    """What TOML reads; the text itself when it is none, to be refused with the others."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if found.keys() == {"value"} else text


def _said(record: object) -> Iterator[tuple[str, Any]]:
    """Keys and values that differ from the default; those without a default always."""
    for entry in fields(record):  # type: ignore[arg-type]
        value = getattr(record, entry.name)
        default = entry.default_factory() if callable(entry.default_factory) else entry.default
        if entry.compare and value != default:
            yield entry.name, value


def _block(name: str, record: object) -> list[str]:
    return ["", f"[[{name}]]", *(f"{key} = {_value(value)}" for key, value in _said(record))]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_string(name)} = {_value(number)}" for name, number in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return repr(value)


def _string(text: str) -> str:
    """A basic string of TOML; what cannot be seen is escaped."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise OptionError(f"{text!r}: TOML is UTF-8, which cannot hold this name; rename it")
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in ('"', "\\"):
        return f"\\{character}"
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 2**16 else f"\\U{ord(character):08x}"


def _shell(word: str) -> str:
    """One word for a shell; what cannot be seen as $'\\x1b', which bash and zsh read."""
    if word.isprintable():
        return shlex.quote(word)
    plain = (
        chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}"
        for byte in word.encode("utf-8", "surrogateescape")
    )
    escapes = {"\\": "\\\\", "'": "\\'"}
    return "$'" + "".join(escapes.get(part, part) for part in plain) + "'"
