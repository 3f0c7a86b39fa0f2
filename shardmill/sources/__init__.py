"""Files and hubs become documents or conversations, with a cursor that resumes exactly.

In: files, folders, globs, hub datasets, Python values.
Out: `TextBatch`es or `ConversationBatch`es (see `records`).
Promise: bounded batches; from the cursor of any batch a fresh source gives exactly the rest; every
row read is a document or conversation, an empty one, or a drop with an id and a reason.
Not here: tokens, splits; whether a conversation makes sense.
"""

from shardmill.sources.appended import Appended, append_files, files_of, only_files
from shardmill.sources.batches import BatchLimits, limited, stamp_of
from shardmill.sources.chats.conversations import ChatSource
from shardmill.sources.chats.json_records import iter_jsonl_rows
from shardmill.sources.chats.shapes import CHAT_REASONS, SHAPES
from shardmill.sources.concat import ConcatSource
from shardmill.sources.formats.hub_parquet import HubParquetSource, open_hub
from shardmill.sources.formats.hub_source import HubOptions, HubSource, iter_rows
from shardmill.sources.formats.jsonl import JsonlSource
from shardmill.sources.formats.parquet import ParquetSource
from shardmill.sources.formats.text import TextSource
from shardmill.sources.memory import MemoryChats, MemorySource
from shardmill.sources.open import open_chats, open_source
from shardmill.sources.row_lookup import RowPlace, read_row, tells_rows

__all__ = [
    "Appended",
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
    "RowPlace",
    "SHAPES",
    "TextSource",
    "append_files",
    "files_of",
    "iter_jsonl_rows",
    "iter_rows",
    "limited",
    "only_files",
    "open_chats",
    "open_hub",
    "open_source",
    "read_row",
    "stamp_of",
    "tells_rows",
]
