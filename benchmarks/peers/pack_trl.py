"""TRL: `bfd_split` on one table, which it packs better than in the batches of a `map`.

It takes lists of tokens and moves them; they are of one byte here. Its rows tell the lengths of
their sequences, not which they are: equal lengths are told apart by the order they come in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from trl.data_utils import _pack_bfd

from peers.packers import Numbers, Rows


def prepare(lengths: Numbers, _capacity: int) -> Any:
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = pa.array(np.zeros(offsets[-1], dtype=np.uint8))
    if offsets[-1] < 2**31:
        lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), tokens)
    else:
        lists = pa.LargeListArray.from_arrays(pa.array(offsets), tokens)
    return pa.table({"input_ids": lists})


def pack(table: Any, capacity: int) -> Any:
    return _pack_bfd(table, capacity, "split")


def rows(packed: Any, lengths: Numbers) -> Rows:
    lists = packed["seq_lengths"].combine_chunks()
    told = lists.values.to_numpy()
    by_told, by_length = np.argsort(told, kind="stable"), np.argsort(lengths, kind="stable")
    if not np.array_equal(told[by_told], lengths[by_length]):
        raise ValueError("TRL: its rows hold other lengths than it was given")
    counts = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    held = np.diff(packed["input_ids"].combine_chunks().offsets.to_numpy())
    if not np.array_equal(held, np.add.reduceat(told, np.cumsum(counts) - counts)):
        raise ValueError("TRL: its rows hold other tokens than their sequences have")
    items = np.empty(len(told), dtype=np.int64)
    items[by_told] = by_length
    return Rows(items=items, counts=counts)
