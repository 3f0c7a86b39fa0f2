"""The `[data]` table of a training config, read.

In: a TOML file, `--data.key=value` flags, or the same as a mapping.  Out: a `DataConfig`.
Promise: what is returned makes sense as a whole: known keys only, strict types, weights that can be
mixed, names that exist, phases in order. A refusal names the file and the key. Written with
`config_toml` and read again it is the same config.
Not here: other tables of the file; models, optimizers; `lr_scale` is only handed on.

One table of a config file, read strictly.

In: a table as a TOML parser gives it, and the keys it may have.  Out: values of the right kind.
Promise: true is no number, "1" is no number, 1.0 is no whole number; every refusal names the file,
the key ("data.phases[1].start_step"), what was found and what was wanted; a key that nobody knows
is refused with the nearest one that is known.
Not here: what the keys mean (config).

A config as people would write it: TOML, or `--data.key=value` flags.

In: a `DataConfig`.  Out: its `[data]` table as TOML, or as flags; from flags the table again.
Promise: only what differs from the defaults; `read_config` of either gives the same config.
Not here: reading TOML, whether values make sense (read).
"""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from shardmill.arguments import choices, nearest
from shardmill.errors import OptionError
from shardmill.loading.config.records import DataConfig, DatasetConfig, PhaseConfig, check_mixture
from shardmill.loading.order import SHUFFLES, Shuffle
from shardmill.loading.rows import EVERY_FILE
from shardmill.store.readers.token_space import READERS, ReaderName


@dataclass(frozen=True, slots=True)
class Table:
    """The values of one table, and where it stands. Made by `open_table`."""

    values: Mapping[str, object]
    path: str  # "data.phases[1]"
    file: str  # for messages

    def text(
        self, key: str, default: str | None = None, *, among: Sequence[str] = ()
    ) -> str | None:
        """A string; an empty one counts as not said."""
        value = self.values.get(key, default)
        if value is None or value == "":
            return default
        if not isinstance(value, str):
            raise self.refuse(key, value, f"one of {list(among)}" if among else "a string")
        if among and value not in among:
            near = nearest(value, among)
            guess = f"; did you mean {near!r}?" if near else ""
            raise self.refuse(key, value, f"one of {list(among)}{guess}")
        if "\x00" in value:
            raise self.refuse(key, value, "a string without NUL")
        return value

    def whole(self, key: str, default: int | None, *, least: int = 0) -> int:
        """A whole number of at least `least`; None as default: it must be said."""
        value = self.values.get(key, default)
        if value is None:
            raise OptionError(f"{self.at(key)}: missing; wanted a whole number")
        if type(value) is not int or value < least:
            raise self.refuse(key, value, f"a whole number of at least {least:,}")
        return value

    def number(self, key: str, default: float, *, above: bool = False) -> float:
        """A finite number of at least 0; with `above`, more than 0. As it is written."""
        value = self.values.get(key, default)
        if not _is_number(value) or (above and not value):
            raise self.refuse(
                key, value, f"a finite number {'above' if above else 'of at least'} 0"
            )
        assert isinstance(value, int | float)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def tables(self, key: str, known: Collection[str]) -> list[Table]:
        """A list of tables; an empty one when it is not said."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise self.refuse(key, value, "a list of tables")
        name = f"{self.path}.{key}"
        return [open_table(v, f"{name}[{n}]", known, self.file) for n, v in enumerate(value)]

    def weights(self, key: str) -> dict[str, float]:
        """A table of names and weights; an empty one when it is not said."""
        value = self.values.get(key, {})
        if not isinstance(value, Mapping):
            raise self.refuse(key, value, "a table of dataset names and weights")
        inner = Table(value, f"{self.path}.{key}", self.file)
        return {name: inner.number(name, 0) for name in value}

    def at(self, key: str) -> str:
        return f"{self.file}: {self.path}.{key}"

    def refuse(self, key: str, found: object, wanted: str) -> OptionError:
        """The error for a value that will not do."""
        shown = {True: "true", False: "false"}[found] if isinstance(found, bool) else repr(found)
        return OptionError(f"{self.at(key)}: found {shown:.80} ({_kind(found)}), wanted {wanted}")


def open_table(value: object, path: str, known: Collection[str], file: str) -> Table:
    """`value` as a table that has none but the known keys."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{file}: {path}: found {value!r:.80} ({_kind(value)}), wanted a table")
    for key in value:
        if key not in known:
            raise OptionError(
                f"{file}: {path}.{key}: unknown key; {choices(str(key), sorted(known))}"
            )
    return Table(value, path, file)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value >= 0
    except OverflowError:  # an integer beyond every float
        return False


def _kind(value: object) -> str:
    """What a TOML user calls it."""
    kinds = {bool: "a boolean", int: "an integer", float: "a float", str: "a string"}
    kinds |= {list: "a list", dict: "a table"}
    return kinds.get(type(value), type(value).__name__)


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
