"""Ranges of a plain file's bytes that own whole lines.

In: a file, and a range [start, stop) of its bytes.  Out: the lines whose first byte lies in it.
Promise: ranges that touch share no line and lose none, wherever their edges fall: a line belongs to
the range it begins in, and a range in the middle of a long line owns nothing. Reading looks at
nothing before `start - 1`, and at nothing behind the last line. Lines are counted from the first
line of the range; how many lie before it takes reading them, which only an error asks for.
Not here: what a line means. A compressed file is read from its start, so it has no ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from shardmill.errors import SourceError
from shardmill.records import JSON, Cursor
from shardmill.sources.batching import BatchLimits
from shardmill.sources.cursors import counts_of
from shardmill.sources.files import InputFile
from shardmill.sources.lines import (
    LineBlock,
    count_lines,
    is_compressed,
    line_blocks,
    read_chunks,
    stored_before,
)

_LOOK_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class LineRange:
    """Half-open; the first begins at 0, and the last stops at the end of the file."""

    start: int
    stop: int


class LinesOfFiles:
    """For readers of lines: whole files, or one range of a file. The position is the bytes and
    lines read, of the decompressed file; in a range the lines are its own, and it is named."""

    _limits: BatchLimits
    _range: LineRange | None = None
    _is_json = False  # whether a line may hold its text escaped

    @property
    def part(self) -> str:
        return "" if self._range is None else f":bytes {self._range.start}-{self._range.stop}"

    @property
    def continues(self) -> bool:
        return self._range is not None and self._range.start > 0

    def size_hint(self, file: InputFile) -> int:
        return file.num_bytes if self._range is None else self._range.stop - self._range.start

    def bytes_before(self, file: InputFile, position: JSON) -> int:
        if self._range is not None:
            return _place_in(file, self._range, position)[0] - self._range.start
        done, _ = counts_of(position, ("bytes", "lines"), file.name)
        return stored_before(file, done) if is_compressed(file) else done

    def with_limits(self, limits: BatchLimits) -> Self:
        reader = copy(self)
        reader._limits = limits
        return reader

    def settled(self) -> Self:
        return self

    def divide(self, file: InputFile) -> Sequence[Self]:  # noqa: ARG002 - of any file
        return (self.settled(),)

    def cut(self, file: InputFile, num_bytes: int) -> Sequence[Self]:
        """One reader per range, all of about one size; the file whole when it is small enough."""
        reader = self.settled()
        num_ranges = -(-file.num_bytes // num_bytes)
        if self._range is not None or num_ranges < 2 or is_compressed(file):
            return (reader,)
        edges = [number * file.num_bytes // num_ranges for number in range(num_ranges + 1)]
        return [reader._limited(*edge) for edge in pairwise(edges)]

    def _limited(self, start: int, stop: int) -> Self:
        reader = copy(self)
        reader._range = LineRange(start, stop)
        return reader

    def _range_options(self) -> dict[str, JSON]:
        """For `options`: which documents a range gives."""
        return {} if self._range is None else {"bytes": [self._range.start, self._range.stop]}

    def _blocks(self, file: InputFile, position: JSON) -> Iterator[LineBlock]:
        owned = self._range
        if owned is not None:
            return range_blocks(file, owned, position, self._limits, is_json=self._is_json)
        start, line = 0, 0
        if position is not None:
            start, line = counts_of(position, ("bytes", "lines"), file.name)
        return line_blocks(
            file, start=start, first_line=line, limits=self._limits, is_json=self._is_json
        )

    def _position(self, block: LineBlock) -> Cursor:
        """Behind a block."""
        place: Cursor = {"bytes": block.end, "lines": block.first_line + len(block.stops)}
        if self._range is not None:
            place |= {"start": self._range.start, "stop": self._range.stop}
        return place

    def _lines_before(self, file: InputFile) -> int:
        """Lines of the file before the first that is read. Reads them all."""
        return 0 if self._range is None else lines_before(file, self._range)


def range_blocks(
    file: InputFile, owned: LineRange, position: JSON, limits: BatchLimits, *, is_json: bool
) -> Iterator[LineBlock]:
    """Blocks of the lines that a range owns, from `position` on (None: the first)."""
    if position is None:
        start, line = line_start(file, owned), 0
    else:
        start, line = _place_in(file, owned, position)
    if start is None or start >= owned.stop:
        return iter(())
    return line_blocks(
        file, start=start, first_line=line, limits=limits, stop=owned.stop, is_json=is_json
    )


def _place_in(file: InputFile, owned: LineRange, position: JSON) -> tuple[int, int]:
    keys = ("bytes", "lines", "start", "stop")
    start, line, *named = counts_of(position, keys, file.name)
    if named != [owned.start, owned.stop] or start < owned.start:
        raise SourceError(
            f"{file.place}: the cursor {position!r:.200} stands in another range than bytes "
            f"{owned.start:,} to {owned.stop:,}; resume with the piece the cursor came from"
        )
    return start, line


def line_start(file: InputFile, owned: LineRange) -> int | None:
    """Where the first line begins that begins in a range; None when none does."""
    if owned.start == 0:
        return 0
    place, last = owned.start - 1, owned.stop - 1
    with closing(read_chunks(file, place, _LOOK_BYTES, owned.stop)) as chunks:
        for chunk in chunks:
            # A newline on the last byte begins a line behind the range.
            found = chunk.find(b"\n", 0, last - place)
            if found >= 0:
                return place + found + 1
            place += len(chunk)
            if place >= last:
                break
    return None


def lines_before(file: InputFile, owned: LineRange) -> int:
    """Lines of the file before the first of a range that owns one."""
    return count_lines(file, line_start(file, owned) or 0)
