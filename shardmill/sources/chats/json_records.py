"""One record out of JSON: a dict whose strings are valid text, or what is wrong with it.

In: the bytes of one JSON value.  Out: a dict and whether something in it was replaced, or a
`Misfit` with a reason code and a sentence.
Promise: each record is judged alone and always in the same way, however deep the caller's stack;
nested deeper than `MAX_DEPTH` is refused. What is no UTF-8 or half a surrogate pair becomes U+FFFD;
NaN and Infinity, which Python writes, are read.
Not here: files, and what a record means.

Records of JSON files, each with the place behind it.

In: a JSON lines file (plain, `.gz`, `.zst`) or a `.json` file that is one list.  Out: `Placed`s.
Promise: records in order; from a mark, exactly those behind it. What is no record comes as its
`Misfit`, so that whoever reads can drop it by name. A JSON list is read whole, so it is bounded,
and so can lines be;
a `.json` file that begins with an object is JSON lines, which is announced.
Not here: Parquet and hubs (see `inputs_arrow`); what a record means.

Rows of local JSON lines, whole.

In: `.jsonl` files, plain or compressed.  Out: one dict per row, in order.
Promise: blank lines are not rows; a line that is no JSON object is an error naming file and line;
strings are valid text (what is not becomes U+FFFD), otherwise as they stand in the file. A row of
more than 256 MiB of text is refused before it is read whole.
Not here: which parts of a row are text. For chats and other sets that are more than one text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import msgspec

from shardmill.errors import SourceError
from shardmill.records import JSON
from shardmill.sources.batches import DEFAULT_LIMITS, counts_of
from shardmill.sources.cleaning import BOM_BYTES, replace_surrogates
from shardmill.sources.formats.jsonl import (
    JSONL_SUFFIXES,
    BadJsonError,
    bad_row,
    bad_row_error,
    filled_lines,
    read_object,
)
from shardmill.sources.formats.lines import line_blocks
from shardmill.storage.files import InputFile, Where, check_unchanged, list_files, open_file
from shardmill.urls import scrub

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


logger = logging.getLogger(__name__)

JSON_SUFFIXES = (".json",)
MAX_LIST_BYTES = 256 * 2**20
"""A list in one file is held whole; above this it must be written as JSON lines."""

_WHITE = b" \t\r\n"


class RecordAt(NamedTuple):
    """One record and where it was."""

    record: Record | Misfit
    place: str  # "chats.jsonl:17"
    mark: Any  # behind this record; only its input understands it
    repaired: bool = False  # something in it was no text and was replaced


class RecordInput(Protocol):
    """One file or stream of records."""

    @property
    def name(self) -> str: ...

    def where(self, place: str) -> str:
        """A place as a person finds it."""

    def records(self, mark: Any) -> Iterator[RecordAt]:
        """The records behind a mark (None: all)."""

    def mark_of(self, position: JSON) -> Any:
        """A mark out of a cursor; refuses what it did not write."""

    def position_of(self, mark: Any) -> JSON:
        """A mark for a cursor."""


class FileInput:
    """What inputs that are files have in common."""

    limits = DEFAULT_LIMITS

    def __init__(self, file: InputFile) -> None:
        self.file = file

    @property
    def name(self) -> str:
        return self.file.name

    def limited(self, num_bytes: int) -> Self:
        """The same input, which refuses a line over what `num_bytes` of text can take."""
        entry = copy(self)
        entry.limits = self.limits.refusing(num_bytes)
        return entry

    def where(self, place: str) -> str:
        return str(self.file.place).removesuffix(self.file.name) + place


class JsonlRecords(FileInput):
    """JSON lines; a mark is the bytes and lines read, of the decompressed file."""

    def records(self, mark: Any) -> Iterator[RecordAt]:
        start, first_line = mark or (0, 0)
        name = self.file.name
        check_unchanged(self.file)
        blocks = line_blocks(
            self.file, start=start, first_line=first_line, limits=self.limits, is_json=True
        )
        for block in blocks:
            base = block.end - len(block.data)
            ends = zip(block.lines(), block.stops.tolist(), strict=True)
            for number, (line, stop) in enumerate(ends, block.first_line + 1):
                if filled := line.strip(_WHITE):
                    yield _placed(filled, f"{name}:{number}", (base + stop, number))
        check_unchanged(self.file)

    def mark_of(self, position: JSON) -> Any:
        return counts_of(position, ("bytes", "lines"), self.name)

    def position_of(self, mark: Any) -> JSON:
        return {"bytes": mark[0], "lines": mark[1]}


class JsonListRecords(FileInput):
    """One list of records in a file; a mark is the number of records read."""

    def records(self, mark: Any) -> Iterator[RecordAt]:
        start = mark or 0
        found = _raw_records(self.file)
        if start > len(found):
            raise SourceError(
                f"{self.file.place}: the cursor stands behind record {start:,}, but there are only "
                f"{len(found):,}; resume with the input the cursor came from"
            )
        for number in range(start, len(found)):
            place = f"{self.file.name}:record {number}"
            yield _placed(found[number], place, number + 1)

    def mark_of(self, position: JSON) -> Any:
        return counts_of(position, ("records",), self.name)[0]

    def position_of(self, mark: Any) -> JSON:
        return {"records": mark}


def json_input(file: InputFile) -> JsonlRecords | JsonListRecords:
    """A `.json` file: one list, or else JSON lines under that name."""
    check_unchanged(file)
    with open_file(file) as stream:
        first = b""
        while not first and (data := bytes(stream.read(2**16))):
            first = data.removeprefix(BOM_BYTES).lstrip(_WHITE)[:1]
    if first == b"{":
        where = scrub(str(file.place))
        logger.info("%s: begins with an object, so it is read as JSON lines", where)
        return JsonlRecords(file)
    return JsonListRecords(file)


def _raw_records(file: InputFile) -> list[bytes]:
    """The JSON of each record of a list."""
    if file.num_bytes > MAX_LIST_BYTES:
        raise SourceError(
            f"{file.place}: one JSON list of {file.num_bytes:,} bytes, and a list must be read "
            f"whole; up to {MAX_LIST_BYTES:,} are. Write one record per line: "
            "jq -c '.[]' chats.json > chats.jsonl"
        )
    check_unchanged(file)
    with open_file(file) as stream:
        data = bytes(stream.read()).removeprefix(BOM_BYTES)
    return _split_list(data, file) if data.strip(_WHITE) else []


def _split_list(data: bytes, file: InputFile) -> list[bytes]:
    try:
        return [bytes(raw) for raw in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # NaN, or half a surrogate pair: Python's own decoder reads it, at several times the memory.
        found, problem = _loaded(data)
    if isinstance(found, list):
        return [json.dumps(record).encode() for record in found]
    raise SourceError(
        f"{file.place}: not one JSON list of records: {problem or kind_of(found)}; mend it, or "
        "write one record per line as .jsonl"
    )


def _loaded(data: bytes) -> tuple[object, str]:
    try:
        return json.loads(data.decode("utf-8", "replace")), ""
    except (ValueError, RecursionError) as error:
        return None, str(error)


def _placed(data: bytes, place: str, mark: Any) -> RecordAt:
    try:
        record, repaired = decode_record(data)
    except Misfit as misfit:
        return RecordAt(misfit, place, mark)
    return RecordAt(record, place, mark, repaired)


_LIMITS = DEFAULT_LIMITS.refusing(256 * 2**20)  # of one row, so that a damaged file takes no more


def iter_jsonl_rows(where: Where) -> Iterator[dict[str, Any]]:
    """Every row of a file, folder, glob or list of files. Files are looked up at the call."""
    files = list_files(where, suffixes=JSONL_SUFFIXES)
    return (row for file in files for row in _rows(file))


def _rows(file: InputFile) -> Iterator[dict[str, Any]]:
    check_unchanged(file)
    for block in line_blocks(file, start=0, first_line=0, limits=_LIMITS, is_json=True):
        for number, line in filled_lines(block):
            try:
                yield _row(line)
            except BadJsonError as bad:
                raise bad_row_error(file, bad_row(number, line, bad)) from bad


def _row(line: bytes) -> dict[str, Any]:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        row = read_object(line)
    try:
        mended: dict[str, Any] = repaired(row)
        return mended
    except RecursionError as error:
        raise BadJsonError("bad_json", f"nested too deep: {error}") from error
