"""Make raw texts fit to be documents, and choose the field that holds them.

Invalid UTF-8 and lone surrogates become U+FFFD, one leading BOM is removed, CR LF becomes LF;
nothing else changes (a lone CR and white space stay), and only "" is empty. Each document is
cleaned alone, so grouping never matters. The work is done on whole Arrow arrays.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardmill.errors import SourceError
from shardmill.records import OffsetArray

BOM = "\ufeff"
BOM_BYTES = b"\xef\xbb\xbf"
REPLACEMENT = "\ufffd"

Mask = npt.NDArray[np.bool_]

logger = logging.getLogger(__name__)

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What a `TextBatch` needs: `len(raw) == len(texts) + counts["empty"]`."""

    texts: pa.LargeStringArray
    counts: dict[str, int]  # "empty" and "invalid_utf8" (kept documents with a replacement)


def clean(raw: pa.Array, *, repaired: Mask | None = None) -> Cleaned:
    """Clean every text. `repaired` marks those in which something was replaced before."""
    texts, invalid = _valid(raw.cast(pa.large_binary()))
    if repaired is not None:
        invalid = repaired if invalid is None else invalid | repaired
    texts = _without_crlf(_without_bom(texts))
    filled = byte_lengths(texts) > 0
    num_kept = int(np.count_nonzero(filled))
    if num_kept < len(texts):
        texts = texts.filter(pa.array(filled))
    # A document with a replacement is never empty, so all of them are kept.
    num_invalid = 0 if invalid is None else int(np.count_nonzero(invalid))
    return Cleaned(texts=texts, counts={"empty": len(raw) - num_kept, "invalid_utf8": num_invalid})


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


def replace_surrogates(text: str) -> str:
    """Half a surrogate pair has no UTF-8: it becomes U+FFFD."""
    return _LONE_SURROGATE.sub(REPLACEMENT, text)


def unix_lines(text: str) -> str:
    """CR LF becomes LF."""
    return text.replace("\r\n", "\n") if "\r" in text else text


def _valid(raw: pa.LargeBinaryArray) -> tuple[pa.LargeStringArray, Mask | None]:
    try:
        return raw.cast(pa.large_string()), None
    except pa.ArrowInvalid:
        texts = [data.decode("utf-8", "replace") for data in raw.to_pylist()]
        fixed = pa.array(texts, pa.large_string())
        changed = pc.not_equal(fixed.cast(pa.large_binary()), raw)
        return fixed, changed.to_numpy(zero_copy_only=False)


def _without_bom(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    edges, data = _edges(texts), _data(texts)
    firsts = edges[:-1][np.diff(edges) > 0] - edges[0]
    if not (data[firsts] == BOM_BYTES[0]).any():  # a look at one byte of each text
        return texts
    marked = pc.starts_with(texts, BOM)
    return pc.if_else(marked, pc.utf8_slice_codeunits(texts, 1), texts)


def _without_crlf(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    # Looking for the byte is many times quicker than replacing, and most text has none.
    if b"\r" not in _data(texts).tobytes():
        return texts
    return pc.replace_substring(texts, "\r\n", "\n")


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
