"""One record out of JSON: a dict whose strings are valid text, or what is wrong with it.

In: the bytes of one JSON value.  Out: a dict and whether something in it was replaced, or a
`Misfit` with a reason code and a sentence.
Promise: each record is judged alone and always in the same way, however deep the caller's stack;
nested deeper than `MAX_DEPTH` is refused. What is no UTF-8 or half a surrogate pair becomes U+FFFD;
NaN and Infinity, which Python writes, are read.
Not here: files, and what a record means.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from shardmill.sources.clean import replace_surrogates
from shardmill.sources.jsonline import BadJsonError, read_object

Record: TypeAlias = dict[str, Any]

MAX_DEPTH = 256
"""So many lists and objects inside one another; a decoder's own limit moves with the stack."""

_REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DECODER = msgspec.json.Decoder(dict[str, Any])
_ANYTHING = msgspec.json.Decoder()
_NUM_KEYS = 20
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} lists and objects"


class Misfit(Exception):
    """Inside this room only: why a record gives no conversation."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


def decode_record(data: bytes) -> tuple[Record, bool]:
    """One JSON object, given without white space around it, and whether it was mended."""
    mended = False
    try:
        record = _DECODER.decode(data)
    except _REFUSALS:
        record, mended = _decode_leniently(data)
    # Fewer brackets than that cannot nest too deep, and nearly every record has fewer.
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        _refuse_deep(record)
    return record, mended


def decode_value(text: str) -> Any:
    """JSON inside a string; None when it is none, or nested too deep."""
    try:
        value = _ANYTHING.decode(text.encode("utf-8", "replace"))
    except _REFUSALS:
        return None
    return None if _depth_exceeds(value) else value


def is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def keys_of(record: Record) -> str:
    """The keys for an error, however many and long they are."""
    shown = [f"{key!r:.40}" for key in list(record)[:_NUM_KEYS]]
    more = f" and {len(record) - _NUM_KEYS:,} more" if len(record) > _NUM_KEYS else ""
    return (", ".join(shown) or "none") + more


def kind_of(value: object) -> str:
    """A value's kind in the words of JSON, for an error."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number"}
    names |= {str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _decode_leniently(data: bytes) -> tuple[Record, bool]:
    """By Python's own decoder, and then mended."""
    try:
        record = read_object(data)
        # Bytes that are no UTF-8 show up as surrogates here, and halves of pairs are some.
        marked = read_object(data, errors="surrogateescape")
    except BadJsonError as bad:
        # Python names the limit of its stack, which is not the rule that was broken.
        problem = _TOO_DEEP if "recursion" in str(bad) else str(bad)
        raise Misfit("bad_json", problem) from bad
    _refuse_deep(record)
    return repaired(record), marked != repaired(marked)


def _refuse_deep(record: Record) -> None:
    if _depth_exceeds(record):
        raise Misfit("bad_json", _TOO_DEEP)


def _depth_exceeds(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return False
    return True


def _containers(value: object) -> list[object]:
    if isinstance(value, dict):
        return [inner for inner in value.values() if isinstance(inner, dict | list)]
    if isinstance(value, list):
        return [inner for inner in value if isinstance(inner, dict | list)]
    return []


def repaired(value: Any) -> Any:
    """Half a surrogate pair, deep inside or not, becomes U+FFFD. Depth was bounded before."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return list(map(repaired, value))
    if isinstance(value, dict):
        keys = map(replace_surrogates, value)
        return dict(zip(keys, map(repaired, value.values()), strict=True))
    return value
