"""Numbers from a caller, checked at the border in the caller's words."""

from __future__ import annotations

import operator
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
