"""One row of JSON: an object whose strings are valid text, or what is wrong with it.

Each row is decoded alone and always in the same way. What is not UTF-8 and half a surrogate pair
become U+FFFD; NaN and Infinity, which Python writes, are read. Rows nested deeper than `MAX_DEPTH`
are refused. Also `.json` files that hold one list of rows, which is read whole and so is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from shardmill.errors import SourceError
from shardmill.records import JSON
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, counts_of
from shardmill.sources.cleaning import BOM_BYTES, replace_surrogates
from shardmill.sources.source import BadRowError, InputRow
from shardmill.storage.files import InputFile, open_file

Object: TypeAlias = dict[str, Any]

MAX_DEPTH = 256
"""Lists and objects inside one another. A decoder's own limit depends on the caller's stack."""
MAX_LIST_BYTES = 256 * 2**20
"""A list in one file is held whole; a larger one must be written as JSON lines."""
WHITE = b" \t\r\n"
REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for JSON that another decoder may still read."""

_OBJECT = msgspec.json.Decoder(Object)
_ANYTHING = msgspec.json.Decoder()
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} lists and objects"
_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number"}
_KINDS |= {str: "a string", list: "a list", dict: "an object"}


def kind_of(value: object) -> str:
    """A value's kind in JSON's words, for an error."""
    return _KINDS.get(type(value), type(value).__name__)


def decode_row(data: bytes, *, of_any_depth: bool = False) -> tuple[Object, bool]:
    """One JSON object, without white space around it, and whether something was replaced."""
    try:
        row, marked = _OBJECT.decode(data), None
    except REFUSALS:
        try:
            row = read_object(data)
            # Bytes that are not UTF-8 become surrogates here, as halves of pairs already are.
            marked = read_object(data, errors="surrogateescape")
        except BadRowError as bad:
            if isinstance(bad.__cause__, RecursionError):  # it names Python's own limit
                raise BadRowError("bad_json", _TOO_DEEP) from bad
            raise
    # Fewer brackets cannot nest too deep, and nearly every row has fewer.
    is_nested = not of_any_depth and data.count(b"{") + data.count(b"[") > MAX_DEPTH
    if is_nested and _is_too_deep(row):
        raise BadRowError("bad_json", _TOO_DEEP)
    if marked is None:
        return row, False
    try:
        return repaired(row), marked != repaired(marked)
    except RecursionError as error:
        raise BadRowError("bad_json", f"nested too deep: {error}") from error


def read_row(data: bytes, id: str, position: JSON) -> InputRow:
    """`decode_row` as a row of an input; a bad one holds its problem."""
    try:
        row, is_repaired = decode_row(data)
    except BadRowError as bad:
        return InputRow(bad, id, position)
    return InputRow(row, id, position, is_repaired)


def decode_value(text: str) -> Any:
    """JSON inside a string; None when it is not JSON, or nested too deep."""
    try:
        value = _ANYTHING.decode(text.encode("utf-8", "replace"))
    except REFUSALS:
        return None
    return None if _is_too_deep(value) else value


def read_object(data: bytes, *, errors: str = "replace") -> Object:
    """A JSON object by Python's own decoder. `errors` is for bytes that are not UTF-8."""
    try:
        value = json.loads(data.decode("utf-8", errors))
    except (ValueError, RecursionError) as error:
        raise BadRowError("bad_json", f"broken JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRowError("bad_json", f"{kind_of(value)}, but a row is an object")
    return value


def _is_too_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for outer in level:
            if isinstance(outer, dict):
                inner += [one for one in outer.values() if isinstance(one, dict | list)]
            elif isinstance(outer, list):
                inner += [one for one in outer if isinstance(one, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def repaired(value: Any) -> Any:
    """Half a surrogate pair, however deep inside, becomes U+FFFD. The depth is already bounded."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return list(map(repaired, value))
    if isinstance(value, dict):
        keys = map(replace_surrogates, value)
        return dict(zip(keys, map(repaired, value.values()), strict=True))
    return value


@dataclass(frozen=True)
class JsonListFormat:
    """A `.json` file that is one list of rows. A position is the number of rows read."""

    limits: BatchLimits = DEFAULT_LIMITS  # not used: `MAX_LIST_BYTES` bounds the whole list

    def rows(self, file: InputFile, position: JSON) -> Iterator[InputRow]:
        start = 0 if position is None else counts_of(position, ("records",), file.name)[0]
        found = _split_list(file)
        if start > len(found):
            raise SourceError(
                f"{file.place}: the cursor is after row {start:,}, but there are only "
                f"{len(found):,}; resume with the input the cursor came from"
            )
        for number in range(start, len(found)):
            yield read_row(found[number], f"{file.name}:record {number}", {"records": number + 1})


def _split_list(file: InputFile) -> list[bytes]:
    """The JSON of each row of a list."""
    if file.num_bytes > MAX_LIST_BYTES:
        raise SourceError(
            f"{file.place}: one JSON list of {file.num_bytes:,} bytes, but a list is read whole "
            f"and may have {MAX_LIST_BYTES:,}; write one row per line: "
            "jq -c '.[]' chats.json > chats.jsonl"
        )
    with open_file(file) as stream:
        data = bytes(stream.read()).removeprefix(BOM_BYTES)
    if not data.strip(WHITE):
        return []
    try:
        return [bytes(raw) for raw in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except REFUSALS:
        pass
    # NaN, or half a surrogate pair: Python's own decoder reads them, with several times the memory.
    try:
        found = json.loads(data.decode("utf-8", "replace"))
        problem = kind_of(found)
    except (ValueError, RecursionError) as error:
        found, problem = None, str(error)
    if not isinstance(found, list):
        raise SourceError(
            f"{file.place}: not one JSON list of rows: {problem}; correct it, or write one row per "
            "line as .jsonl"
        )
    return [json.dumps(row).encode() for row in found]
