"""Files, hub datasets and Python values as documents or conversations.

A source gives bounded batches; from the cursor of any batch a fresh source gives exactly the rest.
Every row read is a document or conversation, an empty one, or a drop with an id and a reason.
"""

from shardmill.sources.batches import BatchLimits, limited, stamp_of
from shardmill.sources.conversations import ChatSource
from shardmill.sources.formats.archives import TarSource, ZipSource
from shardmill.sources.formats.arrow import ArrowSource
from shardmill.sources.formats.csv import CsvSource, TsvSource
from shardmill.sources.formats.json_array import JsonSource
from shardmill.sources.formats.jsonl import JsonlSource, iter_jsonl_rows
from shardmill.sources.formats.parquet import ParquetSource
from shardmill.sources.formats.text import TextSource
from shardmill.sources.hub import HubParquetSource, HubSource, iter_rows, open_hub
from shardmill.sources.memory import MemoryChats, MemorySource
from shardmill.sources.open import open_chats, open_source, open_texts, texts_of
from shardmill.sources.shapes import CHAT_REASONS, SHAPES
from shardmill.sources.source import ConcatSource
from shardmill.storage.hub import HubOptions

__all__ = [
    "ZipSource",
    "TsvSource",
    "TarSource",
    "JsonSource",
    "CsvSource",
    "ArrowSource",
    "BatchLimits",
    "CHAT_REASONS",
    "ChatSource",
    "ConcatSource",
    "HubOptions",
    "HubParquetSource",
    "HubSource",
    "JsonlSource",
    "MemoryChats",
    "MemorySource",
    "ParquetSource",
    "SHAPES",
    "TextSource",
    "iter_jsonl_rows",
    "iter_rows",
    "limited",
    "open_chats",
    "open_hub",
    "open_source",
    "open_texts",
    "stamp_of",
    "texts_of",
]
