"""Stores become training batches, with a position that resumes exactly.

`load` is the front door. Underneath, `TokenSource` and `PackSource` read rows, `SampleStream` puts
the rows of all sources in one order, and `Loader` is a position in that order.
"""

from __future__ import annotations

from shardmill.loading.api import load
from shardmill.loading.fim import FimCounts, FimOptions, FimTokens
from shardmill.loading.loader import Loader, SourceCounters
from shardmill.loading.order import PlannedSample, SampleStream, plan_step
from shardmill.loading.packed_rows import ChatRows, PackSource
from shardmill.loading.preferences import PreferenceBatch, PreferenceLoader, PreferenceSource
from shardmill.loading.rows import RowSource, TokenSource
from shardmill.records import Batch

__all__ = [
    "Batch",
    "ChatRows",
    "FimCounts",
    "FimOptions",
    "FimTokens",
    "Loader",
    "PackSource",
    "PlannedSample",
    "PreferenceBatch",
    "PreferenceLoader",
    "PreferenceSource",
    "RowSource",
    "SampleStream",
    "SourceCounters",
    "TokenSource",
    "load",
    "plan_step",
]
