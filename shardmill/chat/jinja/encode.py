"""Many renderings of one conversation as tokens, each stretch of text encoded once.

In: texts, most of them prefixes of one another.  Out: the ids of each.
Promise: a text is cut at its special tokens and the stretches between them are encoded apart, as
tokenizers do themselves. That they do is not taken on trust: `encode_apart` is only a proposal, and
the caller compares it with the tokenizer's own ids of every whole conversation, and takes
`encode_whole` where they differ (a special token that swallows blanks, a mark at the start of a
text).
Cost: linear in the text, where encoding every prefix would be quadratic in the turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from shardmill.chat.jinja.engine import JinjaEngine
from shardmill.chat.jinja.facts import TemplateFacts
from shardmill.records import IntArray

Encoded = dict[str, IntArray]


def encode_whole(engine: JinjaEngine, texts: Iterable[str]) -> Encoded:
    """Each text as the tokenizer encodes it, in one call."""
    unique = list(dict.fromkeys(texts))
    return dict(zip(unique, engine.ids(unique), strict=True))


def encode_apart(engine: JinjaEngine, facts: TemplateFacts, texts: Iterable[str]) -> Encoded:
    """Each text as its special tokens and the stretches between them."""
    if not facts.literals:
        return encode_whole(engine, texts)
    cut = re.compile("(" + "|".join(map(re.escape, facts.literals)) + ")")
    parts = {text: cut.split(text) for text in dict.fromkeys(texts)}
    # Odd parts are special tokens; they too are encoded alone, once each.
    unique = list(dict.fromkeys(part for text in parts.values() for part in text if part))
    ids = dict(zip(unique, engine.ids(unique), strict=True))
    nothing = np.empty(0, np.int64)
    return {
        text: np.concatenate([nothing, *(ids[part] for part in split if part)])
        for text, split in parts.items()
    }
