"""Which characters of a text each of its tokens is.

In: a tokenizer, a text, its ids.  Out: the characters start..stop of a token.
Promise: exact where the tokenizer tells its spans, as those of this library do; a piece of a
character has all of it. For any other the text is decoded up to the token and compared; what does
not decode to the text has no span.
"""

from __future__ import annotations

from shardmill.protocols import Tokenizer
from shardmill.records import IntArray, OffsetArray

_REPLACEMENT = "\ufffd"
Spans = OffsetArray | None


def spans_of(tokenizer: Tokenizer, text: str, ids: IntArray) -> Spans:
    """(n, 2) of all tokens, when the tokenizer tells them; None: ask `span_at` for each."""
    tells = getattr(tokenizer, "spans", None)
    found: OffsetArray | None = tells(text) if callable(tells) else None
    return found if found is not None and len(found) == len(ids) else None


def span_at(
    tokenizer: Tokenizer, text: str, ids: IntArray, spans: Spans, place: int
) -> tuple[int, int] | None:
    """Of the token at `place`; None when nobody can tell."""
    if spans is not None:
        start, stop = spans[place].tolist()
        return start, stop
    before = _reached(tokenizer.decode(ids[:place]), text)
    behind = _reached(tokenizer.decode(ids[: place + 1]), text)
    if before is None or behind is None:
        return None
    return before[0], behind[1]


def _reached(decoded: str, text: str) -> tuple[int, int] | None:
    """How far a beginning of the text goes: whole characters of it, and with the one begun."""
    if text.startswith(decoded):
        return len(decoded), len(decoded)
    whole = decoded.rstrip(_REPLACEMENT)
    if text.startswith(whole) and whole != decoded:
        return len(whole), min(len(whole) + 1, len(text))
    return None
