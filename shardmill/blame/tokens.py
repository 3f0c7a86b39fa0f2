"""Where tokens of a store came from: the public functions.

In: a store, positions of tokens, the input of the build, the tokenizer.  Out: a `Blame` for each.
Promise: a document is read and encoded once, however many of its tokens are asked for.
Not here: finding rows (documents, conversations), characters (spans).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from shardmill.blame.conversations import find_conversation, pieces_of, rendering_of
from shardmill.blame.documents import Documents
from shardmill.blame.inputs import AnySource, Inputs, matched_inputs
from shardmill.blame.proof import Proof, span_of
from shardmill.blame.records import Blame, FoundBy, Piece
from shardmill.blame.spans import Spans, span_at, spans_of
from shardmill.chat import ChatTemplate
from shardmill.errors import OptionError
from shardmill.mapped import ChatSpace
from shardmill.protocols import ConversationSource, Source, Tokenizer
from shardmill.records import ROLES, IntArray
from shardmill.shards import Store, open_store
from shardmill.sources import RowPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Some tokens of one document."""

    split: str
    document: int
    first: int  # the position of its first token
    ids: IntArray  # all of it
    offsets: range  # which of them are asked for


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
    tells it.
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
    return range(*span_of(_opened(store), split, document))


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
    """As `blame_token`, of neighbours."""
    store = _opened(store)
    total = store.num_tokens(split)
    if tokens.step != 1 or not 0 <= tokens.start < tokens.stop <= total:
        raise OptionError(
            f"tokens {tokens.start:,}..{tokens.stop:,}: split {split!r} has {total:,} tokens; "
            "wanted some of them"
        )
    sources = matched_inputs(store.manifest, inputs)
    with closing(Proof(store, tokenizer)) as proof:
        found: list[Blame] = []
        texts = cast(Sequence[Source], sources)
        documents = None if store.is_chat else Documents(proof, texts, fill)
        for asked in _documents(proof, split, tokens):
            if documents is None:
                found += _of_conversation(proof, asked, sources, template)
            else:
                found += _of_document(proof, asked, documents)
    return found


def _opened(store: str | Path | Store) -> Store:
    return store if isinstance(store, Store) else open_store(store)


def _documents(proof: Proof, split: str, tokens: range) -> Iterator[_Asked]:
    """The documents that these tokens stand in."""
    starts = proof.store.document_starts(split)
    token = tokens.start
    while token < tokens.stop:
        document = int(starts.searchsorted(token, "right")) - 1  # never one without tokens
        first, stop = span_of(proof.store, split, document)
        end = min(stop, tokens.stop)
        yield _Asked(
            split=split,
            document=document,
            first=first,
            ids=proof.stored(split, document),
            offsets=range(token - first, end - first),
        )
        token = end


def _of_document(proof: Proof, asked: _Asked, documents: Documents) -> Iterator[Blame]:
    found = documents.find(asked.split, asked.document)
    name = str(proof.store.manifest.sources[found.feed].get("name"))
    encoded = np.array(proof.tokenizer.encode(found.text), np.int64)
    spans = spans_of(proof.tokenizer, found.text, encoded)
    for offset in asked.offsets:
        one = _blame(asked, offset, found.place, source=name, text=found.text)
        one = replace(one, found_by=found.found_by)
        if offset >= len(encoded):
            yield replace(one, kind="end")
            continue
        span = span_at(proof.tokenizer, found.text, encoded, spans, offset)
        yield one if span is None else replace(one, start=span[0], stop=span[1])


def _of_conversation(
    proof: Proof, asked: _Asked, sources: Sequence[AnySource], template: ChatTemplate | None
) -> Iterator[Blame]:
    tokenizer, manifest = proof.tokenizer, proof.store.manifest
    rendering = rendering_of(manifest, tokenizer, template)
    (source,) = cast(Sequence[ConversationSource], sources)
    conversation, place = find_conversation(
        source, rendering, asked.split, asked.document, asked.ids
    )
    with closing(ChatSpace(proof.store, asked.split)) as space:
        example = space.examples([asked.document])
    pieces = pieces_of(conversation, rendering)
    name = str(manifest.sources[0].get("name"))
    spans = {piece.start: _spans(tokenizer, piece, asked.ids) for piece in pieces or ()}
    for offset in asked.offsets:
        one = _blame(asked, offset, place, source=name, text="")
        turn = int(example.turn_starts.searchsorted(offset, "right")) - 1
        if turn >= 0:
            one = replace(one, turn=turn, role=ROLES[int(example.turn_roles[turn])])
        piece = next((p for p in pieces or () if p.start <= offset < p.stop), None)
        if piece is None:
            yield replace(one, kind="turn" if pieces is None and turn >= 0 else "template")
            continue
        ids, at = asked.ids[piece.start : piece.stop], offset - piece.start
        span = span_at(tokenizer, piece.text, ids, spans[piece.start], at)
        one = replace(one, text=piece.content, part=piece.part)
        if span is not None:
            one = replace(one, start=span[0] + piece.lead, stop=span[1] + piece.lead)
        yield one


def _spans(tokenizer: Tokenizer, piece: Piece, ids: IntArray) -> Spans:
    return spans_of(tokenizer, piece.text, ids[piece.start : piece.stop])


def _blame(asked: _Asked, offset: int, place: RowPlace, *, source: str, text: str) -> Blame:
    """All but the characters; counting is the way of conversations."""
    by: FoundBy = "counting"
    return Blame(
        split=asked.split,
        token=asked.first + offset,
        token_id=int(asked.ids[offset]),
        document=asked.document,
        offset=offset,
        source=source,
        file=place.file,
        row=place.row,
        row_id=place.id,
        own_id=place.own_id,
        kind="text",
        text=text,
        start=None,
        stop=None,
        found_by=by,
    )
