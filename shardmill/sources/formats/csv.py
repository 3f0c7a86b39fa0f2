"""CSV and TSV files with a header: each record is a row, every value is text.

A file is read in blocks of whole records, which Arrow parses. Where a record ends depends on the
quotes before it, so a file is one piece, and reading begins only where a block did: a position is
that byte, and how many rows of the block are done. A record that is longer than a block arrives
whole, or is refused before it is read to its end when the limits forbid it. Blank lines are no
rows. A record with more or fewer values than the header is a bad row, `wrong_columns`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from shardmill.errors import SourceError
from shardmill.records import JSON, IntArray
from shardmill.sources.batches import (
    BOM_BYTES,
    DEFAULT_LIMITS,
    BatchLimits,
    counts_of,
    cut,
    row_bytes,
    too_large,
)
from shardmill.sources.formats.jsonl import OnBad, check_on_bad
from shardmill.sources.formats.lines import codec_of, read_chunks, stored_before
from shardmill.sources.source import BadRowError, FileSource, RowLocation, RowTable, TableFormat
from shardmill.storage.files import Endings, InputFile, Where, packed

_QUOTE, _NEWLINE = b'"\n'
_HEADER_BYTES = 2**16
_POSITION = ("bytes", "skip", "rows")


class _Block(NamedTuple):
    data: bytes  # whole records
    start: int  # where they begin in the (decompressed) file
    stop: int


class _Header(NamedTuple):
    names: list[str]
    stop: int  # where the first record begins


@dataclass(frozen=True, kw_only=True)
class CsvFormat(TableFormat):
    """Values that commas part. A position is the byte where a block begins, how many of its rows
    are done, and how many rows there are before."""

    kind = "csv"
    endings = packed(".csv")
    delimiter: ClassVar[str] = ","

    field: str | None = None  # None: "text"
    on_bad: OnBad = "error"

    def options(self) -> dict[str, JSON]:
        return {"field": self.field, "on_bad": self.on_bad}

    def settled(self, files: Sequence[InputFile], limits: BatchLimits, /) -> Self:
        """With the column named "text". Another is not chosen: where the header is missing, the
        first record would be taken for it."""
        if self.field is None:
            for file in files:
                header = self._header(file, limits)
                if header is not None:
                    self._column(file, header, "text")
                    break
        return replace(self, field=self.field or "text")

    def bytes_before(self, file: InputFile, position: JSON, /) -> int:
        done = counts_of(position, _POSITION, file.name)[0]
        codec = codec_of(file)
        return done if codec is None else stored_before(file, codec, done)

    def tables(
        self,
        file: InputFile,
        position: JSON,
        limits: BatchLimits,
        columns: Sequence[str] | None,
        /,
    ) -> Iterator[RowTable]:
        header = self._header(file, limits)
        if header is None:
            return
        start, skip, row = header.stop, 0, 0
        if position is not None:
            start, skip, row = counts_of(position, _POSITION, file.name)
        wanted = [name for name in header.names if columns is None or name in columns]
        if columns is None and len(set(header.names)) < len(header.names):
            twice = max(header.names, key=header.names.count)
            raise SourceError(f"{file.place}: two columns {twice!r:.60}; rename one of them")
        for name in wanted:
            self._column(file, header, name)
        if self.field is not None and columns is not None and self.field in columns:
            self._column(file, header, self.field)
        for block in self._blocks(file, start, limits):
            rows, bad = self._parsed(file, block, header.names, wanted)
            done, skip = min(skip, rows.num_rows), max(skip - rows.num_rows, 0)
            for first, stop in cut(row_bytes(rows)[done:], limits):
                first, stop = done + first, done + stop
                is_last = stop == rows.num_rows
                after: JSON = {
                    "bytes": block.stop if is_last else block.start,
                    "skip": 0 if is_last else stop,
                    "rows": row + stop - first,
                }
                mine = tuple((number - first, why) for number, why in bad if first <= number < stop)
                yield RowTable(rows.slice(first, stop - first), after, row, mine)
                row += stop - first
        if skip:
            raise SourceError(
                f"{file.place}: the cursor is {skip:,} rows after the last one; resume with the "
                "input the cursor came from"
            )

    def locate(
        self, file: InputFile, _before: JSON, after: JSON, _rows_before: int | None, /
    ) -> RowLocation:
        row = counts_of(after, _POSITION, file.name)[2] - 1
        return RowLocation(id=self.drop_of(file, row, "").id, file=file.name, row=row)

    def schema_of(self, file: InputFile) -> pa.Schema | None:
        header = self._header(file, DEFAULT_LIMITS)
        if header is None:
            return None
        return pa.schema([(name, pa.large_string()) for name in header.names])

    def _header(self, file: InputFile, limits: BatchLimits) -> _Header | None:
        """The names in the first record; None for an empty file."""
        scanner, most = _RecordScanner(self.delimiter), limits.most_input()
        data, stop = b"", 0
        with closing(read_chunks(file, 0, _HEADER_BYTES)) as chunks:
            for chunk in chunks:
                ends = scanner.ends(chunk)
                if len(ends):
                    stop = len(data) + int(ends[0])
                data += chunk
                if stop:
                    break
                if most is not None and len(data) > most:
                    raise too_large(str(file.place), "a header that is longer than that", most)
        record = data[: stop or len(data)].removeprefix(BOM_BYTES)
        if not record.strip():
            if not data[stop:].strip():
                return None
            raise SourceError(
                f"{file.place}: begins with a blank line; wanted a header, the names of the "
                "columns, in the first line"
            )
        lines = io.StringIO(record.decode("utf-8", "replace"), newline="")
        return _Header(next(csv.reader(lines, delimiter=self.delimiter)), stop or len(data))

    def _column(self, file: InputFile, header: _Header, name: str) -> None:
        if header.names.count(name) != 1:
            listed = ", ".join(f"{one!r:.40}" for one in header.names[:12])
            more = f" and {len(header.names) - 12:,} more" if len(header.names) > 12 else ""
            raise SourceError(
                f"{file.place}: {header.names.count(name) or 'no'} columns {name!r} in the header; "
                f"found {listed}{more}; name the column that holds the documents with {{field}}; a "
                "file without a header needs one as its first line",
                field=...,
            )

    def _blocks(self, file: InputFile, start: int, limits: BatchLimits) -> Iterator[_Block]:
        """Whole records from byte `start` on, each block up to the record that reaches the next
        multiple of a size: so where one ends depends on the file and not on where reading began."""
        most = limits.most_input()
        cell = limits.num_bytes - limits.num_bytes // 16
        scanner, pending, size = _RecordScanner(self.delimiter), [b""], 0
        with closing(read_chunks(file, start, max(cell // 8, 1))) as chunks:
            for chunk in chunks:
                ends, offset = scanner.ends(chunk), 0
                while True:
                    least = max(cell - start % cell - size, 1) + offset
                    at = int(np.searchsorted(ends, least))
                    if at == len(ends):
                        break
                    pending.append(chunk[offset : ends[at]])
                    offset, data = int(ends[at]), b"".join(pending)
                    pending, size = [], 0
                    yield _Block(data, start, start + len(data))
                    start += len(data)
                    del data
                pending.append(chunk[offset:])
                size += len(chunk) - offset
                if most is not None and size > most:
                    found = f"{size:,} bytes and no end of the record"
                    raise too_large(f"{file.place}, byte {start:,}", found, most)
        if scanner.in_quotes:
            raise SourceError(
                f"{file.place}: the last quoted value has no closing quote (somewhere after byte "
                f"{start:,}); correct the file, or read it line by line as text"
            )
        data = b"".join(pending)
        if data.strip(b"\r\n"):
            yield _Block(data, start, start + len(data))

    def _parsed(
        self, file: InputFile, block: _Block, names: list[str], wanted: list[str]
    ) -> tuple[pa.RecordBatch, list[tuple[int, BadRowError]]]:
        """The rows of a block, bad ones null."""
        labels = [str(number) for number in range(len(names))]  # unlike names, each there once
        chosen = [labels[names.index(name)] for name in wanted]
        bad: list[tuple[int, BadRowError]] = []
        try:
            table = self._read(block.data, labels, chosen)
            columns = [table.column(label).combine_chunks() for label in chosen]
        except pa.ArrowInvalid:
            # Arrow hands bad rows over as UTF-8, which they may not be; Latin-1 holds any byte.
            data = block.data.decode("latin-1").encode()
            try:
                table = self._read(data, labels, chosen, bad)
            except pa.ArrowInvalid as error:
                raise self._unreadable(file, block.start, error) from error
            columns = [_from_latin(table.column(label), bad) for label in chosen]
        num_rows = table.num_rows + len(bad)
        if not columns:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([]))), bad
        return pa.RecordBatch.from_arrays(columns, wanted), bad

    def _read(
        self,
        data: bytes,
        labels: list[str],
        chosen: list[str],
        bad: list[tuple[int, BadRowError]] | None = None,
    ) -> pa.Table:
        """The chosen columns; bad rows are an error, or are left out and added to `bad`."""

        def skip(row: pc.InvalidRow) -> str:
            assert bad is not None, "only then this is called"
            problem = f"{row.actual_columns} values, but the header names {row.expected_columns}"
            bad.append((row.number - 1, BadRowError("wrong_columns", problem)))
            return "skip"

        return pc.read_csv(
            pa.BufferReader(data),
            pc.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=labels),
            pc.ParseOptions(
                delimiter=self.delimiter,
                newlines_in_values=True,
                invalid_row_handler=None if bad is None else skip,
            ),
            pc.ConvertOptions(
                check_utf8=False,
                include_columns=chosen or labels[:1],
                column_types=dict.fromkeys(labels, pa.large_string()),
            ),
        )

    def _unreadable(self, file: InputFile, start: int, error: Exception) -> SourceError:
        return SourceError(
            f"{file.place}, from byte {start:,} on: not readable as {self.kind.upper()} ({error}); "
            "correct the file, or write it again"
        )


def _from_latin(column: pa.ChunkedArray, bad: list[tuple[int, BadRowError]]) -> pa.Array:
    """The bytes that were taken for Latin-1 as strings, and nulls where bad rows were."""
    values: list[bytes | None] = [text.encode("latin-1") for text in column.to_pylist()]
    for number, _ in bad:  # ascending
        values.insert(number, None)
    found = pa.array(values, pa.large_binary())
    return pa.Array.from_buffers(pa.large_string(), len(found), found.buffers())


class _RecordScanner:
    r"""Where records end, in consecutive chunks of a file from the start of a record on.

    A quote is one only where a value begins; in a quoted value two are one of its characters:

        a,"b\n""c"" d",5" pipe\n      the first newline is part of a value, the last quote is text

    Where every opening quote follows a delimiter, a line's end or a quote, each quote changes
    between inside and outside, and a newline ends a record where their number is even. A chunk with
    any other quote is read value by value.
    """

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter.encode()
        self._stops = re.compile(b"[\r\n" + re.escape(self._delimiter) + b"]")
        self._starts = np.frombuffer(self._delimiter + b'\r\n"', np.uint8)
        self._state = "start"  # of a value; or in "plain" or "quoted" ones, or after a "quote"
        self._last = _NEWLINE  # the byte before the chunk

    @property
    def in_quotes(self) -> bool:
        return self._state == "quoted"

    def ends(self, chunk: bytes) -> IntArray:
        """The offsets after each record that ends in the chunk."""
        data = np.frombuffer(chunk, np.uint8)
        found = np.flatnonzero(data == _NEWLINE)
        quotes = np.flatnonzero(data == _QUOTE) if b'"' in chunk else found[:0]
        num_open = int(self.in_quotes)
        if len(quotes):
            opening = quotes[num_open::2]
            before = np.where(opening > 0, data[opening - 1], self._last)
            odd = self._state == "plain" and self._last == _QUOTE
            if odd or not np.isin(before, self._starts).all():
                return self._ends_by_value(chunk)
        inside = (np.searchsorted(quotes, found) + num_open) % 2 == 1
        self._last = int(data[-1])
        if (len(quotes) + num_open) % 2:
            self._state = "quoted"
        elif self._last == _QUOTE and len(quotes):
            self._state = "quote"
        else:
            self._state = "start" if self._last in self._starts.tolist() else "plain"
        outside: IntArray = found[~inside] + 1
        return outside

    def _ends_by_value(self, chunk: bytes) -> IntArray:
        found: list[int] = []
        at, state, size = 0, self._state, len(chunk)
        while at < size:
            if state == "quoted":
                at = chunk.find(b'"', at) + 1
                if not at:
                    break
                state = "quote"
            elif state == "plain":
                match = self._stops.search(chunk, at)
                if match is None:
                    break
                at, state = match.end(), "start"
                if match[0] == b"\n":
                    found.append(at)
            else:
                is_quote = chunk[at] == _QUOTE
                at += is_quote
                state = "quoted" if is_quote else "plain"
        self._state, self._last = state, chunk[-1]
        return np.array(found, np.int64)


@dataclass(frozen=True, kw_only=True)
class TsvFormat(CsvFormat):
    """Values that tabs part, with the quotes of CSV."""

    kind = "tsv"
    endings = packed(".tsv")
    delimiter: ClassVar[str] = "\t"


class CsvSource(FileSource):
    """CSV files with a header. `field=None`: the column "text"."""

    format: ClassVar[type[CsvFormat]] = CsvFormat

    def __init__(
        self,
        where: Where,
        *,
        field: str | None = None,
        on_bad: OnBad = "error",
        ext: Endings = None,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        check_on_bad(on_bad)
        format = self.format(field=field, on_bad=on_bad)
        super().__init__(where, format, ext=ext, name=name, limits=limits)


class TsvSource(CsvSource):
    """As `CsvSource`, of values that tabs part."""

    format = TsvFormat
