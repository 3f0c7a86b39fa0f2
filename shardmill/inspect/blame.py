"""From a token of a store to where it came from: file, row and characters.

In: a store, the position of a token, the input that the store was built from, its tokenizer.
Out: a `Blame`.
Promise: the row is read again by the code that built the store, encoded again and compared with the
stored ids; what is not equal is an error, never an answer.
Not here: the table that makes it quick (shards, build), looking for text in a store.

Where tokens of a store came from: the public functions.

In: a store, positions of tokens, the input of the build, the tokenizer.  Out: a `Blame` for each.
Promise: a document is read and encoded once, however many of its tokens are asked for.
Not here: finding rows (documents, conversations), characters (spans).

The input of a store, as its caller has it now.

In: a manifest, and the sources that the caller opened.  Out: the very sources of the build.
Promise: what is not the input that the manifest describes (its files by name, size and hash, read
in the same manner) is refused by name; files that were added since are left out. Names of sources
and folders do not count: the input may lie elsewhere.
Not here: opening files by name (sources, cli).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from shardmill.chat import ChatTemplate
from shardmill.errors import OptionError, SourceError
from shardmill.inspect.blame_lookup import SourceLookup, find_conversation, pieces_of, rendering_of
from shardmill.inspect.blame_records import (
    Blame,
    FoundBy,
    Piece,
    Proof,
    Spans,
    span_at,
    span_of,
    spans_of,
)
from shardmill.protocols import ConversationSource, Source, Tokenizer
from shardmill.records import JSON, ROLES, IntArray
from shardmill.sources import (
    ConcatSource,
    FileSource,
    HubParquetSource,
    HubSource,
    RowLocation,
    append_files,
    only_files,
)
from shardmill.storage.files import describe_difference
from shardmill.store import Manifest, Store, open_store
from shardmill.store.readers import ChatSpace

AnySource: TypeAlias = Source | ConversationSource
Inputs: TypeAlias = AnySource | Sequence[AnySource] | None

_NEXT = "name the input that the store was built from, with the options of its build"


def matched_inputs(manifest: Manifest, inputs: Inputs) -> list[AnySource]:
    """One source for each that the store was built from, in their order."""
    recorded = manifest.sources
    if not recorded:
        raise OptionError(
            "this store does not tell what it was built from (it was converted, or made of "
            "examples in a program), so nobody can say where its tokens came from"
        )
    if inputs is None:
        return [_reopened(one) for one in recorded]
    given = list(inputs) if isinstance(inputs, Sequence) else [inputs]
    if len(given) != len(recorded):
        names = ", ".join(repr(one.get("name")) for one in recorded)
        raise OptionError(
            f"{len(given)} inputs, but the store was built from {len(recorded)} sources: {names}; "
            "give one for each, in this order"
        )
    return [_matched(source, one) for source, one in zip(given, recorded, strict=True)]


def _reopened(recorded: dict[str, Any]) -> AnySource:
    """A hub's dataset can be found again; where files lie no store tells."""
    if recorded.get("kind") != "hub":
        raise OptionError(
            f"the store was built from {_words(recorded)}, and does not tell where that lies; "
            "say so with --input (inputs=), as the build was told"
        )
    options = {key: recorded[key] for key in ("name", "config", "split", "field", "revision")}
    shuffle = recorded.get("shuffle")
    if shuffle:
        options["shuffle"] = (shuffle["seed"], shuffle["buffer_size"])
    by_files = "num_files" in recorded  # else it was streamed
    opened = HubParquetSource if by_files else HubSource
    return _matched(opened(recorded["dataset"], **options), recorded)


def _matched(source: AnySource, recorded: dict[str, Any]) -> AnySource:
    if isinstance(source, FileSource | ConcatSource):
        source = _same_files(source, recorded)
    changes = describe_difference(_nameless(recorded), _nameless(source.describe()))
    if changes:
        raise SourceError(
            f"source {source.name!r} is not what the store was built from (then -> now): "
            f"{changes[0]:.300}; {_NEXT}"
        )
    return source


def _same_files(source: Source, recorded: dict[str, Any]) -> Source:
    """The files of the build in its order, without others."""
    try:
        found = append_files(source, recorded)
    except (SourceError, OptionError) as error:
        what = str(error).partition(";")[0]
        raise SourceError(f"{what}; {_NEXT}") from error
    left = only_files(found.source, found.old) if found.num_new else found.source
    assert left is not None, "a description of files has some"
    return left


def _nameless(value: object) -> JSON:
    """Without what depends on where the input lies."""
    if isinstance(value, dict):
        return {key: _nameless(one) for key, one in value.items() if key != "name"}
    if isinstance(value, list | tuple):
        return [_nameless(one) for one in value]
    return cast(JSON, value)


def _words(recorded: dict[str, Any]) -> str:
    """A source for an error."""
    listed = recorded.get("files") or recorded.get("inputs") or ()
    files = [one["file"] for one in listed if isinstance(one, dict) and "file" in one]
    shown = f": {', '.join(map(repr, files[:3]))}{' ...' if len(files) > 3 else ''}"
    return f"{recorded.get('name')!r} ({recorded.get('kind')}{shown if files else ''})"


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
        documents = None if store.is_chat else SourceLookup(proof, texts, fill)
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


def _of_document(proof: Proof, asked: _Asked, documents: SourceLookup) -> Iterator[Blame]:
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


def _blame(asked: _Asked, offset: int, place: RowLocation, *, source: str, text: str) -> Blame:
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


__all__ = ["Blame", "blame_document", "blame_token", "blame_tokens"]
