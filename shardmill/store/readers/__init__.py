"""Random access to token files: one `gather` over many shards, and views of documents and rows.

Many files are read as one run of tokens; a window may cross any number of them. No file is read
that changed since it was opened.
"""

from __future__ import annotations

from shardmill.store.readers.documents import (
    ChatSpace,
    DocumentBatch,
    DocumentWindows,
    Example,
    Segments,
    SplitView,
)
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
