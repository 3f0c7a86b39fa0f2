"""Files and hubs become documents or conversations, with a cursor that resumes exactly.

In: files, folders, globs, hub datasets, Python values.
Out: `TextBatch`es or `ConversationBatch`es (see `records`).
Promise: bounded batches; from the cursor of any batch a fresh source gives exactly the rest; every
row read is a document or conversation, an empty one, or a drop with an id and a reason.
Not here: tokens, splits; whether a conversation makes sense.
"""

from shardmill.sources.appended import Appended, append_files, files_of, only_files
from shardmill.sources.batches import BatchLimits, cut, limited, stamp_of, too_large
from shardmill.sources.chats.conversations import ChatSource
from shardmill.sources.chats.json_records import iter_jsonl_rows
from shardmill.sources.chats.shapes import CHAT_REASONS, SHAPES
from shardmill.sources.cleaning import byte_lengths
from shardmill.sources.concat import ConcatSource
from shardmill.sources.file_source import FileSource
from shardmill.sources.formats.hub_parquet import HubParquetSource, open_hub
from shardmill.sources.formats.hub_source import HubOptions, HubSource, iter_rows
from shardmill.sources.formats.jsonl import JsonlSource
from shardmill.sources.formats.parquet import ParquetSource
from shardmill.sources.formats.text import TextSource
from shardmill.sources.memory import MemoryChats, MemorySource
from shardmill.sources.open import is_hub_dataset, open_chats, open_source
from shardmill.sources.row_lookup import RowLocation, knows_rows, read_document

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
    "cut",
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
    "too_large",
    "knows_rows",
]
