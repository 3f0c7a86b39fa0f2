"""Sizes as people write them: 134217728, 128MiB, 1GB."""

from __future__ import annotations

import re

from shardmill.errors import OptionError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """The number of bytes; KiB, MiB, GiB are powers of 1024, KB, MB, GB of 1000."""
    match = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise OptionError(f"size {text!r}: wanted a number of bytes, or one like 128MiB or 1GB")
    return int(match[1]) * _UNITS[match[2].upper()]
