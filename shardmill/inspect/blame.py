"""Where the tokens of a store came from: source, file, row and characters.

The row is read again by the code that built the store, encoded again and compared with the stored
ids; what is not equal is an error, never an answer. A document is read and encoded once, however
many of its tokens are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from shardmill.chat import ChatTemplate
from shardmill.errors import OptionError
from shardmill.inspect.blame_lookup import (
    ChatLookup,
    FoundBy,
    SourceLookup,
    document_span,
    stored_ids,
)
from shardmill.inspect.inputs import Inputs, matched_inputs
from shardmill.inspect.tokens import tokenizer_mismatch
from shardmill.protocols import ConversationSource, Source, Tokenizer
from shardmill.records import ROLES, IntArray
from shardmill.sources.source import RowLocation
from shardmill.store import Store, open_store
from shardmill.store.readers import ChatSpace

__all__ = ["Blame", "blame_document", "blame_token", "blame_tokens"]

Kind: TypeAlias = Literal["text", "end", "template", "turn"]
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Where one token came from."""

    split: str
    token: int  # its position in the split
    token_id: int
    document: int  # the document or conversation it is in, a number of the split
    offset: int  # its position in that
    source: str  # the name of the source
    file: str | None  # among the inputs; None: the source is not made of files
    row: int | None  # a line counts from 1, a row of Parquet or a hub from 0; None: a whole file
    row_id: str  # as dropped rows are named: "pages.jsonl:17"; or a conversation's own id
    own_id: str | None  # the row's own field "id"
    kind: Kind  # "end": appended by the build; "template": put there by the chat template; "turn":
    # of a turn that a Jinja template wrote, which does not separate words from markers
    text: str  # the row's text, cleaned as the build did; of a chat, the words of the turn
    start: int | None  # characters start..stop of `text`; None: the token has no text
    stop: int | None
    turn: int | None = None  # of a conversation, from 0; None: a document, or before the first turn
    role: str | None = None  # who speaks in it
    part: str | None = None  # "content", "reasoning", "tool_call" or "tools"
    found_by: FoundBy  # "counting": the input was read from its start

    @property
    def characters(self) -> str:
        """The text of the token; a part of a character has the whole character."""
        return "" if self.start is None else self.text[self.start : self.stop]


def blame_token(
    store: str | Path | Store,
    split: str,
    token: int,
    *,
    inputs: Inputs = None,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    fill: Sequence[str] | None = None,
) -> Blame:
    """Where the token at a position of a split came from.

    `inputs` are the sources of the build, opened as they were then, one for each feed; only a
    dataset of a hub is found without. `template` is needed for a store that was rendered with a
    Jinja template. `fill`: the order in which the build filled the splits, where nothing else
    records it.
    """
    (found,) = blame_tokens(
        store,
        split,
        range(token, token + 1),
        inputs=inputs,
        tokenizer=tokenizer,
        template=template,
        fill=fill,
    )
    return found


def blame_document(store: str | Path | Store, split: str, document: int) -> range:
    """The positions of the tokens of a document, for `blame_tokens`."""
    opened = store if isinstance(store, Store) else open_store(store)
    return range(*document_span(opened, split, document))


def blame_tokens(
    store: str | Path | Store,
    split: str,
    tokens: range,
    *,
    inputs: Inputs = None,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    fill: Sequence[str] | None = None,
) -> list[Blame]:
    """As `blame_token`, for tokens that follow one another."""
    store = store if isinstance(store, Store) else open_store(store)
    total = store.num_tokens(split)
    if tokens.step != 1 or not 0 <= tokens.start < tokens.stop <= total:
        raise OptionError(
            f"tokens {tokens.start:,}..{tokens.stop:,}: split {split!r} has {total:,} tokens; "
            "wanted some of them"
        )
    problem = tokenizer_mismatch(store.manifest, tokenizer, repr(tokenizer))
    if problem is not None:
        raise OptionError(problem)
    sources = matched_inputs(store.manifest, inputs)
    texts: SourceLookup | None = None
    if store.is_chat:
        (source,) = cast(Sequence[ConversationSource], sources)
        chats = ChatLookup(store.manifest, tokenizer, template, source)
    else:
        texts = SourceLookup(store, tokenizer, cast(Sequence[Source], sources), fill)
    starts = store.document_starts(split)
    found: list[Blame] = []
    token = tokens.start
    while token < tokens.stop:
        document = int(starts.searchsorted(token, "right")) - 1  # never one without tokens
        first, stop = document_span(store, split, document)
        offsets = range(token - first, min(stop, tokens.stop) - first)
        ids = stored_ids(store, split, document)
        if texts is not None:
            facts = _document_facts(texts, split, document, offsets)
        else:
            facts = _conversation_facts(chats, store, split, document, ids, offsets)
        found += [
            Blame(
                split=split,
                token=first + offset,
                token_id=int(ids[offset]),
                document=document,
                offset=offset,
                **one,
            )
            for offset, one in zip(offsets, facts, strict=True)
        ]
        token = min(stop, tokens.stop)
    return found


def _document_facts(
    lookup: SourceLookup, split: str, document: int, offsets: range
) -> Iterator[dict[str, Any]]:
    """Those fields of `Blame` that depend on the row."""
    text, location, feed, found_by = lookup.find(split, document)
    encoded = np.array(lookup.tokenizer.encode(text), np.int64)
    span_at = span_finder(lookup.tokenizer, text, encoded)
    row = _row_facts(lookup.store, feed, location, found_by)
    for offset in offsets:
        kind = "text" if offset < len(encoded) else "end"
        start, stop = (span_at(offset) if kind == "text" else None) or (None, None)
        yield {**row, "kind": kind, "text": text, "start": start, "stop": stop}


def _conversation_facts(
    lookup: ChatLookup, store: Store, split: str, document: int, ids: IntArray, offsets: range
) -> Iterator[dict[str, Any]]:
    """The same of a conversation, whose ids these are."""
    conversation, location = lookup.find(split, document, ids)
    with closing(ChatSpace(store, split)) as space:
        example = space.examples([document])
    row = _row_facts(store, 0, location, "counting")
    pieces = lookup.pieces(conversation)
    spans = [
        span_finder(lookup.tokenizer, piece.text, ids[piece.start : piece.stop])
        for piece in pieces or ()
    ]
    for offset in offsets:
        facts: dict[str, Any] = {**row, "text": "", "start": None, "stop": None}
        turn = int(example.turn_starts.searchsorted(offset, "right")) - 1
        if turn >= 0:
            facts |= {"turn": turn, "role": ROLES[int(example.turn_roles[turn])]}
        facts["kind"] = "turn" if pieces is None and turn >= 0 else "template"
        for piece, span_at in zip(pieces or (), spans, strict=True):
            if piece.start <= offset < piece.stop:
                facts |= {"kind": "text", "text": piece.content, "part": piece.part}
                span = span_at(offset - piece.start)
                if span is not None:
                    facts |= {"start": span[0] + piece.lead, "stop": span[1] + piece.lead}
        yield facts


def _row_facts(store: Store, feed: int, location: RowLocation, found_by: FoundBy) -> dict[str, Any]:
    return {
        "source": str(store.manifest.sources[feed].get("name")),
        "file": location.file,
        "row": location.row,
        "row_id": location.id,
        "own_id": location.own_id,
        "found_by": found_by,
    }


def span_finder(
    tokenizer: Tokenizer, text: str, ids: IntArray
) -> Callable[[int], tuple[int, int] | None]:
    """A function from the number of a token to its characters start..stop of `text`.

    Exact where the tokenizer has `spans`, as those of this library do. For any other, the text is
    decoded up to the token and compared; what does not decode to the text has no characters.
    """
    spans = getattr(tokenizer, "spans", None)
    known = spans(text) if callable(spans) else None
    if known is not None and len(known) == len(ids):
        return lambda at: (int(known[at][0]), int(known[at][1]))

    def decoded_span(at: int) -> tuple[int, int] | None:
        before = _reached(tokenizer.decode(ids[:at]), text)
        after = _reached(tokenizer.decode(ids[: at + 1]), text)
        return None if before is None or after is None else (before[0], after[1])

    return decoded_span


def _reached(decoded: str, text: str) -> tuple[int, int] | None:
    """How far a beginning of the text reaches: in whole characters, and with one that is begun."""
    if text.startswith(decoded):
        return len(decoded), len(decoded)
    whole = decoded.rstrip(_REPLACEMENT)
    if text.startswith(whole) and whole != decoded:
        return len(whole), min(len(whole) + 1, len(text))
    return None
