"""OLMo-core: best fit, longest first, over a tree of the rooms in use.

It takes where each document starts and stops, and numbers documents by falling length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from olmo_core.data.utils import InstancePacker

from peers.packers import Numbers, Rows, rows_of_lists


def prepare(lengths: Numbers, _capacity: int) -> Any:
    stops = np.cumsum(lengths)
    return np.stack((stops - lengths, stops), axis=1).astype(np.uint64)


def pack(documents: Any, capacity: int) -> Any:
    return InstancePacker(capacity).pack_documents(documents)


def rows(packed: Any, lengths: Numbers) -> Rows:
    lists, documents, _ = packed
    falling = rows_of_lists(lists)
    starts = np.cumsum(lengths) - lengths
    item = np.searchsorted(starts, documents[:, 0].astype(np.int64))
    return Rows(items=item[falling.items], counts=falling.counts)
