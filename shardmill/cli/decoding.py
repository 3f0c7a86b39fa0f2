"""The tokenizer of a store, opened by name, and ids as text.

Promise: a tokenizer is used for a store only if it is the one that the store was built with; other
words would be shown for its ids. Without one, ids are shown, and that is said.
"""

from __future__ import annotations

import sys

import numpy as np

from shardmill.cli.show_text import Decode
from shardmill.cli.tokenizer import parse_specials
from shardmill.errors import OptionError
from shardmill.protocols import Tokenizer
from shardmill.records import IntArray
from shardmill.shards import Store


def open_named(name: str, special: list[str] | None, *stores: Store) -> Tokenizer:
    """The tokenizer `name`, refused unless it is that of all these stores."""
    from shardmill.tokenizer import model_sha256_of, open_tokenizer

    opened = open_tokenizer(name, specials=parse_specials(special) if special else None)
    for manifest in (store.manifest for store in stores):
        known = {manifest.tokenizer_fingerprint, manifest.tokenizer_sha256} - {None}
        if not known & {opened.fingerprint, model_sha256_of(opened)}:
            raise OptionError(
                f"--tokenizer {name}: not the tokenizer of this store (fingerprint "
                f"{opened.fingerprint[:16]}, the store's is "
                f"{(manifest.tokenizer_fingerprint or 'unknown')[:16]}); its ids would be read as "
                "other words: name the one that the store was built with, with the same --special"
            )
    return opened


def decoder(name: str | None, special: list[str] | None, *stores: Store) -> Decode:
    """Ids to text with the very tokenizer of the stores; without one, the ids themselves."""
    if name is None:
        print("shardmill: no --tokenizer, so ids are shown", file=sys.stderr)
        return lambda ids: " ".join(map(str, ids.tolist())) + " "
    opened = open_named(name, special, *stores)
    return lambda ids: opened.decode(ids)


def marker_ids(*stores: Store) -> IntArray:
    """The ids that are structure, not text."""
    found: set[int] = set()
    for manifest in (store.manifest for store in stores):
        chat = manifest.options.get("chat", {})
        found |= {*manifest.special_token_ids.values(), *chat.get("marker_ids", ())}
    return np.array(sorted(found), np.int64)
