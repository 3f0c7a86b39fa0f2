"""The tokenizer of a store, opened by name.

In: a name, special tokens, stores.  Out: a Tokenizer; the ids that are structure.
Promise: a tokenizer is used for a store only if it is the one that the store was built with; other
words would be shown for its ids.
Not here: flags (cli), texts of single tokens (words).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardmill.blame.proof import made_by
from shardmill.errors import OptionError
from shardmill.protocols import Tokenizer
from shardmill.records import IntArray
from shardmill.shards import Manifest, Store
from shardmill.tokenizer import open_tokenizer


def open_named(name: str, specials: Mapping[str, str] | None, *stores: Store) -> Tokenizer:
    """The tokenizer `name`, refused unless it is that of all these stores."""
    opened = open_tokenizer(name, specials=specials)
    for store in stores:
        problem = mismatch(name, opened, store.manifest)
        if problem is not None:
            raise OptionError(problem)
    return opened


def mismatch(name: str, opened: Tokenizer, manifest: Manifest) -> str | None:
    """Why this tokenizer does not read the ids of this store; None when it does."""
    if made_by(manifest, opened):
        return None
    return (
        f"--tokenizer {name}: not the tokenizer of this store (fingerprint "
        f"{opened.fingerprint[:16]}, the store's is "
        f"{(manifest.tokenizer_fingerprint or 'unknown')[:16]}); its ids would be read as "
        "other words: name the one that the store was built with, with the same --special"
    )


def marker_ids(*stores: Store) -> IntArray:
    """The ids that are structure, not text."""
    found: set[int] = set()
    for manifest in (store.manifest for store in stores):
        chat = manifest.options.get("chat", {})
        found |= {*manifest.special_token_ids.values(), *chat.get("marker_ids", ())}
    return np.array(sorted(found), np.int64)
