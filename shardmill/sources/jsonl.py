"""JSON lines as documents: one object per line, one string of it the text.

In: `.jsonl` files, plain, `.gz` or `.zst`.  Out: documents, and a drop for each row without text.
Promise: a row whose field is null or missing is dropped as "no_text". Broken JSON or a field that
is no string is an error naming file, line and snippet, or with on_bad="skip" a drop ("bad_json",
"not_a_string"). Blank lines are not rows. A drop's id is "name.jsonl:17", the line from 1.
Not here: chats; they are read as rows (`rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Drop, TextBatch
from shardmill.sources.batching import DEFAULT_LIMITS, BatchLimits
from shardmill.sources.clean import clean, strings_to_arrow
from shardmill.sources.cursors import counts_of
from shardmill.sources.fields import choose_field
from shardmill.sources.files import InputFile, Where, list_files
from shardmill.sources.filesource import FileReader, FileSource
from shardmill.sources.jsonline import (
    BadJsonError,
    BadRow,
    Rows,
    TextDecoder,
    bad_row,
    filled_lines,
    read_object,
)
from shardmill.sources.lines import LineBlock, line_blocks
from shardmill.sources.naming import name_of

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")

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


class _JsonlReader:
    """The position is the bytes and lines read, of the decompressed file."""

    kind = "jsonl"
    part = ""

    def __init__(
        self, files: tuple[InputFile, ...], field: str | None, on_bad: OnBad, limits: BatchLimits
    ) -> None:
        self._files = files
        self._field = field
        self._on_bad = on_bad
        self._limits = limits

    def options(self) -> dict[str, JSON]:
        return {"field": self._resolved_field(), "on_bad": self._on_bad}

    def size_hint(self, file: InputFile) -> int:
        return file.num_bytes

    def read(self, file: InputFile, position: JSON) -> Iterator[TextBatch]:
        start, line = 0, 0
        if position is not None:
            start, line = counts_of(position, ("bytes", "lines"), file.name)
        decoder = TextDecoder(self._resolved_field())
        for block in line_blocks(file, start=start, first_line=line, limits=self._limits):
            rows = decoder.decode(block)
            if rows.bad and self._on_bad == "error":
                raise bad_row_error(file, rows.bad[0])
            if rows.texts or rows.bad:
                yield _batch(rows, block, file.name)

    def settled(self) -> FileReader:
        return _JsonlReader((), self._resolved_field(), self._on_bad, self._limits)

    def divide(self, file: InputFile) -> Sequence[FileReader]:  # noqa: ARG002 - of any file
        return (self.settled(),)

    def _resolved_field(self) -> str:
        """The field, found once: in the first readable row of all files."""
        if self._field is None:
            found = (self._field_in(file) for file in self._files)
            self._field = next((field for field in found if field is not None), "text")
        return self._field

    def _field_in(self, file: InputFile) -> str | None:
        for block in line_blocks(file, start=0, first_line=0, limits=self._limits):
            for number, line in filled_lines(block):
                try:
                    row = read_object(line)
                except BadJsonError as bad:
                    if self._on_bad == "error":
                        raise bad_row_error(file, bad_row(number, line, bad)) from bad
                    continue
                fields = ((key, isinstance(value, str)) for key, value in row.items())
                where = f"{file.path}, line {number + 1}"
                return choose_field(fields, wanted=None, where=where)
        return None


def _batch(rows: Rows, block: LineBlock, name: str) -> TextBatch:
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
    drops = (Drop(id=f"{name}:{line + 1}", reason=dropped[line]) for line in sorted(dropped))
    return TextBatch(
        texts=cleaned.texts,
        num_read=len(rows.texts) + len(rows.bad),
        counts=cleaned.counts,
        drops=tuple(drops),
        cursor={"bytes": block.end, "lines": block.first_line + len(block.stops)},
    )


def bad_row_error(file: InputFile, bad: BadRow) -> SourceError:
    return SourceError(
        f"{file.path}, line {bad.line + 1}: {bad.problem}; found {bad.snippet!r}; "
        "mend the line, name another field=, or leave such rows out with on_bad='skip'"
    )
