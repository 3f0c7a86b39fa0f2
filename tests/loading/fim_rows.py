"""Documents for tests of fill in the middle, and rows put back into their order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from shardmill.loading import FimOptions, FimTokens
from shardmill.records import Ragged
from shardmill.testing.stores import build_small_store

PREFIX, SUFFIX, MIDDLE, END = range(4)
TOKENS = FimTokens(prefix=PREFIX, suffix=SUFFIX, middle=MIDDLE, end=END)


def options(rate: object = 1.0, **more: object) -> FimOptions:
    return FimOptions(rate=rate, tokens=TOKENS, **more)  # type: ignore[arg-type]


def document_lists(most: int = 30) -> st.SearchStrategy[list[int]]:
    """Lengths of documents, without their end."""
    return st.lists(st.integers(0, most), min_size=20, max_size=60)


def documents_of(lengths: list[int]) -> Ragged:
    """Documents of ids that count up from 4, each with its end: every token is another one."""
    numbers, parts = iter(range(END + 1, 2**31)), []
    for length in lengths:
        parts.append([*(next(numbers) for _ in range(length)), END])
    return Ragged.from_sequences(parts)


def write_store(folder: Path, lengths: list[int]) -> Ragged:
    documents = documents_of(lengths)
    build_small_store(folder, {"train": documents}, dtype="uint32")
    return documents


def put_back(row: list[int]) -> tuple[list[int], list[tuple[list[int], list[int], list[int]]]]:
    """The row with every document in its own order, token by token, and (prefix, middle, suffix)
    of those that were rearranged."""
    whole, parts, at = list[int](), [], 0
    while at < len(row):
        if row[at] != PREFIX:
            assert row[at] not in (SUFFIX, MIDDLE), "a mark outside a document"
            whole.append(row[at])
            at += 1
            continue
        suffix, middle = row.index(SUFFIX, at), row.index(MIDDLE, at)
        end = row.index(END, middle)
        assert at < suffix < middle < end
        part = row[at + 1 : suffix], row[middle + 1 : end], row[suffix + 1 : middle]
        assert not {PREFIX, SUFFIX, MIDDLE} & {token for one in part for token in one}
        whole += [token for one in part for token in one]
        parts.append(part)
        at = end
    return whole, parts


def rows_of(batch: object) -> list[list[int]]:
    """The rows of a batch of a store, whose labels are all trained."""
    ids, labels = batch.input_ids, batch.labels  # type: ignore[attr-defined]
    return np.concatenate((ids, labels[:, -1:]), axis=1).tolist()
