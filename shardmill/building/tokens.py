"""What happens to encoded documents before they are written: their dtype, and the end token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardmill.building.plan import BuildSpec
from shardmill.errors import OptionError
from shardmill.protocols import Tokenizer
from shardmill.records import IntArray, OffsetArray, Ragged
from shardmill.store.layout import check_tokens, fit_tokens
from shardmill.tokenizers import vocab_size_of

_LONG_DOCUMENT = 300  # tokens


def append_to_each(documents: Ragged, token: int, dtype: npt.DTypeLike) -> Ragged:
    """Each document followed by `token`, in `dtype`, which holds every id.

    [4 5 | 6] with 9 -> [4 5 9 | 6 9]: document i moves right by i.
    """
    offsets = documents.offsets + np.arange(len(documents) + 1)
    if len(documents.values) > _LONG_DOCUMENT * len(documents):
        # Few long documents: joining their bytes is quicker than a mask over every token.
        ids: IntArray = documents.values.astype(dtype, copy=False)
        data, edges = ids.view(np.uint8).data, documents.offsets * ids.itemsize
        parts = [data[start:stop] for start, stop in pairwise(edges.tolist())]
        end = np.array([token], ids.dtype).tobytes()
        return Ragged(np.frombuffer(end.join((*parts, b"")), ids.dtype), offsets)
    values: IntArray = np.empty(offsets[-1], dtype)
    is_text = np.ones(len(values), bool)
    is_text[offsets[1:] - 1] = False
    values[is_text] = documents.values
    values[offsets[1:] - 1] = token
    return Ragged(values, offsets)


def _choose_dtype(dtype: str | None, vocab_size: int | None) -> str:
    """The dtype of the shards: as asked, else the narrowest that holds the vocabulary."""
    if dtype not in (None, "uint16", "uint32"):
        raise OptionError("{dtype}: wanted 'uint16' or 'uint32'", dtype=dtype)
    if vocab_size is None:
        if dtype is None:
            raise OptionError(
                "this tokenizer does not know its vocab_size, so the dtype of the shards cannot be "
                "chosen: give {dtype}, 'uint16' or 'uint32'",
                dtype=...,
            )
        return dtype
    needed = "uint16" if vocab_size <= 2**16 else "uint32"
    if dtype == "uint16" and needed == "uint32":
        raise OptionError(
            f"{vocab_size:,} ids do not fit uint16 shards (65,536): build with {{dtype}}",
            dtype="uint32",
        )
    return dtype or needed


def _end_id(tokenizer: Tokenizer) -> int:
    """The id appended to each document."""
    specials = tokenizer.special_token_ids()
    if "eot" not in specials:
        raise OptionError(
            "this tokenizer names no 'eot' token to append to each document (it names "
            f"{sorted(specials) or 'none'}): name one with {{eot}} ('byte:1' in place of 'byte' "
            "has an id for it), or build with {append_eot}",
            eot=...,
            append_eot=False,
        )
    return specials["eot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What happens to encoded documents before they are written."""

    dtype: str
    vocab_size: int | None
    end_id: int | None

    @classmethod
    def of(cls, spec: BuildSpec, tokenizer: Tokenizer) -> TokenRules:
        vocab_size = vocab_size_of(tokenizer)
        return cls(
            dtype=_choose_dtype(spec.dtype, vocab_size),
            vocab_size=vocab_size,
            end_id=_end_id(tokenizer) if spec.append_eot else None,
        )

    def fit(self, ids: Ragged, *, source: str, first: int) -> Ragged:
        """The same ids in the store's dtype; `first` is the number of documents before these."""
        return fit_tokens(ids, self.dtype, vocab_size=self.vocab_size, where=source, first=first)

    def apply(self, ids: Ragged, *, source: str, first: int) -> tuple[Ragged, tuple[int, ...]]:
        """The documents as they are stored, and the positions of those without any token."""
        void = np.flatnonzero(ids.lengths == 0)
        positions = tuple(void.tolist())
        if self.end_id is None:
            documents = self.fit(ids, source=source, first=first)
            return _without(documents, void), positions
        # One pass for both: the cast is part of the copy that makes space for the end token.
        check_tokens(ids, self.dtype, vocab_size=self.vocab_size, where=source, first=first)
        stored = np.dtype(self.dtype).newbyteorder("<")
        return append_to_each(_without(ids, void), self.end_id, stored), positions


def _without(documents: Ragged, void: OffsetArray) -> Ragged:
    """Without the documents `void`, which hold no token."""
    if not len(void):
        return documents
    return Ragged(documents.values, np.delete(documents.offsets, void + 1))
