"""One table of a config file, read strictly.

In: a table as a TOML parser gives it, and the keys it may have.  Out: values of the right kind.
Promise: true is no number, "1" is no number, 1.0 is no whole number; every refusal names the file,
the key ("data.phases[1].start_step"), what was found and what was wanted; a key that nobody knows
is refused with the nearest one that is known.
Not here: what the keys mean (config).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardmill.arguments import choices, nearest
from shardmill.errors import OptionError


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
