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
from typing import cast

from shardmill.chat import ChatTemplate
from shardmill.errors import OptionError
from shardmill.inspect.blame_lookup import (
    ChatLookup,
    FoundBy,
    Kind,
    Piece,
    SourceLookup,
    document_span,
    stored_ids,
)
from shardmill.inspect.inputs import Inputs, matched_inputs
from shardmill.inspect.tokens import tokenizer_mismatch
from shardmill.protocols import ConversationSource, Source, Tokenizer
from shardmill.records import ROLES, IntArray
from shardmill.store import Store, open_store
from shardmill.store.readers import ChatSpace

__all__ = ["Blame", "blame_document", "blame_token", "blame_tokens"]

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
    lookup: ChatLookup | SourceLookup
    if store.is_chat:
        (source,) = cast(Sequence[ConversationSource], sources)
        lookup = ChatLookup(store, tokenizer, source, template)
    else:
        lookup = SourceLookup(store, tokenizer, cast(Sequence[Source], sources), fill)
    starts = store.document_starts(split)
    found: list[Blame] = []
    token = tokens.start
    while token < tokens.stop:
        document = int(starts.searchsorted(token, "right")) - 1  # never one without tokens
        stop = min(document_span(store, split, document)[1], tokens.stop)
        found += _blames(lookup, split, document, range(token, stop))
        token = stop
    return found


def _blames(
    lookup: ChatLookup | SourceLookup, split: str, document: int, tokens: range
) -> Iterator[Blame]:
    """Where some tokens of one document came from."""
    store = lookup.store
    ids, first = stored_ids(store, split, document), document_span(store, split, document)[0]
    found = lookup.find(split, document)
    spans = [span_finder(lookup.tokenizer, piece, ids) for piece in found.pieces]
    example = None
    if store.is_chat:
        with closing(ChatSpace(store, split)) as space:
            example = space.examples([document])
    for offset in range(tokens.start - first, tokens.stop - first):
        kind, text, start, stop, part, turn = found.other, found.text, None, None, None, -1
        if example is not None:
            turn = int(example.turn_starts.searchsorted(offset, "right")) - 1
        if turn < 0 and kind == "turn":
            kind = "template"
        for piece, span_at in zip(found.pieces, spans, strict=True):
            if piece.start <= offset < piece.stop:
                kind, text, part = "text", piece.content, piece.part
                start, stop = span_at(offset - piece.start) or (None, None)
        yield Blame(
            split=split,
            token=first + offset,
            token_id=int(ids[offset]),
            document=document,
            offset=offset,
            source=str(store.manifest.sources[found.feed].get("name")),
            file=found.location.file,
            row=found.location.row,
            row_id=found.location.id,
            own_id=found.location.own_id,
            kind=kind,
            text=text,
            start=start,
            stop=stop,
            turn=turn if turn >= 0 else None,
            role=ROLES[int(example.turn_roles[turn])]
            if example is not None and turn >= 0
            else None,
            part=part,
            found_by=found.found_by,
        )


def span_finder(
    tokenizer: Tokenizer, piece: Piece, stored: IntArray
) -> Callable[[int], tuple[int, int] | None]:
    """A function from the number of a token of the piece to its characters start..stop of the
    piece's content. `stored` are the ids that the piece is in.

    Exact where the tokenizer has `spans`, as those of this library do. For any other, the text is
    decoded up to the token and compared; what does not decode to the text has no characters.
    """
    spans = getattr(tokenizer, "spans", None)
    known = spans(piece.text) if callable(spans) else None
    if known is not None and len(known) == piece.stop - piece.start:
        return lambda at: (int(known[at][0]) + piece.lead, int(known[at][1]) + piece.lead)
    ids = stored[piece.start : piece.stop]

    def decoded_span(at: int) -> tuple[int, int] | None:
        before = _reached(tokenizer.decode(ids[:at]), piece.text)
        after = _reached(tokenizer.decode(ids[: at + 1]), piece.text)
        if before is None or after is None:
            return None
        return before[0] + piece.lead, after[1] + piece.lead

    return decoded_span


def _reached(decoded: str, text: str) -> tuple[int, int] | None:
    """How far a beginning of the text reaches: in whole characters, and with one that is begun."""
    if text.startswith(decoded):
        return len(decoded), len(decoded)
    whole = decoded.rstrip(_REPLACEMENT)
    if text.startswith(whole) and whole != decoded:
        return len(whole), min(len(whole) + 1, len(text))
    return None
