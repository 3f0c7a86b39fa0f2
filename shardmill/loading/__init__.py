"""The online half: what a store holds becomes rows for training.

In: stores and token folders, sequence length, weights, a seed.  Out: numpy arrays of one shape.
Promise: nothing is written; a new sequence length needs no new build; the order is a function of
its arguments, and a position in it is one number.
Not here: tensors (pytorch), what an order is (sampling).
"""

from __future__ import annotations

from shardmill.loading.api import load
from shardmill.loading.batch import SourceCounters
from shardmill.loading.loader import Loader
from shardmill.loading.order import PlannedSample, SampleStream, plan_step
from shardmill.loading.packed_rows import ChatRows, PackBatch, PackSource
from shardmill.loading.rows import RowSource, TokenSource
from shardmill.records import Batch

__all__ = [
    "Batch",
    "ChatRows",
    "Loader",
    "PackBatch",
    "PackSource",
    "PlannedSample",
    "RowSource",
    "SampleStream",
    "SourceCounters",
    "TokenSource",
    "load",
    "plan_step",
]
