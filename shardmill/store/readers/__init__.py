"""Shards -> random access without copying more than what was asked for.

In: a store's split, a folder of token files, or any list of `TokenFile`.
Out: `(n, length)` arrays of ids, and which document each belongs to.
Promise: many files, of either dtype, read as one run of tokens; a window may lie across any number
of files; at most `max_maps` files are mapped; no file is read that changed since it was opened.
Not here: bytes on disk (shards), order and epochs (sampling), masks, shifting, batches.
"""

from __future__ import annotations

from shardmill.store.readers.documents import DocumentBatch, DocumentWindows, Segments
from shardmill.store.readers.examples import ChatSpace, Example, SplitView
from shardmill.store.readers.foreign import TokenFolder, open_token_folder
from shardmill.store.readers.packed_rows import PackedRows, PackSpace, RowPieces, open_pack
from shardmill.store.readers.token_space import TokenSpace, Windows, open_tokens

__all__ = [
    "ChatSpace",
    "DocumentBatch",
    "DocumentWindows",
    "Example",
    "PackSpace",
    "PackedRows",
    "RowPieces",
    "Segments",
    "SplitView",
    "TokenFolder",
    "TokenSpace",
    "Windows",
    "open_pack",
    "open_token_folder",
    "open_tokens",
]
