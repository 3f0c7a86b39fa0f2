"""Records of JSON files, each with the place behind it.

In: a JSON lines file (plain, `.gz`, `.zst`) or a `.json` file that is one list.  Out: `Placed`s.
Promise: records in order; from a mark, exactly those behind it. What is no record comes as its
`Misfit`, so that whoever reads can drop it by name. A JSON list is read whole, so it is bounded,
and so can lines be;
a `.json` file that begins with an object is JSON lines, which is announced.
Not here: Parquet and hubs (see `inputs_arrow`); what a record means.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple, Protocol, Self

import msgspec

from shardmill.errors import SourceError
from shardmill.records import JSON
from shardmill.sources.batching import DEFAULT_LIMITS
from shardmill.sources.clean import BOM_BYTES
from shardmill.sources.cursors import counts_of
from shardmill.sources.files import InputFile, check_unchanged, open_file
from shardmill.sources.lines import line_blocks
from shardmill.sources.record import Misfit, Record, decode_record, kind_of
from shardmill.urls import scrub

logger = logging.getLogger(__name__)

JSON_SUFFIXES = (".json",)
MAX_LIST_BYTES = 256 * 2**20
"""A list in one file is held whole; above this it must be written as JSON lines."""

_WHITE = b" \t\r\n"


class Placed(NamedTuple):
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

    def records(self, mark: Any) -> Iterator[Placed]:
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

    def records(self, mark: Any) -> Iterator[Placed]:
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

    def records(self, mark: Any) -> Iterator[Placed]:
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


def _placed(data: bytes, place: str, mark: Any) -> Placed:
    try:
        record, repaired = decode_record(data)
    except Misfit as misfit:
        return Placed(misfit, place, mark)
    return Placed(record, place, mark, repaired)
