"""Two stores become the list of what differs between them.

In: two finished stores on this machine.  Out: a `StoreDiff`.
Promise: stores are only read; files with equal hashes are not read at all; memory does not grow
with documents.
Not here: whether a store is damaged (`verify_store`), pack plans.
"""

from __future__ import annotations

from shardmill.compare.diff import diff_stores
from shardmill.compare.records import DocumentPlace, OrderBreak, SplitDocuments, StoreDiff

__all__ = ["DocumentPlace", "OrderBreak", "SplitDocuments", "StoreDiff", "diff_stores"]
