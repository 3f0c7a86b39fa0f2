"""From a token of a store to where it came from: file, row and characters.

In: a store, the position of a token, the input that the store was built from, its tokenizer.
Out: a `Blame`.
Promise: the row is read again by the code that built the store, encoded again and compared with the
stored ids; what is not equal is an error, never an answer.
Not here: the table that makes it quick (shards, build), looking for text in a store.
"""

from __future__ import annotations

from shardmill.blame.records import Blame
from shardmill.blame.tokens import blame_document, blame_token, blame_tokens

__all__ = ["Blame", "blame_document", "blame_token", "blame_tokens"]
