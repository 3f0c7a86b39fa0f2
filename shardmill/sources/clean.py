"""Make raw texts fit to be documents.

In: an Arrow array of strings or bytes without nulls.  Out: valid, non-empty texts and two counts.
Promise: invalid UTF-8 and lone surrogates become U+FFFD, one leading BOM goes, CR LF becomes LF;
nothing else changes (a lone CR and white space stay). Only "" is empty. Each document is treated
alone, so how documents are grouped never matters.
Not here: finding documents in files. Whole arrays at a time; Python touches single documents only
in an array that holds an invalid one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

BOM = "\ufeff"
BOM_BYTES = b"\xef\xbb\xbf"
REPLACEMENT = "\ufffd"

Mask = npt.NDArray[np.bool_]

_CARRIAGE_RETURN = 13
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
    filled = pc.greater(pc.binary_length(texts), 0)
    num_kept = pc.sum(filled).as_py() or 0
    if num_kept < len(texts):
        texts = texts.filter(filled)
    # Never empty, so always kept: a document with a replacement holds at least that one.
    num_invalid = 0 if invalid is None else int(np.count_nonzero(invalid))
    return Cleaned(texts=texts, counts={"empty": len(raw) - num_kept, "invalid_utf8": num_invalid})


def strings_to_arrow(texts: Sequence[str | None]) -> tuple[pa.LargeStringArray, Mask | None]:
    """Python strings as Arrow, lone surrogates replaced; None becomes null.

    The mask says where something was replaced; None when nothing was, as nearly always.
    """
    try:
        return pa.array(texts, pa.large_string()), None
    except UnicodeEncodeError:
        repaired = [None if text is None else replace_surrogates(text) for text in texts]
        pairs = zip(texts, repaired, strict=True)
        changed = np.array([before != after for before, after in pairs], np.bool_)
        return pa.array(repaired, pa.large_string()), changed


def replace_surrogates(text: str) -> str:
    """Half of a surrogate pair is no character and has no UTF-8: it becomes U+FFFD."""
    return _LONE_SURROGATE.sub(REPLACEMENT, text)


def _valid(raw: pa.LargeBinaryArray) -> tuple[pa.LargeStringArray, Mask | None]:
    try:
        return raw.cast(pa.large_string()), None
    except pa.ArrowInvalid:
        texts = [data.decode("utf-8", "replace") for data in raw.to_pylist()]
        fixed = pa.array(texts, pa.large_string())
        changed = pc.not_equal(fixed.cast(pa.large_binary()), raw)
        return fixed, changed.to_numpy(zero_copy_only=False)


def _without_bom(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    marked = pc.starts_with(texts, BOM)
    if not pc.any(marked).as_py():
        return texts
    return pc.if_else(marked, pc.utf8_slice_codeunits(texts, 1), texts)


def _without_crlf(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    # Looking for the byte is many times quicker than replacing, and most text has none.
    if not (_data(texts) == _CARRIAGE_RETURN).any():
        return texts
    return pc.replace_substring(texts, "\r\n", "\n")


def _data(texts: pa.LargeStringArray) -> npt.NDArray[np.uint8]:
    """The bytes of all texts, without copying."""
    _, offsets, data = texts.buffers()
    if data is None or len(texts) == 0:
        return np.empty(0, np.uint8)
    edges = np.frombuffer(offsets, np.int64)
    start, stop = edges[texts.offset], edges[texts.offset + len(texts)]
    return np.frombuffer(data, np.uint8)[start:stop]
