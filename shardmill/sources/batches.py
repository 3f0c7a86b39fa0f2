"""Batches of clean documents, within limits; and the parts of sources that all kinds share.

Cleaning: invalid UTF-8 and lone surrogates become U+FFFD, one leading BOM is removed, CR LF becomes
LF; nothing else changes (a lone CR and white space stay), and only "" is empty. Each document is
cleaned alone, on whole Arrow arrays, so grouping never matters. A batch keeps within `BatchLimits`,
except for one document that alone is larger. With `most_bytes` no document may be larger than that,
and readers refuse it before they hold it.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import ConversationSource, Source
from shardmill.records import JSON, Cursor, Drop, IntArray, OffsetArray, TextBatch
from shardmill.storage.files import Where
from shardmill.urls import Url

BOM = "\ufeff"
BOM_BYTES = b"\xef\xbb\xbf"
REPLACEMENT = "\ufffd"
MAX_RUN = 1024
"""Most inputs in a run, so that a piece stays small when pickled, however small its files."""

Mask = npt.NDArray[np.bool_]
_T = TypeVar("_T")

logger = logging.getLogger(__name__)

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_RETURN, _NEWLINE = b"\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How large a batch may grow. Changes where batches end, never the documents."""

    num_bytes: int = 4 * 2**20  # of text
    num_documents: int = 8192  # of input rows, dropped and empty ones too
    most_bytes: int | None = None  # of one document, which is refused when it is larger; None: any

    def __post_init__(self) -> None:
        most = 1 if self.most_bytes is None else self.most_bytes
        if min(self.num_bytes, self.num_documents, most) < 1:
            raise OptionError(f"{self}: every limit must be at least 1")

    def most_input(self, expansion: int = 1) -> int | None:
        """Bytes of input that may hold one document, when each of its bytes takes at most
        `expansion` of them. A batch more is allowed, because a batch is held anyway."""
        if self.most_bytes is None:
            return None
        return self.most_bytes * expansion + self.num_bytes


DEFAULT_LIMITS = BatchLimits()


def too_large(where: str, found: str, most: int) -> SourceError:
    """A document, line or page does not fit into memory."""
    return SourceError(
        f"{where}: {found}; with the available memory {most:,} can be read: cut it into several, "
        "allow more with {memory}, or use fewer {workers}",
        memory=...,
        workers=...,
    )


class NamedSource:
    """What every source of this package has: a name, and limits of its batches."""

    def __init__(self, name: str, limits: BatchLimits) -> None:
        self.name = name
        self.limits = limits

    def __repr__(self) -> str:
        files = getattr(self, "files", None)
        count = "" if files is None else f", files={len(files):,}"
        return f"{type(self).__name__}({self.name!r}{count})"

    def size_hint(self) -> int | None:
        return None

    def with_limits(self, **limits: int) -> Self:
        """The same documents in other batches; `limits` are those that change."""
        source = copy(self)
        source.limits = replace(self.limits, **limits)
        return source


def row_bytes(rows: pa.RecordBatch) -> IntArray:
    """About how many bytes each row takes: of text exactly, of other columns their mean."""
    total = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        if is_text_type(column.type):
            total += byte_lengths(to_binary(column))
        else:
            total += column.nbytes // max(rows.num_rows, 1)
    return total


def is_text_type(kind: pa.DataType, *, or_bytes: bool = True) -> bool:
    """Whether a column holds strings (or bytes), perhaps as a dictionary."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    checks = (*_TEXT_TYPES, *_BINARY_TYPES) if or_bytes else _TEXT_TYPES
    return any(check(plain) for check in checks)


_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BINARY_TYPES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


def python_values(rows: pa.RecordBatch) -> tuple[list[dict[str, Any]], set[int]]:
    """Each row as a dict, and the numbers of those in which a string was no UTF-8."""
    repaired: set[int] = set()
    columns = [_python_column(column, repaired) for column in rows.columns]
    names = rows.schema.names
    found = zip(*columns, strict=True) if columns else [()] * rows.num_rows
    return [dict(zip(names, row, strict=True)) for row in found], repaired


def _python_column(column: pa.Array, repaired: set[int]) -> list[Any]:
    if not is_text_type(column.type, or_bytes=False):
        return list(column.to_pylist())
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        values: list[Any] = to_binary(column).to_pylist()
        for number, value in enumerate(values):
            if value is not None:
                values[number] = value.decode("utf-8", "replace")
                if values[number].encode() != value:
                    repaired.add(number)
        return values


def make_batch(
    raw: pa.Array,
    cursor: Cursor,
    *,
    repaired: Mask | None = None,
    drops: Iterable[Drop] = (),
    num_read: int | None = None,
) -> TextBatch:
    """A batch of clean texts.

    A null is left out: its row is among the drops. `repaired` marks texts in which something was
    replaced before. `num_read` counts rows that are not in `raw` too; None: there are none.
    """
    num_read = len(raw) if num_read is None else num_read
    if raw.null_count:
        repaired = None if repaired is None else np.delete(repaired, null_rows(raw))
        raw = raw.drop_null()
    texts, invalid = _valid(to_binary(raw))
    if repaired is not None:
        invalid = repaired if invalid is None else invalid | repaired
    texts = _without_crlf(_without_bom(texts))
    filled = byte_lengths(texts) > 0
    num_kept = int(np.count_nonzero(filled))
    if num_kept < len(texts):
        texts = texts.filter(pa.array(filled))
    # A document with a replacement is never empty, so all of them are kept.
    num_invalid = 0 if invalid is None else int(np.count_nonzero(invalid))
    counts = {"empty": len(raw) - num_kept, "invalid_utf8": num_invalid}
    return TextBatch(
        texts=texts, num_read=num_read, counts=counts, drops=tuple(drops), cursor=cursor
    )


def string_batch(
    strings: Sequence[str],
    cursor: Cursor,
    *,
    num_repaired: int = 0,
    drops: Iterable[Drop] = (),
    num_read: int | None = None,
) -> TextBatch:
    """As `make_batch`, of Python strings without lone surrogates, which the batch keeps: engines
    take nothing else. Something was replaced in `num_repaired` of them."""
    clean = [
        unix_lines(text.removeprefix(BOM)) if "\r" in text or text.startswith(BOM) else text
        for text in strings
    ]
    kept = list(filter(None, clean))
    return TextBatch(
        texts=cast(Any, partial(_encoded, kept)),
        strings=kept,
        sizes=np.fromiter(map(_utf8_size, kept), np.int64, len(kept)),
        num_read=len(strings) if num_read is None else num_read,
        counts={"empty": len(clean) - len(kept), "invalid_utf8": num_repaired},
        drops=tuple(drops),
        cursor=cursor,
    )


def null_rows(array: pa.Array) -> list[int]:
    """The numbers of the nulls."""
    if not array.null_count:
        return []
    found: list[int] = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist()
    return found


def strings_to_arrow(texts: Sequence[str | None]) -> tuple[pa.LargeStringArray, Mask | None]:
    """Python strings as Arrow, lone surrogates replaced; None becomes null.

    The mask says where something was replaced; None when nothing was, as nearly always.
    """
    try:
        return _encoded(texts), None
    except UnicodeEncodeError:
        repaired = [None if text is None else replace_surrogates(text) for text in texts]
        pairs = zip(texts, repaired, strict=True)
        changed = np.array([before != after for before, after in pairs], np.bool_)
        return pa.array(repaired, pa.large_string()), changed


def _encoded(texts: Sequence[str | None]) -> pa.LargeStringArray:
    if None in texts:
        return pa.array(texts, pa.large_string())
    # As quick as pa.array, which imports pandas first where that is installed: 0.3 s.
    parts = [text.encode() for text in texts if text is not None]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=offsets[1:])
    buffers = pa.py_buffer(offsets), pa.py_buffer(b"".join(parts))
    return pa.LargeStringArray.from_buffers(len(parts), *buffers)


def _utf8_size(text: str) -> int:
    """Bytes in UTF-8, which the string keeps: engines ask for them again, and to encode it twice is
    a tenth of all the work on web pages."""
    if text.isascii():
        return len(text)
    if len(text) > 2**20:  # too large to hold twice
        return len(text.encode())
    size = len(msgspec.msgpack.encode(text))  # with a header: of up to 31, 255, 65,535 bytes, ...
    return size - (1 if size <= 32 else 2 if size <= 257 else 3 if size <= 2**16 + 2 else 5)


def sizes_of(batch: TextBatch) -> OffsetArray:
    """UTF-8 bytes of each text."""
    return byte_lengths(batch.texts) if batch.sizes is None else batch.sizes


def replace_surrogates(text: str) -> str:
    """Half a surrogate pair has no UTF-8: it becomes U+FFFD."""
    return _LONE_SURROGATE.sub(REPLACEMENT, text)


def unix_lines(text: str) -> str:
    """CR LF becomes LF."""
    return text.replace("\r\n", "\n") if "\r" in text else text


def to_binary(array: pa.Array) -> pa.LargeBinaryArray:
    """As a cast to large binary, without a copy of the texts. Arrow's own imports pyarrow.compute,
    which is 40 ms of a worker's start."""
    is_narrow = array.type in (pa.string(), pa.binary())
    if not len(array) or not (is_narrow or array.type in (pa.large_string(), pa.large_binary())):
        return array.cast(pa.large_binary())
    valid, offsets, data = array.buffers()
    if is_narrow:
        offsets = pa.py_buffer(np.frombuffer(offsets, np.int32).astype(np.int64))
    kind, buffers = pa.large_binary(), [valid, offsets, data]
    return pa.Array.from_buffers(kind, len(array), buffers, offset=array.offset)


def _valid(raw: pa.LargeBinaryArray) -> tuple[pa.LargeStringArray, Mask | None]:
    kind, buffers = pa.large_string(), raw.buffers()
    texts = pa.Array.from_buffers(kind, len(raw), buffers, offset=raw.offset)
    try:
        texts.validate(full=True)
        return texts, None
    except pa.ArrowInvalid:
        found = raw.to_pylist()
        texts = [data.decode("utf-8", "replace") for data in found]
        changed = [text.encode() != data for text, data in zip(texts, found, strict=True)]
        return _encoded(texts), np.array(changed, np.bool_)


def _without_bom(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    edges, data = _edges(texts), _data(texts)
    size = len(BOM_BYTES)
    firsts = edges[:-1][np.diff(edges) >= size] - edges[0]
    for number, byte in enumerate(BOM_BYTES):  # a look at a few bytes of each text
        firsts = firsts[data[firsts + number] == byte]
    return _without_bytes(texts, np.repeat(firsts, size) + np.tile(np.arange(size), len(firsts)))


def _without_crlf(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    edges, data = _edges(texts), _data(texts)
    if b"\r" not in data.tobytes():  # quicker than any comparison, and most text has none
        return texts
    returns = np.flatnonzero(data[:-1] == _RETURN)
    returns = returns[data[returns + 1] == _NEWLINE]
    stops = edges[np.searchsorted(edges, returns + edges[0], side="right")] - edges[0]
    return _without_bytes(texts, returns[returns + 1 < stops])


def _without_bytes(texts: pa.LargeStringArray, positions: OffsetArray) -> pa.LargeStringArray:
    """Without the bytes at these positions of `_data`, which are ascending."""
    if not len(positions):
        return texts
    edges = _edges(texts) - _edges(texts)[0]
    edges -= np.searchsorted(positions, edges)
    data = np.delete(_data(texts), positions)
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(edges), pa.py_buffer(data))


def byte_lengths(texts: pa.LargeStringArray | pa.LargeBinaryArray) -> OffsetArray:
    """Bytes of each text; of a null, usually 0."""
    return np.diff(_edges(texts))


def _data(texts: pa.LargeStringArray) -> npt.NDArray[np.uint8]:
    """The bytes of all texts, without copying."""
    data = texts.buffers()[2]
    if data is None or len(texts) == 0:
        return np.empty(0, np.uint8)
    edges = _edges(texts)
    return np.frombuffer(data, np.uint8)[edges[0] : edges[-1]]


def _edges(texts: pa.LargeStringArray | pa.LargeBinaryArray) -> OffsetArray:
    # Arrow's own functions would do, but taking a Python number they import pandas: 0.3 s.
    if len(texts) == 0:
        return np.zeros(1, np.int64)
    edges = np.frombuffer(texts.buffers()[1], np.int64)
    return edges[texts.offset : texts.offset + len(texts) + 1]


def choose_field(fields: Iterable[tuple[str, bool]], *, wanted: str | None, where: str) -> str:
    """The wanted field; else "text"; else the first field that holds a string, which is logged.

    `fields` are pairs of a name and whether it holds a string, in the input's order.
    """
    known = dict(fields)
    listed = f"found the fields {', '.join(map(repr, known)) or 'none'}"
    if wanted is not None:
        if wanted not in known:
            raise SourceError(f"{where}: no field {wanted!r}; {listed}")
        return wanted
    if "text" in known:
        return "text"
    for name, is_string in known.items():
        if is_string:
            logger.info("%s: no field 'text'; the documents are read from %r", where, name)
            return name
    raise SourceError(
        f"{where}: neither a field 'text' nor any string field; {listed}; name the one that holds "
        "the documents with {field}",
        field=...,
    )


def cut(lengths: IntArray, limits: BatchLimits) -> list[tuple[int, int]]:
    """Cover `range(len(lengths))` with as few consecutive ranges as the limits allow."""
    edges = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    pieces = []
    start = 0
    while start < len(lengths):
        full = int(np.searchsorted(edges, edges[start] + limits.num_bytes, side="right")) - 1
        stop = min(max(full, start + 1), start + limits.num_documents, len(lengths))
        pieces.append((start, stop))
        start = stop
    return pieces


def coalesce(batches: Iterable[TextBatch], limits: BatchLimits) -> Iterator[TextBatch]:
    """Join neighbours while they fit; a joined batch has the cursor of its last part. At most one
    batch is read ahead."""
    sized = ((batch, int(sizes_of(batch).sum()), batch.num_read) for batch in batches)
    return (_joined(group) for group in grouped(sized, limits))  # unlike a map, it can be closed


def grouped(items: Iterable[tuple[_T, int, int]], limits: BatchLimits) -> Iterator[list[_T]]:
    """Neighbours in lists that keep within the limits; each comes with its bytes of text and its
    number of rows. One that alone is larger is a list by itself. A full list is given at once."""
    most_bytes, most_rows = limits.num_bytes, limits.num_documents
    held: list[_T] = []
    num_bytes = num_rows = 0
    for item, more_bytes, more_rows in items:
        num_bytes += more_bytes
        num_rows += more_rows
        if (num_bytes > most_bytes or num_rows > most_rows) and held:
            yield held
            held, num_bytes, num_rows = [], more_bytes, more_rows
        held.append(item)
        if num_bytes >= most_bytes or num_rows >= most_rows:
            yield held
            held, num_bytes, num_rows = [], 0, 0
    if held:
        yield held


def utf8_bytes(text: str) -> int:
    """Bytes of a text in UTF-8; half a surrogate pair counts as three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _joined(batches: list[TextBatch]) -> TextBatch:
    if len(batches) == 1:
        return batches[0]
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(batch.counts)
    strings = _joined_strings(batches)
    texts: Any = None if strings is None else partial(_encoded, strings)
    if texts is None:
        texts = pa.concat_arrays([batch.texts for batch in batches])
    return TextBatch(
        texts=texts,
        strings=strings,
        sizes=None if strings is None else np.concatenate(list(map(sizes_of, batches))),
        num_read=sum(batch.num_read for batch in batches),
        counts=dict(counts),
        drops=tuple(drop for batch in batches for drop in batch.drops),
        num_rows=sum(batch.num_rows for batch in batches),
        cursor=batches[-1].cursor,
    )


def _joined_strings(batches: list[TextBatch]) -> list[str] | None:
    strings: list[str] = []
    for batch in batches:
        if batch.strings is None:
            return None
        strings += batch.strings
    return strings


def counts_of(cursor: JSON, keys: tuple[str, ...], source: str) -> tuple[int, ...]:
    """The counts of a cursor that holds exactly `keys`."""
    return fields_of(cursor, keys, source, counts=keys)


def fields_of(
    cursor: JSON, keys: tuple[str, ...], source: str, *, counts: tuple[str, ...] = ()
) -> tuple[Any, ...]:
    """The values of a cursor that holds exactly `keys`, some of them counts."""
    if not isinstance(cursor, dict) or set(cursor) != set(keys):
        raise _bad_cursor(cursor, source, f"wanted exactly the keys {', '.join(map(repr, keys))}")
    for key in counts:
        value = cursor[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _bad_cursor(cursor, source, f"{key!r} must be a count, 0 or more")
    return tuple(cursor[key] for key in keys)


def _bad_cursor(cursor: JSON, source: str, wanted: str) -> SourceError:
    return SourceError(
        f"source {source!r} cannot resume from the cursor {cursor!r:.200}: {wanted}; "
        "use a cursor of this kind of source, or start over"
    )


def runs(sizes: Iterable[int | None], num_bytes: int) -> Iterator[tuple[int, int]]:
    """Half-open runs of neighbours that together have at most `num_bytes`; one that is larger, or
    whose size is None, is a run by itself."""
    start = stop = 0
    total: float = 0
    for size in sizes:
        weight = math.inf if size is None else size
        if start < stop and (total + weight > num_bytes or stop - start == MAX_RUN):
            yield start, stop
            start, total = stop, 0
        stop += 1
        total += weight
    if start < stop:
        yield start, stop


def limited(source: _T, num_bytes: int) -> _T:
    """The same source, which refuses a document over `num_bytes`. Names, descriptions, batches and
    cursors stay. A source without such a bound, such as a user's own, is returned as it is."""
    limit = getattr(source, "limited", None)
    found: _T = limit(num_bytes) if callable(limit) else source
    return found


def stamp_of(source: Source | ConversationSource) -> JSON:
    """What must not change between a stop and a resume on this machine, such as file times; None
    when the source has no stamp. It stays in a build's work folder and never reaches a store."""
    stamp = getattr(source, "stamp", None)
    found: JSON = stamp() if callable(stamp) else None
    return found


def name_of(where: Where) -> str:
    """A short name for input the caller did not name, without absolute paths or secrets: "books"
    for "data/books/", "a.jsonl" for "data/a.jsonl"."""
    if isinstance(where, str | Path):
        path = Path(str(Url(str(where))))
        return path.name or path.resolve().name or "files"
    return name_of(where[0]) if len(where) == 1 else f"{len(where)} files"
