"""Files, hub datasets and Python values as documents or conversations.

A source gives bounded batches; from the cursor of any batch a fresh source gives exactly the rest.
Every row read is a document or conversation, an empty one, or a drop with an id and a reason.
"""

from shardmill.sources.append import Appended, append_files, files_of, only_files
from shardmill.sources.batches import BatchLimits, byte_lengths, limited, stamp_of
from shardmill.sources.conversations import ChatSource
from shardmill.sources.formats.jsonl import JsonlSource, iter_jsonl_rows
from shardmill.sources.formats.parquet import ParquetSource
from shardmill.sources.formats.text import TextSource
from shardmill.sources.hub import HubParquetSource, HubSource, iter_rows, open_hub
from shardmill.sources.memory import MemoryChats, MemorySource
from shardmill.sources.open import is_hub_dataset, open_chats, open_source
from shardmill.sources.shapes import CHAT_REASONS, SHAPES
from shardmill.sources.source import (
    ConcatSource,
    FileSource,
    RowLocation,
    knows_rows,
    read_document,
)
from shardmill.storage.hub import HubOptions

__all__ = [
    "Appended",
    "BatchLimits",
    "CHAT_REASONS",
    "ChatSource",
    "ConcatSource",
    "FileSource",
    "HubOptions",
    "HubParquetSource",
    "HubSource",
    "JsonlSource",
    "MemoryChats",
    "MemorySource",
    "ParquetSource",
    "RowLocation",
    "SHAPES",
    "TextSource",
    "append_files",
    "byte_lengths",
    "files_of",
    "is_hub_dataset",
    "iter_jsonl_rows",
    "iter_rows",
    "limited",
    "only_files",
    "open_chats",
    "open_hub",
    "open_source",
    "read_document",
    "stamp_of",
    "knows_rows",
]
