"""Columns that change what a row means: which answer is preferred, how good it is, what it shows.

Read without such a column, a file trains what the column says is bad. So it is never ignored
unasked: conversations with one are refused before anything is built, and so is a single later row.
Documents are refused when nobody named the field that holds them; labels and scores of documents
are common and only announced. A column counts where it holds something of a kind that fits its
name: null, "" and empty lists hold nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

from shardmill.errors import SourceError
from shardmill.records import JSON
from shardmill.sources.batches import BatchLimits
from shardmill.sources.formats.jsonl import Object, kind_of
from shardmill.sources.formats.parquet import ParquetFormat, text_columns
from shardmill.sources.source import InputRow, RowFormat, each_input

logger = logging.getLogger(__name__)

LOOK_ROWS, LOOK_BYTES, LOOK_FILES = 20, 2**16, 1000
"""Of the start of each file, and of files: more are looked at evenly. All later rows of
conversations are looked at when they are read."""
_MOST_BYTES = 2**20  # of the rows of a file, about: a row may hold images
_MOST_LISTED = 12
_CACHED = 1024  # sets of keys; files have one or a few


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What the columns of one kind usually say of a row."""

    names: re.Pattern[str]
    fits: Callable[[Any], bool]  # of a value that holds something
    says: str
    shape: str | None = None  # the one that reads it
    has_filter: bool = False  # whether rows can be chosen by it
    of_documents: bool = False  # whether it changes what a document means, too


def _is_filled(_value: object) -> bool:
    return True


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float)


def _are_numbers(value: object) -> bool:
    """A number, or an object of them, as `{"helpful": 4}`."""
    if isinstance(value, dict):
        return any(map(_is_number, value.values()))
    return _is_number(value)


def _is_list_of_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_one_value(value: object) -> bool:
    return isinstance(value, str | int | float)


def _are_answers(value: object) -> bool:
    """Several texts, or objects with a rank or score."""
    if not isinstance(value, list):
        return False
    return (len(value) > 1 and all(isinstance(one, str | list) for one in value)) or any(
        isinstance(one, dict) and any(map(_RANK.search, map(str, one))) for one in value
    )


_RANK = re.compile("score|rating|rank|reward|preference")


_MEANINGS = (
    Meaning(
        names=re.compile(r"(?:.+[_-])?(?:chosen|rejected)(?:[_-].+)?|preference|preferred|winner"),
        fits=_is_filled,
        says="which of several answers was preferred, and read without it the others may be "
        "trained",
        shape="preference",
        of_documents=True,
    ),
    Meaning(
        names=re.compile("completions|responses|candidates|generations|answers"),
        fits=_are_answers,
        says="several answers to one question, some better than others",
        shape="preference",
        of_documents=True,
    ),
    Meaning(
        names=re.compile("scores|ratings|ranks?"),
        fits=_is_list_of_numbers,
        says="how good each of several answers is",
        shape="preference",
    ),
    Meaning(
        names=re.compile("label"),
        fits=_is_one_value,
        says="whether an answer is good or bad, and read without it bad ones are trained, too",
        shape="kto",
        has_filter=True,
    ),
    Meaning(
        names=re.compile("scores?|ratings?|weights?"),
        fits=_are_numbers,
        says="how good a row is or how much it counts, and read without it all rows count the same",
        has_filter=True,
    ),
    Meaning(
        names=re.compile("images?|audios?|videos?"),
        fits=_is_filled,
        says="what the text is about and the model would not see",
        of_documents=True,
    ),
)


@lru_cache(_CACHED)
def _watched(keys: tuple[str, ...]) -> tuple[tuple[str, Meaning], ...]:
    """The columns with a name that means something."""
    return tuple(
        (key, meaning)
        for key in keys
        for meaning in _MEANINGS
        if meaning.names.fullmatch(key.lower())
    )


def meanings_in(row: Object, settled: Collection[str] = ()) -> list[tuple[str, Meaning]]:
    """The columns of a row that change what it means, but for those in `settled`, which also names
    the shape that reads its own."""
    return [
        (name, meaning)
        for name, meaning in _watched(tuple(row))
        if _holds(row[name], meaning) and name not in settled and meaning.shape not in settled
    ]


def _holds(value: object, meaning: Meaning) -> bool:
    is_empty = value is None or (isinstance(value, str | bytes | list | dict) and not value)
    return not is_empty and meaning.fits(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundColumn:
    """A column that changes what rows mean, as it was first found."""

    name: str
    meaning: Meaning
    where: str  # the row, as a person finds it
    kind: str  # of its value


def sentences(found: Iterable[FoundColumn]) -> list[str]:
    """What the columns say, those of one meaning together."""
    by_meaning: dict[str, list[FoundColumn]] = {}
    for column in found:
        by_meaning.setdefault(column.meaning.says, []).append(column)
    return [
        f"{' and '.join(f'{one.name!r:.60} ({one.kind})' for one in columns)} usually "
        f"{'say' if len(columns) > 1 else 'says'} {says}"
        for says, columns in by_meaning.items()
    ]


def refused_columns(found: Sequence[FoundColumn], *, field: str | None = None) -> SourceError:
    """What the columns say, and the ways to go on. `field`: the one that documents would be read
    from."""
    words: dict[str, Any] = {"ignore_columns": list(dict.fromkeys(one.name for one in found))}
    ways = ["{ignore_columns}, where it changes nothing"]
    chosen = next((one.name for one in found if one.meaning.has_filter), None)
    if chosen is not None:
        words["filter"] = chosen
        ways.insert(0, "{filter}, which keeps the rows that are meant")
    shape = next((one.meaning.shape for one in found if one.meaning.shape), None)
    if field is not None:
        words["field"] = field
        ways.insert(0, "{field}, which says that these texts are the documents")
    elif shape is not None:
        words["shape"] = shape
        ways.insert(0, "{shape}, which reads all of it")
    lines = "\n  ".join([*sentences(found), f"go on with one of: {'; '.join(ways)}"])
    return SourceError(
        f"{found[0].where}: columns that change what is trained would be ignored:\n  {lines}",
        **words,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstColumns:
    """The columns of the first rows of a file."""

    names: tuple[str, ...] = ()
    found: tuple[FoundColumn, ...] = ()  # those that change what rows mean


class RowInput(Protocol):
    """Whole rows of one file or dataset."""

    @property
    def file(self) -> Any: ...
    @property
    def format(self) -> RowFormat: ...
    def where(self, row: InputRow, /) -> str: ...
    def rows(self, position: JSON, limits: BatchLimits, /) -> Iterator[InputRow]: ...


def first_columns(
    inputs: Sequence[RowInput], *, limits: BatchLimits, settled: Collection[str] = ()
) -> list[FirstColumns]:
    """Of each input; of very many, of some of them. Rows that cannot be read are passed: they are
    an error or a drop when they are read."""
    most = limits.most_input()
    most = None if most is None else max(most - LOOK_BYTES, 1)  # the same lines are refused
    small = replace(limits, num_bytes=LOOK_BYTES, most_bytes=most)
    chosen = inputs[:: -(-len(inputs) // LOOK_FILES) or 1]

    def look(_file: object, one: RowInput) -> FirstColumns:
        with suppress(SourceError):  # raised again when the file is read
            return _columns_of(one, small, settled)
        return FirstColumns()

    return each_input(look, [(one.file, one) for one in chosen])


def _columns_of(one: RowInput, limits: BatchLimits, settled: Collection[str]) -> FirstColumns:
    names: dict[str, None] = {}
    found: dict[str, FoundColumn] = {}
    if isinstance(one.format, ParquetFormat):
        names = dict.fromkeys(name for name, _ in text_columns(one.file))
        if not _watched(tuple(names)):  # then no row need be read
            return FirstColumns(names=tuple(names))
    num_bytes = 0
    for row in islice(one.rows(None, limits), LOOK_ROWS):
        if not isinstance(row.value, dict):
            continue
        names |= dict.fromkeys(row.value)
        for name, meaning in meanings_in(row.value, settled):
            if name not in found:
                kind, where = kind_of(row.value[name]), one.where(row)
                found[name] = FoundColumn(name=name, meaning=meaning, where=where, kind=kind)
        num_bytes += len(repr(row.value))
        if num_bytes > _MOST_BYTES:
            break
    return FirstColumns(names=tuple(names), found=tuple(found.values()))


def announce_unused(source: str, first: Iterable[FirstColumns], used: Collection[str]) -> None:
    """List the columns that nothing reads, in one line."""
    names = dict.fromkeys(name for one in first for name in one.names)
    unused = [f"{name!r:.40}" for name in names if name not in used]
    if unused:
        more = f" and {len(unused) - _MOST_LISTED:,} more" if len(unused) > _MOST_LISTED else ""
        listed = ", ".join(unused[:_MOST_LISTED])
        logger.info("%s: columns that are not read: %s%s", source, listed, more)
