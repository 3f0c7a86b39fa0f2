"""Sources made of files, and sources joined one after the other.

A `Format` reads one kind of file, whole or a range of it. A `FileSource` is a list of files and
their format; its cursor is the file and the position in it, so a fresh source continues exactly
there. Both kinds of source can be divided and cut into pieces that other processes read, and can
find the row of a document again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
    cast,
    runtime_checkable,
)

import pyarrow as pa

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import CuttableSource, DividedSource, Source
from shardmill.records import JSON, Cursor, Drop, TextBatch
from shardmill.sources.batches import (
    BatchLimits,
    NamedSource,
    coalesce,
    fields_of,
    limited,
    make_batch,
    name_of,
    null_rows,
    python_values,
    runs,
    stamp_of,
    to_binary,
)
from shardmill.storage.files import (
    Endings,
    InputFile,
    Where,
    check_unchanged,
    fingerprint_files,
    list_files,
    stamp_of_file,
)
from shardmill.storage.hub import HubFile

if TYPE_CHECKING:
    from shardmill.sources.mapping import RowMapping

_T = TypeVar("_T")
_Reader = TypeVar("_Reader", bound="FileReader")
_LOOK_THREADS = 8
_STEP = 64  # rows that are passed at a time to find one: one alone costs nearly as much


class BadRowError(Exception):
    """Why a row gives no document or conversation. Only used inside this package: it becomes a
    `SourceError`, or a drop with this `reason`."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


class LeftOutError(BadRowError):
    """Why a row is left out on purpose, whatever is said about bad rows."""


class InputRow(NamedTuple):
    """One whole row of a file or dataset."""

    value: Any  # a dict; BadRowError; None: only rows that were passed, none to read. What a user's
    # function makes of a row may be a string
    id: str  # "chats.jsonl:17", as its drop is named
    position: JSON | Callable[[], JSON]  # after this row; a function where it is costly to make
    repaired: bool = False  # whether something in it was not text and was replaced
    row: int | None = None  # as of a `Drop`
    num_rows: int = 0  # this one and blank ones before it, where `row` is set


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLocation:
    """Where a document was found."""

    id: str  # "pages.jsonl:17", "part.parquet:row 40", "notes.txt"; as dropped rows are named
    file: str | None = None  # its name among the inputs; None: it is in no file
    row: int | None = None  # lines count from 1, rows of Parquet and of a hub dataset from 0
    own_id: str | None = None  # the row's own field "id"


class FileReader:
    """Reads whole files, or the one range of a file that `split` gave it. A position is where in a
    file to continue, as JSON that only the reader understands."""

    @property
    def range_name(self) -> str:
        """The range it reads, to be appended to a name; "" for whole files."""
        return ""

    @property
    def continues(self) -> bool:
        """Whether rows are counted on from the range before; see `CuttableSource`."""
        return False

    def rows_before(self, _file: Any, /) -> int:
        """Rows of the file before the range, where they are not known. Reads them all."""
        return 0

    def size_hint(self, file: Any) -> int | None:
        """About how many bytes of input the file or the range holds; None when unknown."""
        return int(file.num_bytes)

    def split(self, _file: Any, _num_bytes: int | None, /) -> Sequence[Self]:
        """Readers of consecutive ranges of a file, each of about `_num_bytes`; None: the smallest
        ranges that can be found without reading the file."""
        return (self,)


class RowFormat(FileReader, ABC):
    """A format that reads whole rows, for conversations."""

    @abstractmethod
    def rows(self, file: Any, position: JSON, limits: BatchLimits, /) -> Iterator[InputRow]:
        """Rows from `position` on (None: the start)."""


class Format(FileReader, ABC):
    """How one kind of file is read, with the options that were chosen."""

    kind: ClassVar[str]  # stored in manifests
    endings: ClassVar[tuple[str, ...]]

    @classmethod
    def in_folder(cls) -> tuple[str, ...]:
        """Endings of the files that are listed in a folder."""
        return cls.endings

    @classmethod
    def of_folder(cls, files: tuple[InputFile, ...], /) -> tuple[InputFile, ...]:
        """Those of the listed files that hold data."""
        return files

    def settled(self, _files: Sequence[Any], _limits: BatchLimits, /) -> Self:
        """The same format with every choice made that takes a look at the files of a source."""
        return self

    @abstractmethod
    def options(self) -> dict[str, JSON]:
        """Every option that changes the documents, for `describe`."""

    def size_hint(self, file: InputFile) -> int:
        return file.num_bytes

    def bytes_before(self, file: InputFile, _position: JSON, /) -> int:
        """About how many bytes of `size_hint` are before a position: all, where a file is one
        document. May decompress them."""
        return file.num_bytes

    @abstractmethod
    def read(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[TextBatch]:
        """Documents from `position` on (None: the start). The cursors are positions."""

    @abstractmethod
    def locate(
        self, file: InputFile, before: JSON, after: JSON, rows_before: int | None, /
    ) -> RowLocation:
        """The row between two positions. `rows_before`: rows of the file before this range, if
        known."""


class RowTable(NamedTuple):
    """Neighbouring rows of a file as columns."""

    rows: pa.RecordBatch  # the columns asked for that the file has (None: all), in file order
    position: JSON  # after these rows
    first_row: int | None  # number of the first row in the file (or range) as ids count them
    bad: tuple[tuple[int, BadRowError], ...]
    # rows of the batch that could not be decoded: index, why. A blank line, which is no row but is
    # counted by ids, has the reason ""


class TableFormat(RowFormat, Format):
    """A format that gives rows as columns too, so that they can be filtered and joined. One column
    as documents, and whole rows, follow from that."""

    @property
    def text_field(self) -> str | None:
        """The column that holds the text, once it is settled."""
        found: str | None = getattr(self, "field", None)
        return found

    @property
    def counts_rows(self) -> bool:
        """Whether rows are numbered from the start of a range; see `CuttableSource`."""
        return False

    @abstractmethod
    def tables(
        self, file: Any, position: JSON, limits: BatchLimits, columns: Sequence[str] | None, /
    ) -> Iterator[RowTable]:
        """Rows from `position` on (None: the start), in tables within the limits. Where tables end
        depends on where they start and on the file alone."""

    def schema_of(self, _file: Any, /) -> pa.Schema | None:
        """The columns that a file says it has; None: only its rows show which."""
        return None

    def drop_of(self, file: Any, row: int, reason: str, /) -> Drop:
        """The drop of a row, by its number as `RowTable` counts."""
        return Drop(id=f"{file.name}:row {row}", reason=reason)

    def read(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[TextBatch]:
        assert self.text_field is not None
        for rows, after, first, problems in self.tables(file, position, limits, [self.text_field]):
            assert first is not None
            texts, bad = to_binary(rows.column(0)), dict(problems)
            drops = [
                self.drop_of(file, first + row, bad[row].reason if row in bad else "no_text")
                for row in null_rows(texts)
            ]
            if bad and getattr(self, "on_bad", "error") == "error":
                row = min(bad)
                raise bad_row(name_row(self, file, self.drop_of(file, first + row, "")), bad[row])
            batch = make_batch(texts, cast(Cursor, after), drops=drops)
            yield batch.replaced(num_rows=len(texts)) if self.counts_rows else batch

    def rows(self, file: Any, position: JSON, limits: BatchLimits, /) -> Iterator[InputRow]:
        """Whole rows. A position is that of the table before, and how many rows of it are done."""
        start, skip = None, 0
        if position is not None:
            start, skip = fields_of(position, ("table", "rows"), file.name, counts=("rows",))
        for table in self.tables(file, start, limits, None):
            assert table.first_row is not None
            num_rows, bad = table.rows.num_rows, dict(table.bad)
            values, repaired = python_values(table.rows)
            for row in range(skip, num_rows):
                is_last = row + 1 == num_rows
                after: JSON = {
                    "table": table.position if is_last else start,
                    "rows": 0 if is_last else row + 1,
                }
                named = self.drop_of(file, table.first_row + row, "")
                value = bad.get(row, values[row])
                num_passed = int(named.row is not None)
                yield InputRow(value, named.id, after, row in repaired, named.row, num_passed)
            start, skip = table.position, max(skip - num_rows, 0)
        if skip:
            raise SourceError(
                f"{file.place}: the cursor is {skip:,} rows after the last one; resume with the "
                "input the cursor came from"
            )


def name_row(format: FileReader, file: Any, drop: Drop) -> str:
    """A row as a person finds it."""
    before = format.rows_before(file) if drop.row is not None else 0
    id = drop.numbered(before).id
    if not isinstance(file, InputFile):
        return f"hub dataset {id}"
    return str(file.place).removesuffix(file.name) + id


def bad_row(where: str, bad: BadRowError) -> SourceError:
    """The error for a row that `on_bad` does not let pass."""
    return SourceError(
        f"{where}: {bad}; correct the row, name another {{field}}, or leave such rows out with "
        "{on_bad}",
        field=...,
        on_bad="skip",
    )


def each_input(look: Callable[[Any, Any], _T], inputs: Sequence[tuple[Any, Any]]) -> list[_T]:
    """A look at each file with its reader. Elsewhere it may take a request, so several run at a
    time."""
    if all(isinstance(file.place, Path) for file, _ in inputs):
        return [look(*one) for one in inputs]
    with ThreadPoolExecutor(_LOOK_THREADS) as pool:
        return list(pool.map(lambda one: look(*one), inputs))


class FileRun(NamedTuple):
    """Neighbouring files that are one piece, or one file of which each reader reads a piece."""

    inputs: Sequence[tuple[Any, Any]]  # files with their readers
    readers: Sequence[Any]  # of a single file; of several, that of the first

    def piece(self, number: int) -> Sequence[tuple[Any, Any]]:
        if len(self.inputs) > 1:
            return self.inputs
        return [(self.inputs[0][0], self.readers[number])]


class SourcePieces(Sequence[Any]):
    """The pieces of a source, each made when it is asked for: a large input has millions. A slice
    is pickled with the files of its pieces only."""

    def __init__(
        self, make: Callable[[Sequence[tuple[Any, Any]]], Any], found: Sequence[FileRun]
    ) -> None:
        """`make` makes a source of the inputs of a piece; it is a method of one without files."""
        self._make, self._runs = make, found
        self._edges = list(accumulate((len(run.readers) for run in found), initial=0))

    def __reduce__(self) -> tuple[Any, ...]:
        return SourcePieces, (self._make, self._runs)

    def __len__(self) -> int:
        return self._edges[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return SourcePieces(self._make, list(self._runs_of(start, stop)))
        number = range(len(self))[index]
        run = bisect_right(self._edges, number) - 1
        return self._make(self._runs[run].piece(number - self._edges[run]))

    def _runs_of(self, start: int, stop: int) -> Iterator[FileRun]:
        run = bisect_right(self._edges, start) - 1
        while start < stop:
            inputs, readers = self._runs[run]
            first = self._edges[run]
            yield FileRun(inputs, readers[start - first : stop - first])
            run += 1
            start = self._edges[run]

    def by_files(self) -> Iterator[tuple[Any, int]]:
        """The first piece of each file, or of each run of them, and how many pieces it has."""
        for run in self._runs:
            yield self._make(run.piece(0)), len(run.readers)


def cut_inputs(inputs: Sequence[tuple[Any, _Reader]], num_bytes: int) -> list[FileRun]:
    """Runs of files with their readers, and ranges of a file that is larger than `num_bytes`."""
    whole_number(num_bytes, "num_bytes")
    sizes = each_input(lambda file, reader: reader.size_hint(file), inputs)
    found = list(runs(sizes, num_bytes))
    alone = [inputs[start] for start, stop in found if stop - start == 1]
    parts = iter(each_input(lambda file, reader: reader.split(file, num_bytes), alone))
    return [
        FileRun(inputs[start:stop], next(parts) if stop - start == 1 else (inputs[start][1],))
        for start, stop in found
    ]


class FileListSource(NamedSource, ABC):
    """Files of one format, read one after the other, here or elsewhere."""

    _is_settled = False
    _description: dict[str, JSON] | None = None
    _mapping: RowMapping | None = None

    def __init__(
        self, files: tuple[Any, ...], format: Format, *, name: str, limits: BatchLimits
    ) -> None:
        super().__init__(name, limits)
        self.files = files
        self._format = format

    @abstractmethod
    def _piece(self, files: tuple[Any, ...], format: Format) -> Source:
        """A source of some neighbours among the files, or of a range of one."""

    def _over(self, files: tuple[Any, ...], format: Format, name: str) -> Self:
        """The same source over other files, in a format that is settled."""
        source = copy(self)
        source.files, source._format, source.name = files, format, name
        source._description = None
        return source

    def mapped(self, mapping: RowMapping) -> Self:
        """The same source, whose rows become documents as `mapping` says."""
        if mapping.takes_rows and not isinstance(self._format, TableFormat):
            given = [name for name in mapping.described() if name in ("fields", "filter", "map")]
            raise OptionError(
                f"source {self.name!r}: {', '.join(f'{{{name}}}' for name in given)}: is for rows "
                "with columns, and this input has none; leave it out",
                **dict.fromkeys(given, ...),
            )
        source = copy(self)
        on_bad = getattr(self._format, "on_bad", mapping.on_bad)
        source._mapping = replace(mapping, on_bad=on_bad)
        source._description, source._is_settled = None, False
        return source

    def _settled(self) -> Format:
        """The format, after one look at files where that is needed."""
        if not self._is_settled:
            mapping = self._mapping
            if mapping is None or not mapping.picks_text:
                self._format = self._format.settled(self.files, self.limits)
            if mapping is not None and isinstance(self._format, TableFormat):
                mapping.check_files(self._format, self.files, self.limits)
            self._is_settled = True
        return self._format

    def limited(self, num_bytes: int) -> Self:
        """The same source, which refuses a document over `num_bytes` before it is read whole."""
        return self.with_limits(most_bytes=num_bytes)

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        first, position = self._find(cursor)
        return coalesce(self._read(first, position), self.limits)

    def locate(
        self, before: Cursor | None, after: Cursor, rows_before: int | None, /
    ) -> RowLocation:
        """The row that ends at the cursor `after`; the row before it ended at `before`."""
        first, position = self._find(after)
        start = before["position"] if before and before["file"] == after["file"] else None
        found = self._format.locate(self.files[first], start, position, rows_before)
        return replace(found, file=_name_in_cursor(self.files[first]))

    def divide(self, at_least: int) -> Sequence[Source]:
        """One source per file; when there are fewer than `at_least`, one per row group (which
        reads the footers of Parquet files). Nothing is fingerprinted."""
        whole_number(at_least, "at_least")
        inputs = self._inputs()
        parts: Sequence[Sequence[Format]] = [(format,) for _, format in inputs]
        if len(inputs) < at_least:
            parts = each_input(lambda file, format: format.split(file, None), inputs)
        pairs = zip(self.files, parts, strict=True)
        return [self._piece((file,), part) for file, found in pairs for part in found]

    def cut(self, num_bytes: int) -> Sequence[Source]:
        """Runs of files, and ranges of a file that is larger. Reads the footers of Parquet files,
        and what `field=None` takes; nothing is fingerprinted."""
        return list(SourcePieces(self._piece_of, cut_inputs(self._inputs(), num_bytes)))

    def _piece_of(self, inputs: Sequence[tuple[Any, Format]]) -> Source:
        return self._piece(tuple(file for file, _ in inputs), inputs[0][1])

    def _inputs(self) -> list[tuple[Any, Format]]:
        format = self._settled()
        return [(file, format) for file in self.files]

    def _find(self, cursor: Cursor | None) -> tuple[int, JSON]:
        """The number of the cursor's file, and the position in it."""
        if cursor is None:
            return 0, None
        name, position = fields_of(cursor, ("file", "position"), self.name)
        for index, file in enumerate(self.files):
            if _name_in_cursor(file) == name:
                return index, position
        raise SourceError(
            f"source {self.name!r}: the cursor is in {name!r:.200}, which is not among its "
            f"{len(self.files):,} files; resume with the input the cursor came from"
        )

    def _read(self, first: int, position: JSON) -> Iterator[TextBatch]:
        format = self._settled()
        for file in self.files[first:]:
            check_unchanged(file)
            read = format.read if self._mapping is None else partial(self._mapping.read, format)
            for batch in read(file, position, self.limits):
                cursor: Cursor = {"file": _name_in_cursor(file), "position": batch.cursor}
                yield batch.replaced(cursor=cursor)
            check_unchanged(file)
            position = None


def _name_in_cursor(file: InputFile | HubFile) -> str:
    return file.path if isinstance(file, HubFile) else file.name


class FileSource(FileListSource):
    """Files on this machine or on object storage."""

    files: tuple[InputFile, ...]

    def __init__(
        self,
        where: Where,
        format: Format,
        *,
        name: str | None,
        limits: BatchLimits,
        ext: Endings = None,
    ) -> None:
        files = format.of_folder(list_files(where, suffixes=format.in_folder(), ext=ext))
        super().__init__(files, format, name=name or name_of(where), limits=limits)

    @property
    def continues(self) -> bool:
        return self._format.continues

    @property
    def row_format(self) -> RowFormat | None:
        """What reads whole rows of the files; None where there are only texts."""
        return self._format if isinstance(self._format, RowFormat) else None

    @property
    def part(self) -> str:
        """The range it reads of its file, "" for whole files; a store's origins depend on it."""
        return self._format.range_name

    @property
    def settings(self) -> dict[str, JSON]:
        """How the files are read: their kind, and every option that changes the documents."""
        mapped = {} if self._mapping is None else self._mapping.described()
        return {"kind": self._format.kind, **self._settled().options(), **mapped}

    def describe(self) -> dict[str, JSON]:
        """Reads the files once (their ends, when large) to fingerprint them; then remembers."""
        if self._description is None:
            self._description = {
                "kind": self._format.kind,
                "name": self.name,
                **self.settings,
                "files": fingerprint_files(self.files),
            }
        return dict(self._description)

    def stamp(self) -> JSON:
        """When each file was written. A build on this machine is not resumed on other input."""
        return [[file.name, stamp_of_file(file)] for file in self.files]

    def size_hint(self) -> int | None:
        format = self._settled()
        return sum(each_input(lambda file, _: format.size_hint(file), self._inputs()))

    def bytes_before(self, cursor: Cursor) -> int:
        """About how many bytes of `size_hint` are before a cursor. Decompresses up to there, so it
        is for cursors near the start."""
        first, position = self._find(cursor)
        format = self._settled()
        before = sum(map(format.size_hint, self.files[:first]))
        return before + format.bytes_before(self.files[first], position)

    def of_files(self, files: Iterable[InputFile], name: str | None = None) -> Self:
        """The same source over some of its files, in this order. They are read as all of them
        would be, so this takes the look at files."""
        return self._over(tuple(files), self._settled(), name or self.name)

    def cut(self, num_bytes: int) -> Sequence[Source]:
        found = cut_inputs(self._inputs(), num_bytes)
        return SourcePieces(self._over((), self._format, self.name)._piece_of, found)

    def _piece(self, files: tuple[InputFile, ...], format: Format) -> Self:
        last = "" if len(files) == 1 else f" to {files[-1].name}"
        name = f"{self.name}/{files[0].name}{last}{format.range_name}"
        return self._over(files, format, name)


class ConcatSource:
    """Sources read in order. The cursor is the number of the part and the cursor in it."""

    def __init__(self, parts: Sequence[Source], *, name: str | None = None) -> None:
        if not parts:
            raise OptionError("ConcatSource needs at least one source")
        self.parts = tuple(parts)
        self.name = name or " + ".join(part.name for part in parts)

    def __repr__(self) -> str:
        return f"ConcatSource({', '.join(map(repr, self.parts))})"

    @property
    def files(self) -> tuple[InputFile | HubFile, ...]:
        """The files of all parts that have files."""
        found = [leaf.files for leaf in leaves(self) if isinstance(leaf, FileListSource)]
        return tuple(file for files in found for file in files)

    def describe(self) -> dict[str, JSON]:
        parts: list[JSON] = [part.describe() for part in self.parts]
        return {"kind": "concat", "name": self.name, "parts": parts}

    def stamp(self) -> JSON:
        return [stamp_of(part) for part in self.parts]

    def size_hint(self) -> int | None:
        sizes = [part.size_hint() for part in self.parts]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def limited(self, num_bytes: int) -> ConcatSource:
        """The same, of parts that refuse a document over `num_bytes`."""
        return ConcatSource([limited(part, num_bytes) for part in self.parts], name=self.name)

    def with_limits(self, **limits: int) -> ConcatSource:
        """The same documents in other batches, when every part is a `_RowSource`."""
        parts = [cast(_RowSource, part).with_limits(**limits) for part in self.parts]
        return ConcatSource(parts, name=self.name)

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        first, inner = self._find(cursor)
        return self._read(first, inner)

    def locate(
        self, before: Cursor | None, after: Cursor, rows_before: int | None, /
    ) -> RowLocation:
        """The row that ends at the cursor `after`, when every part is a `_RowSource`."""
        first, inner = self._find(after)
        start = before["cursor"] if before and before["part"] == first else None
        part = cast(_RowSource, self.parts[first])
        return part.locate(cast(Cursor | None, start), cast(Cursor, inner), rows_before)

    def divide(self, at_least: int) -> Sequence[Source]:
        """The pieces of the parts, in order; a part that cannot be divided is one piece. Each part
        is asked for its coarsest pieces, then for its share, then for all."""
        whole_number(at_least, "at_least")
        share = -(-at_least // len(self.parts))
        pieces: list[Source] = []
        for wanted in (1, share, at_least):
            pieces = []
            for part in self.parts:
                pieces += part.divide(wanted) if isinstance(part, DividedSource) else (part,)
            if len(pieces) >= at_least:
                break
        return pieces

    def cut(self, num_bytes: int) -> Sequence[Source]:
        """The pieces of the parts, in order; small parts together."""
        whole_number(num_bytes, "num_bytes")
        pieces = [
            part.cut(num_bytes) if isinstance(part, CuttableSource) else (part,)
            for part in self.parts
        ]
        sizes = [part.size_hint() for part in self.parts]
        alone = [size if len(cut) == 1 else None for cut, size in zip(pieces, sizes, strict=True)]
        joined: list[Source] = []
        for start, stop in runs(alone, num_bytes):
            found = [piece for cut in pieces[start:stop] for piece in cut]
            if stop - start > 1:
                found = [ConcatSource(found, name=f"{self.name}/parts {start} to {stop - 1}")]
            joined += found
        return joined

    def _find(self, cursor: Cursor | None) -> tuple[int, Cursor | None]:
        """The number of the cursor's part, and the cursor in it."""
        if cursor is None:
            return 0, None
        first, inner = fields_of(cursor, ("part", "cursor"), self.name, counts=("part",))
        if first >= len(self.parts) or not isinstance(inner, dict):
            raise SourceError(
                f"source {self.name!r}: the cursor is in part {first} with {inner!r:.80}, but "
                f"there are {len(self.parts)} parts; resume with the sources it came from"
            )
        return first, inner

    def _read(self, first: int, inner: Cursor | None) -> Iterator[TextBatch]:
        for number in range(first, len(self.parts)):
            for batch in self.parts[number].batches(inner):
                yield batch.replaced(cursor={"part": number, "cursor": batch.cursor})
            inner = None


@runtime_checkable
class _RowSource(Source, Protocol):
    """A source that knows the rows of its documents."""

    def with_limits(self, **limits: int) -> Source: ...

    def locate(
        self, before: Cursor | None, after: Cursor, rows_before: int | None, /
    ) -> RowLocation: ...


def leaves(source: Source) -> Iterator[Source]:
    """The sources that a source is made of, in order; itself, when it is not joined."""
    if isinstance(source, ConcatSource):
        for part in source.parts:
            yield from leaves(part)
    else:
        yield source


def read_document(
    source: Source, cursor: Cursor | None, number: int, *, rows_before: int | None = None
) -> tuple[str, RowLocation] | None:
    """The text `number` after a cursor; None when the source cannot be read row by row.

    `rows_before`: lines of the file before a range of it; None: they are counted.
    """
    if not all(isinstance(leaf, _RowSource) for leaf in leaves(source)):
        return None
    known = cast(_RowSource, source)
    for num_rows in (_STEP, 1):
        for batch in known.with_limits(num_documents=num_rows).batches(cursor):
            if number < len(batch.texts):
                break
            number -= len(batch.texts)
            cursor = batch.cursor
        else:
            raise SourceError(
                f"source {source.name!r}: ends before a document that it had; it changed"
            )
    return str(batch.texts[number].as_py()), known.locate(cursor, batch.cursor, rows_before)


def knows_rows(source: Any) -> bool:
    """Whether a source can be cut, and knows the row of each of its documents."""
    return all(
        isinstance(leaf, CuttableSource) and isinstance(leaf, _RowSource) for leaf in leaves(source)
    )
