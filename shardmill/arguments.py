"""Numbers and names from a caller, checked at the border in the caller's words."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from typing import SupportsIndex

from shardmill.errors import OptionError


def whole_number(value: SupportsIndex, name: str, *, least: int | None = 1) -> int:
    """`value` as an int of at least `least`: what has `__index__`, but no bool, float or str."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise OptionError(f"{name}={value!r} ({type(value).__name__}): wanted a whole number")
    number = operator.index(value)
    if least is not None and number < least:
        raise OptionError(f"{name}={number:,}: wanted at least {least:,}")
    return number


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: the only one that begins so, else one that is
    spelled alike; None when none is near. Case, "-" and "_" do not count."""
    plain = {_plain(name): name for name in sorted(known)}
    asked = _plain(word)
    begun = [name for name in plain if len(asked) > 1 and name.startswith(asked)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(asked, plain, n=1)
    return plain[near[0]] if near else None


def choices(word: str, known: Iterable[str], *, verb: str = "known here") -> str:
    """The end of a message about a name that nobody knows:
    did you mean 'train'? Known here: train, val"""
    names = list(known)
    near = nearest(word, names)
    listed = f"{verb}: {', '.join(names) or 'none'}"
    return listed if near is None else f"did you mean {near!r}? {listed[0].upper()}{listed[1:]}"


def _plain(name: str) -> str:
    return name.casefold().replace("-", "_")
