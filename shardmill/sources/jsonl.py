"""JSON lines as documents: one object per line, one string of it the text.

In: `.jsonl` files, plain, `.gz` or `.zst`.  Out: documents, and a drop for each row without text.
Promise: a row whose field is null or missing is dropped as "no_text". Broken JSON or a field that
is no string is an error naming file, line and snippet, or with on_bad="skip" a drop ("bad_json",
"not_a_string"). Blank lines are not rows. A drop's id is "name.jsonl:17", the line from 1; a range
of a file gives the file's name and the line in the range. An error names the line of the file.
Not here: chats; they are read as rows (`rows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Literal, Self, TypeAlias

import numpy as np

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Cursor, Drop, TextBatch
from shardmill.sources.batching import DEFAULT_LIMITS, BatchLimits
from shardmill.sources.clean import clean, strings_to_arrow
from shardmill.sources.fields import choose_field
from shardmill.sources.files import InputFile, Where, list_files
from shardmill.sources.filesource import FileSource
from shardmill.sources.jsonline import (
    BadJsonError,
    BadRow,
    Rows,
    TextDecoder,
    bad_row,
    filled_lines,
    read_object,
)
from shardmill.sources.lineranges import LinesOfFiles
from shardmill.sources.lines import line_blocks
from shardmill.sources.naming import name_of

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")

_LOOK_BYTES = 2**16  # the first row is enough to know the fields

OnBad: TypeAlias = Literal["error", "skip"]


class JsonlSource(FileSource):
    """JSON lines files. `field=None`: "text", else the first string field of the first row."""

    def __init__(
        self,
        where: Where,
        *,
        field: str | None = None,
        on_bad: OnBad = "error",
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        if on_bad not in ("error", "skip"):
            raise OptionError(f"on_bad={on_bad!r}: wanted 'error' or 'skip'")
        files = list_files(where, suffixes=JSONL_SUFFIXES)
        reader = _JsonlReader(files, field, on_bad, limits)
        super().__init__(files, reader, name=name or name_of(where), limits=limits)


class _JsonlReader(LinesOfFiles):
    """Lines of files, whole or in ranges."""

    kind = "jsonl"
    _is_json = True

    def __init__(
        self, files: tuple[InputFile, ...], field: str | None, on_bad: OnBad, limits: BatchLimits
    ) -> None:
        self._files = files
        self._field = [] if field is None else [field]  # filled once for all copies
        self._on_bad = on_bad
        self._limits = limits

    def options(self) -> dict[str, JSON]:
        return {"field": self._resolved_field(), "on_bad": self._on_bad, **self._range_options()}

    def read(self, file: InputFile, position: JSON) -> Iterator[TextBatch]:
        decoder = TextDecoder(self._resolved_field())
        for block in self._blocks(file, position):
            rows = decoder.decode(block)
            if rows.bad and self._on_bad == "error":
                bad = rows.bad[0]
                raise bad_row_error(file, replace(bad, line=self._lines_before(file) + bad.line))
            if self._range is not None:
                # All lines are told, or the lines behind this range could not be numbered.
                yield _batch(rows, file.name, self._position(block), num_lines=len(block.stops))
            elif rows.texts or rows.bad:
                batch = _batch(rows, file.name, self._position(block))
                yield replace(batch, drops=tuple(drop.numbered(0) for drop in batch.drops))

    def settled(self) -> Self:
        reader = copy(self)
        reader._field, reader._files = [self._resolved_field()], ()
        return reader

    def _resolved_field(self) -> str:
        """The field, found once: in the first readable row of all files."""
        if not self._field:
            found = (self._field_in(file) for file in self._files)
            self._field.append(next((field for field in found if field is not None), "text"))
        return self._field[0]

    def _field_in(self, file: InputFile) -> str | None:
        limits = self._limits
        if limits.most_bytes is not None:  # the same lines are refused as when they are read
            limits = limits.refusing(max(limits.most_bytes + limits.num_bytes - _LOOK_BYTES, 1))
        limits = replace(limits, num_bytes=_LOOK_BYTES)
        for block in line_blocks(file, start=0, first_line=0, limits=limits, is_json=True):
            for number, line in filled_lines(block):
                try:
                    row = read_object(line)
                except BadJsonError as bad:
                    if self._on_bad == "error":
                        raise bad_row_error(file, bad_row(number, line, bad)) from bad
                    continue
                fields = ((key, isinstance(value, str)) for key, value in row.items())
                where = f"{file.place}, line {number + 1}"
                return choose_field(fields, wanted=None, where=where)
        return None


def _batch(rows: Rows, name: str, cursor: Cursor, *, num_lines: int = 0) -> TextBatch:
    texts, repaired = rows.texts, None
    if isinstance(texts, list):
        texts, repaired = strings_to_arrow(texts)
    if rows.repaired:
        repaired = np.zeros(len(texts), np.bool_) if repaired is None else repaired
        repaired[rows.repaired] = True
    dropped = {bad.line: bad.reason for bad in rows.bad}
    if texts.null_count:
        missing = texts.is_null().to_numpy(zero_copy_only=False)
        dropped |= {rows.lines[row]: "no_text" for row in np.flatnonzero(missing).tolist()}
        texts = texts.drop_null()
        repaired = None if repaired is None else repaired[~missing]
    cleaned = clean(texts, repaired=repaired)
    drops = (Drop(id=name, reason=dropped[line], row=line) for line in sorted(dropped))
    return TextBatch(
        texts=cleaned.texts,
        num_read=len(rows.texts) + len(rows.bad),
        counts=cleaned.counts,
        drops=tuple(drops),
        num_rows=num_lines,
        cursor=cursor,
    )


def bad_row_error(file: InputFile, bad: BadRow) -> SourceError:
    return SourceError(
        f"{file.place}, line {bad.line + 1}: {bad.problem}; found {bad.snippet!r}; "
        "mend the line, name another field=, or leave such rows out with on_bad='skip'"
    )
