"""Ids as text, with the tokenizer that a flag names.

Promise: text only with the very tokenizer of the stores (inspector.decoding). Without one, ids are
shown, and that is said.
"""

from __future__ import annotations

import sys

from shardmill.cli.show_text import Decode
from shardmill.cli.tokenizer import parse_specials
from shardmill.inspector.decoding import marker_ids, open_named
from shardmill.protocols import Tokenizer
from shardmill.shards import Store

__all__ = ["decoder", "marker_ids", "named_tokenizer"]


def named_tokenizer(name: str, special: list[str] | None, *stores: Store) -> Tokenizer:
    """The tokenizer of --tokenizer and --special, refused unless it is that of all these stores."""
    return open_named(name, parse_specials(special) if special else None, *stores)


def decoder(name: str | None, special: list[str] | None, *stores: Store) -> Decode:
    """Ids to text with the very tokenizer of the stores; without one, the ids themselves."""
    if name is None:
        print("shardmill: no --tokenizer, so ids are shown", file=sys.stderr)
        return lambda ids: " ".join(map(str, ids.tolist())) + " "
    opened = named_tokenizer(name, special, *stores)
    return lambda ids: opened.decode(ids)
