"""Files and hubs become documents, with a cursor that resumes exactly.

In: files, folders, globs, hub datasets, Python strings.  Out: `TextBatch`es (see `records`).
Promise: bounded batches; from the cursor of any batch a fresh source gives exactly the rest; every
row read is a document, an empty one, or a drop with an id and a reason.
Not here: tokens, splits, chats (rows of chats are given as plain dicts).
"""

from shardmill.sources.batching import BatchLimits
from shardmill.sources.concat import ConcatSource
from shardmill.sources.hubsource import HubOptions, HubSource, iter_rows
from shardmill.sources.jsonl import JsonlSource
from shardmill.sources.memory import MemorySource
from shardmill.sources.open import open_source
from shardmill.sources.parquet import ParquetSource
from shardmill.sources.rows import iter_jsonl_rows
from shardmill.sources.stamp import stamp_of
from shardmill.sources.text import TextSource

__all__ = [
    "BatchLimits",
    "ConcatSource",
    "HubOptions",
    "HubSource",
    "JsonlSource",
    "MemorySource",
    "ParquetSource",
    "TextSource",
    "iter_jsonl_rows",
    "iter_rows",
    "open_source",
    "stamp_of",
]
