"""Which part of a row becomes a document: joined columns, a filter, a function of the user's own,
and front matter that is left out.

`RowMapping` holds the options. Filters and joined columns work on Arrow batches (`RowTable`), a
function gets whole rows as dicts. Each row is judged alone, so batches, pieces and workers never
change what becomes of it. A row that a filter leaves out is counted, not listed: a filter may leave
out nearly everything. A row for which a function gives None is listed like every drop.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from shardmill.arguments import choices
from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Drop, TextBatch
from shardmill.sources.batches import (
    BatchLimits,
    Mask,
    grouped,
    make_batch,
    null_rows,
    strings_to_arrow,
    to_binary,
    utf8_bytes,
)
from shardmill.sources.filters import (
    ColumnPath,
    NotAnObject,
    Values,
    evaluate,
    inside,
    parse_filter,
)
from shardmill.sources.formats.jsonl import OnBad, holds_json, json_values, kind_of
from shardmill.sources.functions import MapFunction, called, find_function, imported
from shardmill.sources.source import (
    BadRowError,
    InputRow,
    LeftOutError,
    RowTable,
    TableFormat,
    name_row,
)

FILTERED = "filtered"
"""What rows that a filter leaves out are counted as."""
OPTIONS = ("fields", "join", "filter", "map", "strip_front_matter")

_LOOK_ROWS = 1000  # at the start of the input, to know its columns
_DAMAGE = "surrogateescape"  # how Python keeps bytes that are not UTF-8
_FILTER_ROWS = 64  # whole rows that are filtered at a time: each time has a cost


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMapping:
    """What becomes of a row. Equal mappings of equal rows give equal documents."""

    fields: tuple[str, ...] | None = None  # the columns that are joined; None: a single one
    join: str = "\n\n"
    filter: str | None = None  # see `filters`
    map: MapFunction | None = None
    strip_front_matter: bool = False
    on_bad: OnBad = "error"  # of rows that cannot be read, or mapped

    def described(self) -> dict[str, JSON]:
        """For `describe`; only what was given."""
        found: dict[str, JSON] = {}
        if self.fields is not None:
            found |= {"fields": list(self.fields), "join": self.join}
        if self.filter is not None:
            found["filter"] = self.filter
        if self.map is not None:
            found |= {"map": self.map.where, "map_sha256": self.map.sha256, "on_bad": self.on_bad}
        if self.strip_front_matter:
            found["strip_front_matter"] = True
        return found

    @property
    def picks_text(self) -> bool:
        """Whether it says itself what the text is, so that there is no field to be found."""
        return self.fields is not None or self.map is not None

    @property
    def takes_rows(self) -> bool:
        """Whether it needs more of a row than its text."""
        return self.picks_text or self.filter is not None

    def columns(self, text_field: str | None) -> tuple[str, ...] | None:
        """The columns that are read; None: all."""
        if self.map is not None:
            return None
        return tuple(dict.fromkeys(path[0] for path in self.paths(text_field)))

    def paths(self, text_field: str | None) -> list[ColumnPath]:
        """The columns, and fields inside them, that are named or were found."""
        texts = self.fields or (() if text_field is None or self.map else (text_field,))
        filtered = () if self.filter is None else parse_filter(self.filter).columns
        return [*((name,) for name in texts), *filtered]

    def read(
        self, format: Any, file: Any, position: JSON, limits: BatchLimits
    ) -> Iterator[TextBatch]:
        """The documents of a file from `position` on (None: the start). As of `Format`."""
        batches: Iterator[TextBatch]
        if self.map is not None:

            def name(row: InputRow) -> str:
                return name_row(format, file, Drop(id=row.id, reason="", row=row.row))

            batches = self.row_batches(format.rows(file, position, limits), None, limits, name)
        elif self.takes_rows:
            batches = self._table_batches(format, file, position, limits)
        else:
            batches = format.read(file, position, limits)
        return map(without_front_matter, batches) if self.strip_front_matter else batches

    def check_files(self, format: TableFormat, files: Sequence[Any], limits: BatchLimits) -> None:
        """Refuse a column that the first file, or none of the first rows of JSON lines, has."""
        if not self.paths(format.text_field):
            return
        known = format.schema_of(files[0])
        if known is not None:
            self._check_schema(format, known, files[0])
            return
        rows = (row for file in files for row in format.rows(file, None, limits))
        self.check_columns(format.text_field, rows, str(files[0].place))

    def _check_schema(self, format: TableFormat, known: pa.Schema, file: Any) -> None:
        for path in self.paths(format.text_field):
            _check_known(path, known, str(file.place))
        for name in self.fields or (format.text_field,):
            if name is not None and self.map is None and not _is_text(known.field(name).type):
                raise SourceError(
                    f"{file.place}: the column {name!r} holds {known.field(name).type}, wanted "
                    "strings or bytes; name another with {field}",
                    field=...,
                )

    # Rows as arrays

    def _table_batches(
        self, format: TableFormat, file: Any, position: JSON, limits: BatchLimits
    ) -> Iterator[TextBatch]:
        """The documents of a file from `position` on, by columns."""
        names = self.fields or (format.text_field,)
        known = format.schema_of(file)
        if known is not None:
            self._check_schema(format, known, file)
        columns = self.columns(format.text_field)
        for table in format.tables(file, position, limits, columns):
            batch = self._batch(format, file, table, [name for name in names if name is not None])
            if batch.num_read or batch.num_rows:
                yield batch

    def _batch(
        self, format: TableFormat, file: Any, table: RowTable, names: Sequence[str]
    ) -> TextBatch:
        """The texts of a table, with what became of its other rows."""

        def named(row: int, reason: str = "") -> Drop:
            return format.drop_of(file, (table.first_row or 0) + row, reason)

        rows, num_rows = table.rows, table.rows.num_rows
        bad = dict(table.bad)
        num_blank = sum(not problem.reason for problem in bad.values())
        chosen = np.ones(num_rows, np.bool_)
        chosen[list(bad)] = False
        num_filtered = 0
        if self.filter is not None:
            kept, problems = _kept_rows(self.filter, rows)
            wrong = min((row for row in problems if chosen[row]), default=None)
            if wrong is not None:
                raise _misfit(name_row(format, file, named(wrong)), problems[wrong])
            num_filtered = int(np.count_nonzero(chosen & ~kept))
            chosen &= kept
        numbers = np.flatnonzero(chosen)
        found = rows if chosen.all() else rows.filter(pa.array(chosen))
        texts, strange = _texts_of(found, names, self.join)
        bad |= {int(numbers[row]): problem for row, problem in strange.items()}
        reasons = {row: problem.reason for row, problem in bad.items() if problem.reason}
        for row in sorted(reasons) if self.on_bad == "error" else ():
            raise _bad_row(name_row(format, file, named(row)), bad[row])
        missing = (int(numbers[row]) for row in null_rows(texts) if row not in strange)
        reasons |= dict.fromkeys(missing, "no_text")
        after: Any = table.position
        batch = make_batch(
            texts,
            after,
            drops=[named(row, reasons[row]) for row in sorted(reasons)],
            num_read=num_rows - num_blank,
        )
        counts = {**batch.counts, FILTERED: num_filtered} if num_filtered else batch.counts
        return batch.replaced(counts=counts, num_rows=num_rows if format.counts_rows else 0)

    # Whole rows

    def row_batches(
        self,
        rows: Iterable[InputRow],
        text_field: str | None,
        limits: BatchLimits,
        name: Callable[[InputRow], str],
    ) -> Iterator[TextBatch]:
        """The documents of whole rows; `name` says where a row is, for errors."""

        def sized() -> Iterator[tuple[InputRow, int, int]]:
            for row in self.applied(rows, name, str):
                if isinstance(row.value, dict):
                    row = row._replace(value=self._text_of(row.value, text_field))
                size = utf8_bytes(row.value) if isinstance(row.value, str) else 0
                yield row, size, row.value is not None

        for held in grouped(sized(), limits):
            drops = []
            for row in held:
                if not isinstance(row.value, BadRowError) or row.value.reason == FILTERED:
                    continue
                if self.on_bad == "error" and not isinstance(row.value, LeftOutError):
                    raise _bad_row(name(row), row.value) from row.value.__cause__
                drops.append(Drop(id=row.id, reason=row.value.reason, row=row.row))
            found = [row for row in held if isinstance(row.value, str)]
            texts, changed = strings_to_arrow([row.value for row in found])
            repaired = np.array([row.repaired for row in found], np.bool_)
            last: Any = held[-1].position
            num_read = sum(row.value is not None for row in held)
            batch = make_batch(
                texts,
                last() if callable(last) else last,
                repaired=repaired if changed is None else repaired | changed,
                drops=drops,
                num_read=num_read,
            )
            num_filtered = num_read - len(found) - len(drops)
            counts = {**batch.counts, FILTERED: num_filtered} if num_filtered else batch.counts
            num_rows = sum(row.num_rows for row in held)
            yield batch.replaced(counts=counts, num_rows=num_rows)

    def _text_of(self, row: Mapping[str, Any], text_field: str | None) -> str | BadRowError:
        """The joined columns of a row."""
        names = self.fields or (text_field,)
        parts = [row.get(name) for name in names if name is not None]
        for name, part in zip(names, parts, strict=False):
            if part is not None and not isinstance(part, str):
                return _not_a_string(str(name), part)
        if all(part is None for part in parts):
            return LeftOutError("no_text", "no text")
        return self.join.join(part for part in parts if part)

    def applied(
        self, rows: Iterable[InputRow], name: Callable[[InputRow], str], wanted: type
    ) -> Iterator[InputRow]:
        """The rows with what the function gave, which is `wanted`; what is left out has the reason
        as its value."""
        chosen = rows if self.filter is None else self._filtered(rows, self.filter, name)
        if self.map is None:
            yield from chosen
            return
        function = imported(self.map)
        for row in chosen:
            if isinstance(row.value, dict):
                row = row._replace(value=called(function, self.map, row.value, wanted))
            yield row

    def _filtered(
        self, rows: Iterable[InputRow], expression: str, name: Callable[[InputRow], str]
    ) -> Iterator[InputRow]:
        paths = parse_filter(expression).columns
        left = iter(rows)
        while held := list(islice(left, _FILTER_ROWS)):
            values = [row.value if isinstance(row.value, dict) else {} for row in held]
            columns: dict[ColumnPath, Values] = {
                path: [inside(value.get(path[0]), path[1:], kind_of) for value in values]
                for path in paths
            }
            kept, problems = evaluate(parse_filter(expression), columns, len(held))
            for number, row in enumerate(held):
                if not isinstance(row.value, dict):
                    yield row
                elif number in problems:
                    raise _misfit(name(row), problems[number])
                elif kept[number]:
                    yield row
                else:
                    yield row._replace(value=LeftOutError(FILTERED, "filtered"))

    def check_columns(self, text_field: str | None, rows: Iterable[InputRow], where: str) -> None:
        """Refuse a column that none of the first rows has."""
        missing = self.paths(text_field)
        names: dict[str, None] = {}
        known = (row.value for row in rows if isinstance(row.value, dict))
        for row in islice(known, _LOOK_ROWS):
            names |= dict.fromkeys(row)
            missing = [path for path in missing if not _has(row, path)]
            if not missing:
                return
        if missing and names:
            shown, listed = ".".join(missing[0]), choices(missing[0][0], names, verb="found")
            raise SourceError(
                f"{where}: none of the first rows (up to {_LOOK_ROWS:,}) has the column {shown!r}; "
                f"{listed}"
            )


def take_mapping(options: dict[str, Any]) -> tuple[RowMapping | None, dict[str, Any]]:
    """The mapping among the options of a source, and the other options."""
    given = {key: options[key] for key in OPTIONS if options.get(key) not in (None, False)}
    rest = {key: value for key, value in options.items() if key not in OPTIONS}
    if not given:
        return None, rest
    if "fields" in given:
        given["fields"] = _field_names(given["fields"])
    for one, other in (("fields", "map"), ("field", "fields"), ("field", "map")):
        values = {name: given.get(name, rest.get(name)) for name in (one, other)}
        if None not in values.values():
            raise OptionError(
                f"{{{one}}} and {{{other}}}: each says what the text is; give one of them",
                **{name: _shown(value) for name, value in values.items()},
            )
    if "join" in given and "fields" not in given:
        raise OptionError("{join}: joins {fields}; name them", join=given["join"], fields=...)
    if "filter" in given:
        parse_filter(given["filter"])
    if "map" in given:
        given["map"] = find_function(given["map"])
    return RowMapping(**given, on_bad=rest.get("on_bad") or "error"), rest


def _shown(value: object) -> object:
    return ",".join(value) if isinstance(value, tuple) else value


def _field_names(fields: object) -> tuple[str, ...]:
    names = tuple(fields) if isinstance(fields, list | tuple) else ()
    if not names or len(set(names)) < len(names) or not all(isinstance(n, str) for n in names):
        raise OptionError("{fields}: wanted a list of names, each once", fields=fields)
    return names


def _has(row: Mapping[str, Any], path: ColumnPath) -> bool:
    """Whether a row has the column, or something in the way that is no object."""
    value: Any = row
    for key in path:
        if not isinstance(value, dict):
            return value is not None
        if key not in value:
            return False
        value = value[key]
    return True


def _check_known(path: ColumnPath, known: pa.Schema, where: str) -> None:
    """Refuse a column that a file does not have."""
    kind, names = None, known.names
    for number, key in enumerate(path):
        if names.count(key) != 1:
            what = "a column" if number == 0 else f"in {'.'.join(path[:number])!r} a field"
            found = "several" if key in names else "not"
            raise SourceError(
                f"{where}: {what} {key!r} is {found} there; {choices(key, names, verb='found')}"
            )
        kind = known.field(key).type if kind is None else kind.field(key).type
        if not pa.types.is_struct(kind):
            return
        names = [kind.field(at).name for at in range(kind.num_fields)]


def _kept_rows(text: str, rows: pa.RecordBatch) -> tuple[Mask, dict[int, str]]:
    """The rows of a batch for which a filter is true, and those it cannot judge."""
    found = parse_filter(text)
    columns = {path: _values_at(rows, path) for path in found.columns}
    return evaluate(found, columns, rows.num_rows)


def _values_at(rows: pa.RecordBatch, path: ColumnPath) -> Values:
    """A column, or what is inside its objects."""
    at = rows.schema.get_field_index(path[0])
    if at < 0:
        return pa.nulls(rows.num_rows)
    column, keys = rows.column(at), list(path[1:])
    if holds_json(rows.schema.field(at)):
        return [inside(value, keys, kind_of) for value in json_values(column)]
    while keys and pa.types.is_struct(column.type):
        import pyarrow.compute as pc

        column = pc.struct_field(column, keys.pop(0))
    if keys and not pa.types.is_null(column.type):
        return [
            None if value is None else NotAnObject(kind_of(value)) for value in column.to_pylist()
        ]
    return column


_TEXTS = (
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
    pa.types.is_fixed_size_binary,
)


def _is_text(kind: pa.DataType) -> bool:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(check(plain) for check in (*_TEXTS, pa.types.is_null))


def _texts_of(
    rows: pa.RecordBatch, names: Sequence[str], join: str
) -> tuple[pa.LargeBinaryArray, dict[int, BadRowError]]:
    """The joined columns of each row, null where all are null; and rows with something else."""
    strange: dict[int, BadRowError] = {}
    columns = []
    for name in names:
        at = rows.schema.get_field_index(name)
        if at < 0:
            columns.append(pa.nulls(rows.num_rows, pa.large_binary()))
            continue
        column, kind = rows.column(at), rows.schema.field(at)
        if holds_json(kind) or not _is_text(column.type):
            values = json_values(column) if holds_json(kind) else column.to_pylist()
            for row, value in enumerate(values):
                if not isinstance(value, str | None):
                    strange.setdefault(row, _not_a_string(name, value))
                    values[row] = None
            data = [
                one if one is None else one.encode("utf-8", "surrogateescape") for one in values
            ]
            column = pa.array(data, pa.large_binary())
        columns.append(to_binary(column))
    texts = columns[0] if len(columns) == 1 else _joined(columns, join)
    if strange:
        is_strange = np.zeros(rows.num_rows, np.bool_)
        is_strange[list(strange)] = True
        import pyarrow.compute as pc

        texts = pc.if_else(pa.array(is_strange), pa.scalar(None, texts.type), texts)
    return texts, strange


def _joined(columns: Sequence[pa.LargeBinaryArray], join: str) -> pa.LargeBinaryArray:
    """Row by row, without what is null or empty; null where all are null."""
    import pyarrow.compute as pc

    def both(left: Any, right: Any) -> Any:
        # Arrow's own way to skip nulls leaves out the rows in which all are null.
        return pc.coalesce(pc.binary_join_element_wise(left, right, between), left, right)

    none, between = pa.scalar(None, pa.large_binary()), pa.scalar(join.encode(), pa.large_binary())
    filled = [pc.if_else(pc.greater(pc.binary_length(one), 0), one, none) for one in columns]
    is_known = reduce(pc.or_, [pc.is_valid(one) for one in columns])
    empty = pc.if_else(is_known, pa.scalar(b"", pa.large_binary()), none)
    return pc.coalesce(reduce(both, filled), empty)


def _not_a_string(name: str, value: object) -> BadRowError:
    problem = f"the field {name!r} holds {kind_of(value)}, not a string"
    return BadRowError("not_a_string", problem)


def _bad_row(where: str, bad: BadRowError) -> SourceError:
    return SourceError(
        f"{where}: {bad}; correct the row, or leave such rows out with {{on_bad}}", on_bad="skip"
    )


def _misfit(where: str, problem: str) -> SourceError:
    return SourceError(
        f"{where}: {problem}; correct the row, or write another {{filter}}", filter=...
    )


# Front matter

_FENCE = re.compile(r"(---|\+\+\+)[ \t]*\n")
_ENDS = {
    "---": re.compile(r"^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.MULTILINE),
    "+++": re.compile(r"^\+\+\+[ \t]*(?:\n|\Z)", re.MULTILINE),
}
_YAML_LINE = re.compile(
    r"""[ \t]*(?:\#.*)?$|[ \t]|- |-$|[^\s:\#][^:]*:(?:\s|$)|"[^"]*":|'[^']*':"""
)


def without_front_matter(batch: TextBatch) -> TextBatch:
    """The same documents without the blocks they begin with. A document of which nothing is left is
    counted as empty."""
    texts = batch.strings if batch.strings is not None else batch.texts.to_pylist()
    bodies = [_body(text) if text.startswith(("---", "+++")) else text for text in texts]
    num_changed = sum(len(one) < len(text) for one, text in zip(bodies, texts, strict=True))
    if not num_changed:
        return batch
    kept = list(filter(None, bodies))
    num_empty = len(texts) - len(kept)
    counts = {**batch.counts, "empty": batch.counts.get("empty", 0) + num_empty}
    if num_changed > num_empty:
        counts["front_matter"] = num_changed - num_empty
    return batch.replaced(texts=strings_to_arrow(kept)[0], strings=None, sizes=None, counts=counts)


def _body(text: str) -> str:
    """A clean text without its front matter and the blank lines after it; the text itself when the
    block is not closed, or is not what it looks like: Markdown has "---" for a line too."""
    fence = _FENCE.match(text)
    end = _ENDS[fence[1]].search(text, fence.end()) if fence else None
    if fence is None or end is None:
        return text
    block = text[fence.end() : end.start()]
    if fence[1] == "---":
        is_matter = all(_YAML_LINE.match(line) for line in block.split("\n"))
    else:
        try:
            is_matter = tomllib.loads(block) is not None
        except (tomllib.TOMLDecodeError, RecursionError):
            is_matter = False
    return text[end.end() :].lstrip("\n") if is_matter else text
