"""Ids as text, with the tokenizer that a flag names.

Promise: text only with the very tokenizer of the stores (inspector.decoding). A store that records
none, such as an imported one, is read with the tokenizer that is named, with a note; an id beyond
its vocabulary is refused. Without a tokenizer, ids are shown, and that is said.
"""

from __future__ import annotations

import sys

from shardmill.cli.show_text import Decode
from shardmill.cli.tokenizer import parse_specials
from shardmill.errors import OptionError
from shardmill.inspector.decoding import marker_ids, open_named
from shardmill.protocols import Tokenizer
from shardmill.records import IntArray
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
    unknown = [store for store in stores if store.manifest.tokenizer_fingerprint is None]
    opened = named_tokenizer(name, special, *(one for one in stores if one not in unknown))
    if not unknown:
        return lambda ids: opened.decode(ids)
    folder = unknown[0].folder
    print(
        f"shardmill: {folder} records no tokenizer, so nothing shows whether --tokenizer {name} "
        "made its tokens",
        file=sys.stderr,
    )

    def decode(ids: IntArray) -> str:
        largest = int(ids.max(initial=0))
        if largest >= opened.vocab_size:
            raise OptionError(
                f"--tokenizer {name}: has {opened.vocab_size:,} ids, but {folder} holds id "
                f"{largest:,}, so it did not make these tokens: name the one that did"
            )
        return opened.decode(ids)

    return decode
