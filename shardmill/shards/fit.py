"""Ids into the dtype of a store, or a refusal that names the id.

In: ragged ids of any integer dtype.  Out: the same ids in the dtype of a store.
Promise: an id is stored as it is or refused by name. numpy wraps int64 into uint16 without a
word, so every cast of ids goes through here.
Not here: which dtype a store should have.
"""

from __future__ import annotations

import numpy as np

from shardmill.errors import OptionError, TokenRangeError
from shardmill.records import Ragged
from shardmill.shards.layout import ITEMSIZE, check_dtype


def fit_tokens(
    documents: Ragged, dtype: str, *, vocab_size: int | None = None, where: str = "", first: int = 0
) -> Ragged:
    """The same documents in `dtype`, little-endian; not copied when they are so already.

    `first` is the number of documents of `where` before these, for the message.
    """
    check_tokens(documents, dtype, vocab_size=vocab_size, where=where, first=first)
    stored = np.dtype(dtype).newbyteorder("<")
    return Ragged(documents.values.astype(stored, copy=False), documents.offsets)


def check_tokens(
    documents: Ragged, dtype: str, *, vocab_size: int | None = None, where: str = "", first: int = 0
) -> None:
    """Refuse the first document with an id that is negative, too wide or outside the vocabulary."""
    check_dtype(dtype)
    _check_shape(documents, where or "documents")
    values = documents.values
    most = 2 ** (8 * ITEMSIZE[dtype])
    limit = most if vocab_size is None else min(most, vocab_size)
    narrow = values.dtype.kind == "u" and 2 ** (8 * values.dtype.itemsize) <= limit
    if len(values) == 0 or narrow:
        return
    if int(values.max()) < limit and (values.dtype.kind == "u" or int(values.min()) >= 0):
        return
    position = int(np.flatnonzero((values < 0) | (values >= limit))[0])
    found = int(values[position])
    number = int(np.searchsorted(documents.offsets, position, side="right")) - 1 + first
    raise TokenRangeError(
        f"{where + ', ' if where else ''}document {number:,}: token id {found:,} does not fit "
        f"{_advice(found, dtype, most, vocab_size)}"
    )


def _advice(found: int, dtype: str, most: int, vocab_size: int | None) -> str:
    if vocab_size is not None and not 0 <= found < vocab_size:
        return f"a vocabulary of {vocab_size:,} ids: the tokenizer contradicts itself"
    if found < 0:
        return f"{dtype}: an id is never negative, so the tokenizer is broken"
    if dtype == "uint16" and found < 2**32:
        return f"uint16, which ends at {most - 1:,}: build with dtype='uint32'"
    return f"{dtype}, and no store holds ids that large: the tokenizer is broken"


def _check_shape(documents: Ragged, where: str) -> None:
    values, offsets = documents.values, documents.offsets
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise OptionError(f"{where}: ids are {values.ndim}-d {values.dtype}, wanted 1-d integers")
    sound = offsets.ndim == 1 and len(offsets) > 0 and offsets.dtype == np.int64
    if not sound or offsets[0] != 0 or offsets[-1] != len(values):
        raise OptionError(
            f"{where}: offsets must be int64 from 0 to {len(values):,}, the number of ids"
        )
    if (offsets[1:] < offsets[:-1]).any():
        raise OptionError(f"{where}: offsets decrease, so a document would end before it starts")
