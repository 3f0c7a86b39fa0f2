"""A `.json` file that is one list of rows, or an object with exactly one list: streamed.

The list is cut into its rows by looking at brackets and quotes only, half a MiB at a time, and each
row is decoded alone, as a line of JSON lines is: the same rows are read, repaired or refused, and
memory is a block and a row. A position is the number of rows and the byte after the last of them,
where reading continues (a compressed file is decompressed up to there). What is no such list is an
error where that is found, which may be at the end of the file.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import chain
from typing import NamedTuple

import numpy as np

from shardmill.errors import SourceError
from shardmill.records import JSON, IntArray
from shardmill.sources.batches import BOM_BYTES, BatchLimits, counts_of, too_large
from shardmill.sources.formats.jsonl import WHITE, read_row
from shardmill.sources.formats.lines import TextLength, read_chunks
from shardmill.sources.source import InputRow, RowFormat
from shardmill.storage.files import InputFile

ENDINGS = (".json", ".json.gz", ".json.zst")
HEAD_BYTES = 2**16
"""The list of an object begins within so many bytes, and no more follow it."""

_BLOCK_BYTES = 2**19
_OPEN, _CLOSE, _COMMA, _QUOTE, _ESCAPE = range(1, 6)
_KINDS = np.zeros(256, np.uint8)
_KINDS[[*b"[{"]], _KINDS[[*b"]}"]] = _OPEN, _CLOSE
_KINDS[[*b',"\\']] = _COMMA, _QUOTE, _ESCAPE
_DECODER = json.JSONDecoder()


class FoundList(NamedTuple):
    """The list of rows in a file."""

    start: int  # the byte after its opening bracket
    key: str | None  # its name in the object around it; None: it is the whole file


class Look(NamedTuple):
    """The beginning of a file."""

    is_object: bool
    line: bytes  # the first one; b"": longer than `HEAD_BYTES`
    has_more: bool  # whether more than white space follows it
    found: FoundList | None  # the first list in the object that it begins with


class JsonArrayFormat(RowFormat):
    """Rows of the list in a `.json` file, which is one piece."""

    def rows(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[InputRow]:
        found = find_list(file)
        if found is None:
            return
        number, start = 0, found.start
        if position is not None:
            number, start = counts_of(position, ("records", "bytes"), file.name)
        for item, end in _items(file, found.key, start, limits, is_resumed=position is not None):
            after: JSON = {"records": number + 1, "bytes": end}
            yield read_row(item, f"{file.name}:record {number}", after)
            number += 1


def find_list(file: InputFile) -> FoundList | None:
    """Where the rows are; None for an empty file."""
    start, head = _head(file)
    if not head:
        return None
    if head.startswith(b"["):
        return FoundList(start + 1, None)
    found = _list_in_object(start, head)
    if found is None:
        kinds = {b"{": "an object without a list at its beginning", b"n": "null", b'"': "a string"}
        kinds |= dict.fromkeys((b"t", b"f"), "a boolean")
        kinds |= {bytes([digit]): "a number" for digit in b"-0123456789"}
        raise _no_list(file, kinds.get(head[:1], f"found {head[:20]!r}"))
    return found


def _list_in_object(start: int, head: bytes) -> FoundList | None:
    text, at = head.decode("latin-1"), 0  # a character for each byte
    try:
        while text[at] in "{,":
            key, at = _DECODER.raw_decode(text, _after_spaces(text, at + 1))
            at = _after_spaces(text, at)
            if not isinstance(key, str) or text[at] != ":":
                return None
            at = _after_spaces(text, at + 1)
            if text[at] == "[":
                name = key.encode("latin-1", "replace").decode("utf-8", "replace")
                return FoundList(start + at + 1, name)
            _, at = _DECODER.raw_decode(text, at)
            at = _after_spaces(text, at)
    except (ValueError, IndexError, RecursionError):
        pass  # no JSON, or it goes on after the head
    return None


def first_item(file: InputFile, found: FoundList, limits: BatchLimits) -> bytes:
    """The JSON of the first row of a list; b"" of an empty one."""
    with closing(_items(file, found.key, found.start, limits, is_resumed=False)) as items:
        return next(items, (b"", 0))[0]


def look(file: InputFile) -> Look:
    """What tells whether a file that begins with an object is that object, or JSON lines."""
    start, head = _head(file)
    line, end, rest = head.partition(b"\n")
    if not end and len(head) == HEAD_BYTES:
        line, rest = b"", head
    found = _list_in_object(start, head)
    return Look(head.startswith(b"{"), line.strip(WHITE), bool(rest.strip(WHITE)), found)


def _head(file: InputFile) -> tuple[int, bytes]:
    """The first bytes of a file after its white space, and where they begin."""
    start, head = 0, b""
    with closing(read_chunks(file, 0, HEAD_BYTES)) as chunks:
        for chunk in chunks:
            head += chunk
            if start == 0 and len(head) < len(BOM_BYTES) and BOM_BYTES.startswith(head):
                continue
            filled = head.removeprefix(BOM_BYTES) if start == 0 else head
            filled = filled.lstrip(WHITE)
            start += len(head) - len(filled)
            head = filled
            if len(head) >= HEAD_BYTES:
                break
    return start, head[:HEAD_BYTES]


def _after_spaces(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _items(
    file: InputFile, key: str | None, start: int, limits: BatchLimits, *, is_resumed: bool
) -> Generator[tuple[bytes, int], None, None]:
    """The JSON of each row from byte `start` on, and where the comma or bracket after it is.

    `start` is after the opening bracket; or, when resumed, at such a comma or bracket.
    """
    most, edges = limits.most_input(), _Edges()
    size = min(_BLOCK_BYTES, max(limits.num_bytes // 8, 1))  # a block is less than a row may be
    pending: list[bytes] = []
    length = TextLength(is_json=True)
    offset, after_comma = start, False
    with closing(read_chunks(file, start, size)) as chunks:
        for chunk in chunks:
            begin = 0
            if is_resumed and offset == start:
                after_comma = chunk.startswith(b",")
                begin = int(after_comma)
                if not after_comma and not chunk.startswith(b"]"):
                    break
            for stop in edges.find(chunk, begin):
                piece, is_last = chunk[begin:stop], chunk[stop : stop + 1] != b","
                if pending and most is not None and length.add(piece) > most:
                    raise _long_row(file, offset + stop, most)
                item = b"".join((*pending, piece)).strip(WHITE)
                pending, length = [], TextLength(is_json=True)
                if is_last and chunk[stop : stop + 1] != b"]":
                    raise _no_list(file, f"a '}}' at byte {offset + stop:,} closes nothing")
                if item or after_comma or not is_last:
                    yield item, offset + stop
                begin, after_comma = stop + 1, True
            if edges.is_closed:
                _check_tail(file, key, chain([chunk[begin:]], chunks))
                return
            pending.append(chunk[begin:])
            if most is not None and length.add(chunk[begin:]) > most:
                raise _long_row(file, offset + len(chunk), most)
            offset += len(chunk)
    if is_resumed and offset == start:
        raise SourceError(
            f"{file.place}: the cursor is at byte {start:,}, where no row ends; resume with the "
            "input the cursor came from"
        )
    raise _no_list(file, "it has no end")


def _check_tail(file: InputFile, key: str | None, rest: Iterator[bytes]) -> None:
    """What follows the list: nothing, or the other members of the object, which are no lists."""
    tail = b""
    for chunk in rest:
        tail = (tail + chunk).lstrip(WHITE)
        if len(tail) > HEAD_BYTES or (tail and key is None):
            break
    if key is None:
        if tail:
            raise _no_list(file, f"after it comes {tail[:20]!r}")
        return
    name = f"{key!r:.40}"
    if len(tail) > HEAD_BYTES:
        raise _no_list(file, f"more than {HEAD_BYTES:,} bytes follow the list {name} of the object")
    try:
        others = json.loads('{"": 0' + tail.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise _no_list(file, f"after the list {name}: {error}") from error
    lists = [other for other, value in others.items() if isinstance(value, list)]
    if lists:
        raise _no_list(
            file, f"an object with several lists, {name} and {lists[0]!r:.40}, wanted exactly one"
        )


def _no_list(file: InputFile, problem: str) -> SourceError:
    return SourceError(
        f"{file.place}: not one JSON list of rows: {problem}; correct it, or write one row per "
        "line as .jsonl"
    )


def _long_row(file: InputFile, stop: int, most: int) -> SourceError:
    return too_large(f"{file.place}, byte {stop:,}", "a row that is longer than that", most)


class _Edges:
    """Where the items of a list end, in consecutive blocks that begin inside it."""

    def __init__(self) -> None:
        self._depth = 0  # of brackets inside the list
        self._in_string = False
        self._is_escaped = False  # a backslash at the end of a block escapes the byte after it
        self.is_closed = False

    def find(self, block: bytes, begin: int) -> list[int]:
        """The commas between items from `begin` on, and last the bracket that closes the list.

        block   "a": [1, 2]}, {"b": 3}]          an item is open when it begins
        depth   1    2    1 0  1    0-1
        found              ^          ^
        """
        kinds: IntArray = _KINDS[np.frombuffer(block, np.uint8)[begin:]]
        at = np.flatnonzero(kinds)
        size, kinds = len(kinds), kinds[at]
        if self._is_escaped or (kinds == _ESCAPE).any():
            kinds = self._without_escaped(at, kinds, size)
        if not len(at):
            return []
        inside = (np.cumsum(kinds == _QUOTE) + self._in_string) % 2 == 1
        kinds = np.where(inside, 0, kinds)
        depths = self._depth + np.cumsum((kinds == _OPEN) * 1 - (kinds == _CLOSE))
        self._in_string, self._depth = bool(inside[-1]), int(depths[-1])
        is_end = (kinds == _COMMA) & (depths == 0)
        closing_at = np.flatnonzero(depths < 0)[:1]
        self.is_closed = len(closing_at) > 0
        is_end[closing_at] = True
        if self.is_closed:
            is_end[closing_at[0] + 1 :] = False
        found: list[int] = (at[is_end] + begin).tolist()
        return found

    def _without_escaped(self, at: IntArray, kinds: IntArray, size: int) -> IntArray:
        """The kinds, with 0 for what a backslash stands before: of a run of backslashes every
        second one is itself escaped."""
        escapes = at[kinds == _ESCAPE]
        if self._is_escaped:
            escapes = np.concatenate(([-1], escapes))
        is_first = np.diff(escapes, prepend=-2) != 1
        numbers = np.arange(len(escapes))
        firsts = escapes[np.maximum.accumulate(np.where(is_first, numbers, 0))]
        escaping = escapes[(escapes - firsts) % 2 == 0]
        self._is_escaped = bool(len(escaping)) and int(escaping[-1]) == size - 1
        return np.where(np.isin(at, escaping + 1), 0, kinds)
