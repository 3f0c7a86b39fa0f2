"""The store on disk: the only room that knows bytes. FORMAT.md is its contract.

In: ragged token ids, rendered conversations.  Out: a folder that proves what it
is, or a clear refusal to open it.
"""

from __future__ import annotations

from shardmill.shards.entries import (
    ChatEntry,
    ChatLedger,
    DocumentLedger,
    FileEntry,
    Ledger,
    Manifest,
    ShardEntry,
    SplitEntry,
    StoreFacts,
    TokenLedger,
    empty_ledger,
)
from shardmill.shards.fit import check_tokens, fit_tokens
from shardmill.shards.layout import check_shape
from shardmill.shards.manifest import read_manifest, write_manifest, write_placeholder
from shardmill.shards.maps import ChatArrays
from shardmill.shards.publish import check_target, is_finished, publish_folder
from shardmill.shards.store import Store, open_store
from shardmill.shards.verify import VerifyReport, verify_store
from shardmill.shards.writer import StoreWriter

__all__ = [
    "ChatArrays",
    "ChatEntry",
    "ChatLedger",
    "DocumentLedger",
    "FileEntry",
    "Ledger",
    "Manifest",
    "ShardEntry",
    "SplitEntry",
    "Store",
    "StoreFacts",
    "StoreWriter",
    "TokenLedger",
    "VerifyReport",
    "check_shape",
    "check_target",
    "check_tokens",
    "empty_ledger",
    "fit_tokens",
    "is_finished",
    "open_store",
    "publish_folder",
    "read_manifest",
    "verify_store",
    "write_manifest",
    "write_placeholder",
]
