"""shardmill: text and chats to training batches, checked at every step."""

from shardmill.errors import ShardmillError
from shardmill.records import IGNORE_INDEX, Ragged, TextBatch, TokenFile

__version__ = "0.1.0"
__all__ = ["IGNORE_INDEX", "Ragged", "ShardmillError", "TextBatch", "TokenFile", "__version__"]
