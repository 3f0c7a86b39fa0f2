"""What a request asks, checked at the border.

In: names and values, as text.  Out: numbers, choices and texts.
Promise: anything that is missing, unknown, twice, no number or out of bounds is an `OptionError`
that names it, what was found and what is wanted.
Not here: which addresses there are (api).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardmill.errors import OptionError

_DIGITS = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_MOST_TEXT = 1000

MOST_PAGE = 500
"""Entries of a list in one answer."""


class NotThereError(OptionError):
    """A document or row whose number is well formed, but which does not exist."""


class Query:
    """The values of one request."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._asked: set[str] = set()

    def number(
        self, name: str, default: int | None = None, *, least: int = 0, most: int = 2**53 - 1
    ) -> int:
        """A whole number; without a default it must be there."""
        value = self.optional(name)
        if value is None:
            if default is None:
                raise OptionError(f"{name} is missing: wanted {name}=NUMBER")
            return default
        wanted = f"wanted a whole number from {least:,} to {most:,}"
        if not _DIGITS.fullmatch(value):
            raise OptionError(f"{name}={value[:40]!r}: {wanted}")
        if not least <= int(value) <= most:
            raise OptionError(f"{name}={int(value):,}: {wanted}")
        return int(value)

    def whole(self, name: str, *, least: int = 0, most: int = 2**53 - 1) -> int | None:
        """A whole number, or None when it was not sent."""
        return None if self.optional(name) is None else self.number(name, least=least, most=most)

    def page(self, limit: int = 100, *, most: int = MOST_PAGE) -> tuple[int, int]:
        """start and limit."""
        return self.number("start", 0), self.number("limit", limit, least=1, most=most)

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.optional(name)
        if value is None and default is not None:
            return default
        if value is None or value not in choices:
            found = f"{name} is missing" if value is None else f"{name}={value[:80]!r}"
            raise OptionError(f"{found}: wanted one of {', '.join(map(repr, choices))}")
        return value

    def text(self, name: str) -> str:
        value = self.optional(name)
        if not value:
            raise OptionError(f"{name} is missing: wanted {name}=TEXT")
        return value

    def optional(self, name: str) -> str | None:
        """As it was sent; "" counts as not sent."""
        self._asked.add(name)
        value = self._values.get(name) or None
        if value is not None and len(value) > _MOST_TEXT:
            raise OptionError(f"{name}: {len(value):,} characters; wanted at most {_MOST_TEXT:,}")
        return value

    def done(self) -> None:
        """After the answer is made: refuse names that nobody asked for."""
        unknown = sorted(self._values.keys() - self._asked)
        if unknown:
            raise OptionError(
                f"{', '.join(name[:40] for name in unknown[:8])}: unknown here; wanted any of "
                f"{', '.join(sorted(self._asked)) or 'nothing'}"
            )
