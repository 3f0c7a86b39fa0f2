"""What is said of one token, and what is known of the document it stands in.

Whether a text is a document of a store: it is encoded again and compared.

In: a store, its tokenizer, texts.  Out: yes or no.
Promise: yes means that every stored id of the document is the one that the build made of this
text, its end token with it; a document that a token limit cut may be a beginning of it.

Which characters of a text each of its tokens is.

In: a tokenizer, a text, its ids.  Out: the characters start..stop of a token.
Promise: exact where the tokenizer tells its spans, as those of this library do; a piece of a
character has all of it. For any other the text is decoded up to the token and compared; what does
not decode to the text has no span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from shardmill.errors import OptionError
from shardmill.protocols import Texts, Tokenizer
from shardmill.records import BoolArray, IntArray, OffsetArray
from shardmill.sources import RowLocation
from shardmill.store import Manifest, Store
from shardmill.store.readers import TokenSpace, open_tokens
from shardmill.tokenizers import model_sha256_of

Kind: TypeAlias = Literal["text", "end", "template", "turn"]
FoundBy: TypeAlias = Literal["origins", "counting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Where one token came from."""

    split: str
    token: int  # its position in the split
    token_id: int
    document: int  # the document or conversation it stands in, a number of the split
    offset: int  # its place in that
    source: str  # the name of the source
    file: str | None  # among the inputs; None: the source is no files
    row: int | None  # a line counts from 1, a row of Parquet or a hub from 0; None: a whole file
    row_id: (
        str  # as dropped rows are named: "pages.jsonl:17"; a conversation's own id if it has one
    )
    own_id: str | None  # what the row calls itself in its field "id"
    kind: Kind  # "end": appended by the build; "template": put there by the chat template; "turn":
    # of a turn that a Jinja template wrote, which tells no words from marks
    text: str  # the row's text, cleaned as the build did; of a chat, the words of the turn
    start: int | None  # characters start..stop of `text`; None: the token has no text
    stop: int | None
    turn: int | None = None  # of a conversation, from 0; None: a document, or before the first turn
    role: str | None = None  # who speaks in it
    part: str | None = None  # "content", "reasoning", "tool_call" or "tools"
    found_by: FoundBy  # "counting": the input was read from its start

    @property
    def characters(self) -> str:
        """The text of the token; a piece of a character has all of it."""
        return "" if self.start is None else self.text[self.start : self.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundText:
    """The row of a document."""

    text: str
    place: RowLocation
    feed: int
    found_by: FoundBy


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens of a conversation that one text became."""

    start: int  # in the conversation
    stop: int
    part: str
    text: str  # as it was encoded
    content: str  # of the message it is of, where that has it whole; else the text
    lead: int  # characters of the content before the text


NO_TOKENS = "no_tokens"
"""The reason for which a build drops a text that gives none."""


class Proof:
    """The documents of a store, and the tokenizer that made them."""

    def __init__(self, store: Store, tokenizer: Tokenizer) -> None:
        check_tokenizer(store, tokenizer)
        self.store, self.tokenizer = store, tokenizer
        specials = store.manifest.special_token_ids
        self._end = [specials["eot"]] if store.manifest.append_eot else []
        self._spaces: dict[str, TokenSpace] = {}
        self.has_void = bool(store.manifest.ledger.documents.dropped.get(NO_TOKENS))

    def stored(self, split: str, document: int) -> IntArray:
        """The ids of a document."""
        if split not in self._spaces:
            self._spaces[split] = open_tokens(self.store, split)
        start, stop = span_of(self.store, split, document)
        return self._spaces[split].read(start, stop)

    def holds(self, split: str, document: int, text: str, *, cut: bool) -> bool:
        """Whether this text is the document; with `cut`, whether it begins with it."""
        stored = self.stored(split, document)
        made = np.array([*self.tokenizer.encode(text), *self._end], np.int64)
        return np.array_equal(stored, made[: len(stored)] if cut else made)

    def filled(self, texts: Texts) -> BoolArray:
        """Which of these texts have a token, so that a build makes a document of them."""
        if not self.has_void:
            return np.ones(len(texts), np.bool_)
        filled: BoolArray = self.tokenizer.encode_batch(texts).lengths > 0
        return filled

    def close(self) -> None:
        for space in self._spaces.values():
            space.close()


def span_of(store: Store, split: str, document: int) -> tuple[int, int]:
    """The tokens of a document, half-open."""
    total = store.num_documents(split)
    if not 0 <= document < total:
        raise OptionError(f"document {document:,}: split {split!r} has {total:,}")
    starts = store.document_starts(split)
    stop = int(starts[document + 1]) if document + 1 < total else store.num_tokens(split)
    return int(starts[document]), stop


def made_by(manifest: Manifest, tokenizer: Tokenizer) -> bool:
    """Whether this tokenizer made the ids of the store."""
    known = {manifest.tokenizer_fingerprint, manifest.tokenizer_sha256} - {None}
    return bool(known & {tokenizer.fingerprint, model_sha256_of(tokenizer)})


def check_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    """Refuse any other than that of the store."""
    manifest = store.manifest
    if not made_by(manifest, tokenizer):
        raise OptionError(
            f"{tokenizer!r} is not the tokenizer of this store (fingerprint "
            f"{tokenizer.fingerprint[:16]}, the store's is "
            f"{(manifest.tokenizer_fingerprint or 'unknown')[:16]}): take the one that the store "
            "was built with"
        )


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
