"""Arrow IPC files (Feather), in file or stream form, and folders of `datasets.save_to_disk`.

Record batches are read one at a time, and of a file in file form only the wanted columns and the
wanted batches. The stream form, and any compressed file, is read from its start. Nothing is
memory-mapped: a file that is cut short under a reader is an error, not a crash. Rows count from 1,
as lines do, through the whole file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import pyarrow as pa

from shardmill.errors import SourceError
from shardmill.records import JSON, Drop
from shardmill.sources.batches import (
    DEFAULT_LIMITS,
    BatchLimits,
    choose_field,
    counts_of,
    cut,
    is_text_type,
    row_bytes,
    to_binary,
)
from shardmill.sources.formats.jsonl import own_id
from shardmill.sources.formats.lines import ChunkStream, codec_of
from shardmill.sources.formats.parquet import without_nulls
from shardmill.sources.source import FileSource, InputRow, RowLocation, RowTable, TableFormat
from shardmill.storage.files import Endings, InputFile, Where, open_file, packed
from shardmill.storage.object_store import open_object
from shardmill.storage.ranges import Range

_MAGIC = b"ARROW1"
_STREAM_START = 8  # the stream form begins here in a file of the other form
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_SAVED, _SAVED_DICT = "state.json", "dataset_dict.json"


class _OpenArrow:
    """An open file, and its record batches by number."""

    def __init__(self, file: InputFile, stack: ExitStack, columns: Sequence[str] | None) -> None:
        self.file = file
        self._stream: ChunkStream | None = None
        with open_file(file) as raw:
            is_file_form = codec_of(file) is None and raw.read(len(_MAGIC)) == _MAGIC
        opened: Any = self._open(stack, is_file_form=is_file_form)
        self.schema: pa.Schema = opened.schema
        names = self.schema.names
        self.wanted = [n for n, name in enumerate(names) if columns is None or name in columns]
        if is_file_form and len(self.wanted) < len(names):
            included = pa.ipc.IpcReadOptions(included_fields=self.wanted or [0], use_threads=False)
            opened = self._open(stack, is_file_form=True, options=included)
        self._reader = opened
        self.num_batches: int | None = opened.num_record_batches if is_file_form else None

    def _open(self, stack: ExitStack, *, is_file_form: bool, options: Any = None) -> Any:
        options = options or pa.ipc.IpcReadOptions(use_threads=False)
        place = self.file.place
        if is_file_form:
            raw: Any = None
            if isinstance(place, Path):
                raw = pa.OSFile(str(place))
            else:
                raw = pa.PythonFile(open_object(place, self.file.num_bytes), mode="r")
            return pa.ipc.open_file(stack.enter_context(raw), options=options)
        stream = ChunkStream(self.file)
        stack.callback(stream.close)
        start = stream.read(_STREAM_START)
        if start[: len(_MAGIC)] != _MAGIC:
            stream = ChunkStream(self.file)
            stack.callback(stream.close)
        self._stream = stream
        return pa.ipc.open_stream(pa.PythonFile(cast(Any, stream), mode="r"), options=options)

    def batches(self, first: int, stop: int | None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Each record batch with its number; only the wanted columns, in the order of the file."""
        if self.num_batches is not None:
            for number in range(first, self.num_batches if stop is None else stop):
                yield number, self._chosen(self._reader.get_batch(number))
            return
        for number, batch in enumerate(self._reader):
            if number >= first:
                yield number, self._chosen(batch)
        stream = self._stream
        assert stream is not None, "a file in stream form"
        if not stream.tail.endswith(_STREAM_END):
            raise EOFError("it ends without the mark of its end, so it is truncated")
        while stream.read(2**20):  # a compressed file may be damaged here
            pass

    def _chosen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_columns == len(self.schema.names):
            batch = batch.select(self.wanted)
        elif not self.wanted:
            batch = batch.select([])
        for column in batch.columns:
            # Numbers in a damaged or hostile file may lead outside its buffers. Bytes that are not
            # UTF-8 pass: cleaning finds them.
            plain = to_binary(column) if _is_plain_string(column.type) else column
            plain.validate(full=True)
        return batch

    @property
    def bytes_read(self) -> int:
        return self.file.num_bytes if self._stream is None else self._stream.position


def _is_plain_string(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string())


@contextmanager
def _open_arrow(file: InputFile, columns: Sequence[str] | None = None) -> Iterator[_OpenArrow]:
    try:
        with ExitStack() as stack:
            yield _OpenArrow(file, stack, columns)
    except (pa.ArrowException, UnicodeDecodeError, EOFError, OSError, ValueError) as error:
        if isinstance(error, SourceError) or (
            isinstance(error, OSError) and (type(error) is not OSError or error.errno)
        ):
            raise
        raise SourceError(
            f"{file.place}: not a readable Arrow file ({error}); fetch or write it again"
        ) from error


@dataclass(frozen=True, kw_only=True)
class ArrowFormat(TableFormat):
    """Arrow IPC. A position is a record batch, how many of its rows were read, and how many rows
    of the file or range in all; in a range, that too."""

    kind = "arrow"
    endings = (*packed(".arrow"), *packed(".feather"))

    field: str | None = None
    range: Range | None = None  # only these record batches, half-open; None: all
    num_batches: int = 0  # of the whole file, where there is a range

    @property
    def range_name(self) -> str:
        return "" if self.range is None else ":record batches {} to {}".format(*self.range)

    @property
    def continues(self) -> bool:
        return self.range is not None and self.range[0] > 0

    @classmethod
    def in_folder(cls) -> tuple[str, ...]:
        return (*cls.endings, _SAVED, _SAVED_DICT)

    @classmethod
    def of_folder(cls, files: tuple[InputFile, ...], /) -> tuple[InputFile, ...]:
        return saved_files(files)

    def options(self) -> dict[str, JSON]:
        ranged: dict[str, JSON] = {} if self.range is None else {"batches": list(self.range)}
        return {"field": self.field, **ranged}

    def settled(self, files: Sequence[InputFile], _limits: BatchLimits, /) -> Self:
        """With a column that is in the first file."""
        first = files[0]
        with _open_arrow(first) as opened:
            known = [(one.name, is_text_type(one.type, or_bytes=False)) for one in opened.schema]
        return replace(self, field=choose_field(known, wanted=self.field, where=str(first.place)))

    def size_hint(self, file: InputFile) -> int:
        if self.range is None:
            return file.num_bytes
        return file.num_bytes * (self.range[1] - self.range[0]) // max(self.num_batches, 1)

    def bytes_before(self, file: InputFile, position: JSON, /) -> int:
        first, rows, _ = self._counts(file, position)
        with _open_arrow(file) as opened:
            if opened.num_batches is None:
                for number, _batch in opened.batches(0, None):
                    if number >= first - (rows == 0):
                        break
                return opened.bytes_read
            done = first - (0 if self.range is None else self.range[0])
            return file.num_bytes * done // max(opened.num_batches, 1)

    def rows_before(self, file: InputFile, /) -> int:
        if self.range is None:
            return 0
        with _open_arrow(file) as opened:
            return sum(batch.num_rows for _, batch in opened.batches(0, self.range[0]))

    def split(self, file: InputFile, num_bytes: int | None, /) -> Sequence[Self]:
        """Runs of record batches of a file in file form, all of about one number."""
        is_cut = self.range is None and codec_of(file) is None
        if num_bytes is None or num_bytes >= file.num_bytes or not is_cut:
            return (self,)
        with _open_arrow(file) as opened:
            count = opened.num_batches or 1
        parts = min(count, -(-file.num_bytes // num_bytes))
        if parts < 2:
            return (self,)
        edges = [number * count // parts for number in range(parts + 1)]
        return [replace(self, range=found, num_batches=count) for found in pairwise(edges)]

    @property
    def counts_rows(self) -> bool:
        return self.range is not None

    def drop_of(self, file: InputFile, row: int, reason: str) -> Drop:
        drop = Drop(id=file.name, reason=reason, row=row)
        return drop.numbered(0) if self.range is None else drop

    def schema_of(self, file: InputFile) -> pa.Schema:
        with _open_arrow(file) as opened:
            return opened.schema

    def tables(
        self,
        file: InputFile,
        position: JSON,
        limits: BatchLimits,
        columns: Sequence[str] | None,
        /,
    ) -> Iterator[RowTable]:
        first, skip, row = self._counts(file, position)
        stop = None if self.range is None else self.range[1]
        with _open_arrow(file, columns) as opened:
            self._check(file, opened, first, columns)
            for number, batch in opened.batches(first, stop):
                if skip > batch.num_rows:
                    raise _past_the_end(file, number, skip)
                for start, end in cut(row_bytes(batch)[skip:], limits):
                    rows = batch.slice(skip + start, end - start)
                    is_last = skip + end == batch.num_rows
                    place = (number + 1, 0) if is_last else (number, skip + end)
                    after = self._position(*place, row + end - start)
                    yield RowTable(rows, after, row, ())
                    row += end - start
                skip = 0
        if skip:
            raise _past_the_end(file, first, skip)

    def rows(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[InputRow]:
        """Whole rows; what Arrow fills in counts as absent, as in Parquet files."""
        for row in super().rows(file, position, limits):
            assert isinstance(row.value, dict)
            yield row._replace(value=without_nulls(row.value))

    def locate(
        self, file: InputFile, _before: JSON, after: JSON, rows_before: int | None, /
    ) -> RowLocation:
        number, rows, row = self._counts(file, after)
        if self.range is not None:
            row += self.rows_before(file) if rows_before is None else rows_before
        number, rows = (number, rows) if rows else (number - 1, 0)
        own = None
        with _open_arrow(file, ["id"]) as opened:
            if opened.wanted:
                _, batch = next(opened.batches(number, number + 1))
                own = own_id(batch.column(0)[rows - 1].as_py())
        return RowLocation(id=f"{file.name}:{row}", file=file.name, row=row, own_id=own)

    def _check(
        self, file: InputFile, opened: _OpenArrow, first: int, columns: Sequence[str] | None
    ) -> None:
        """Refuse a position after the end, and a column that is missing, there twice or no text."""
        if opened.num_batches is not None:
            last = opened.num_batches if self.range is None else self.range[1]
            if first > last or last > opened.num_batches:
                raise _past_the_end(file, first, 0)
        names = opened.schema.names
        if len(set(names)) < len(names) and columns is None:
            twice = max(names, key=names.count)
            raise SourceError(f"{file.place}: two columns {twice!r:.60}; rename one of them")
        if columns is None or self.field not in columns:
            return
        kinds = [one.type for one in opened.schema if one.name == self.field]
        if len(kinds) != 1:
            listed = ", ".join(map(repr, names))
            raise SourceError(
                f"{file.place}: {len(kinds)} columns {self.field!r}, wanted one; found {listed}"
            )
        if not is_text_type(kinds[0]) and not pa.types.is_null(kinds[0]):
            raise SourceError(
                f"{file.place}: the column {self.field!r} holds {kinds[0]}, wanted strings or "
                "bytes; name another with {field}",
                field=...,
            )

    def _position(self, batch: int, rows: int, row: int) -> dict[str, JSON]:
        position: dict[str, JSON] = {"batch": batch, "rows": rows, "row": row}
        if self.range is not None:
            position |= {"start": self.range[0], "stop": self.range[1]}
        return position

    def _counts(self, file: InputFile, position: JSON) -> tuple[int, int, int]:
        if position is None:
            return 0 if self.range is None else self.range[0], 0, 0
        if self.range is None:
            batch, rows, row = counts_of(position, ("batch", "rows", "row"), file.name)
            return batch, rows, row
        keys = ("batch", "rows", "row", "start", "stop")
        batch, rows, row, *named = counts_of(position, keys, file.name)
        if tuple(named) != tuple(self.range):
            raise SourceError(
                f"{file.place}: the cursor {position!r:.200} is of another range than record "
                f"batches {self.range[0]:,} to {self.range[1]:,}; resume with the piece the cursor "
                "came from"
            )
        return batch, rows, row


def _past_the_end(file: InputFile, batch: int, rows: int) -> SourceError:
    return SourceError(
        f"{file.place}: the cursor is at row {rows:,} of record batch {batch:,}, which is not "
        "there; resume with the input the cursor came from"
    )


class _DataFile(msgspec.Struct):
    filename: str


class _SavedState(msgspec.Struct):
    """What is used of the state.json of `datasets.save_to_disk`."""

    data_files: list[_DataFile] = msgspec.field(name="_data_files")
    indices: list[Any] | None = msgspec.field(default=None, name="_indices_data_files")


def saved_files(files: tuple[InputFile, ...]) -> tuple[InputFile, ...]:
    """Of the files of a folder, those with data; of a saved dataset those that its state.json
    lists, in that order. Of a saved dict of datasets one must be named."""
    states = [file for file in files if _base(file.name) in (_SAVED, _SAVED_DICT)]
    if not states or len(states) == len(files) == 1:
        return files
    if len(states) > 1:
        folders = sorted({file.name.rpartition("/")[0] for file in states} - {""})
        place = str(states[0].place).removesuffix(states[0].name).rstrip("/")
        raise SourceError(
            f"{place}: saved by datasets as several splits; name the folder of one of them: "
            f"{', '.join(f'{place}/{folder}' for folder in folders)}"
        )
    (state,) = states
    try:
        with open_file(state) as stream:
            found = msgspec.json.decode(bytes(stream.read()), type=_SavedState)
    except msgspec.MsgspecError as error:
        raise SourceError(
            f"{state.place}: not the state of a saved dataset ({error}); name the .arrow files "
            "instead, with a glob"
        ) from error
    if found.indices:
        raise SourceError(
            f"{state.place}: the rows are in another order than in the files; save the dataset "
            "again, after flatten_indices()"
        )
    folder = state.name.removesuffix(_SAVED)
    known = {file.name: file for file in files}
    names = [folder + one.filename for one in found.data_files]
    missing = [name for name in names if name not in known]
    if missing:
        raise SourceError(f"{state.place}: lists {missing[0]!r}, which is not there; copy it too")
    return tuple(known[name] for name in names)


def is_saved(names: Sequence[str]) -> bool:
    """Whether these are the files of a saved dataset, or of a dict of them."""
    return any(_base(name) in (_SAVED, _SAVED_DICT) for name in names) and any(
        name.endswith(".arrow") for name in names
    )


def _base(name: str) -> str:
    return name.rpartition("/")[2]


class ArrowSource(FileSource):
    """Arrow IPC files. `field=None`: "text", else the first string column of the first file."""

    def __init__(
        self,
        where: Where,
        *,
        field: str | None = None,
        ext: Endings = None,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(where, ArrowFormat(field=field), ext=ext, name=name, limits=limits)
