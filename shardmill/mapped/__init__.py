"""Shards -> random access without copying more than what was asked for.

In: a store's split, or any list of `TokenFile`.  Out: `(n, length)` arrays of ids.
Promise: many files, of either dtype, read as one run of tokens; a window may lie across any number
of files; at most `max_maps` files are mapped; no file is read that changed since it was opened.
Not here: bytes on disk (shards), order and epochs (sampling), masks, shifting, batches.
"""

from __future__ import annotations

from shardmill.mapped.space import TokenSpace, open_tokens
from shardmill.mapped.windows import Windows

__all__ = ["TokenSpace", "Windows", "open_tokens"]
