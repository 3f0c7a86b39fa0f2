"""Where the tokens of a store came from: source, file, row and characters.

Input is counted as the build counted it. With the store's table of origins one part of the input is
read, without it everything before the document, and the answer is the same. The row is read again
by the code that built the store, encoded or rendered again and compared with the stored ids; what
is not equal is an error, never an answer. A document is read and encoded once, however many of its
tokens are asked for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from shardmill.building.plan import chunks_of, mark_of
from shardmill.building.splits import BY_HASH, HashSplit, hash_split
from shardmill.chat import (
    REASONS,
    ChatTemplate,
    TokenTemplate,
    TrainPolicy,
    bind_template,
    spec_from_json,
)
from shardmill.chat.layout import Names, lay_out
from shardmill.errors import OptionError, SourceError
from shardmill.inspect.inputs import AnySource, Inputs, matched_inputs
from shardmill.inspect.tokens import Piece, span_finder, tokenizer_mismatch
from shardmill.protocols import ConversationSource, Source, Tokenizer, continues
from shardmill.records import ROLES, Conversation, Cursor, IntArray, OffsetArray, TextBatch
from shardmill.sources import CHAT_REASONS, ChatSource
from shardmill.sources.source import FileSource, RowLocation, read_document
from shardmill.store import Origins, Store, open_store, read_origins
from shardmill.store.branches import refuse_preferences
from shardmill.store.plans import COLUMNS, FEED, GRAIN, MARK, ROWS
from shardmill.store.readers import ChatSpace, open_tokens

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Blame", "blame_document", "blame_token", "blame_tokens"]

log = logging.getLogger(__name__)

FoundBy: TypeAlias = Literal["origins", "counting"]
Kind: TypeAlias = Literal["text", "end", "template", "turn"]
_Order: TypeAlias = tuple[str, ...]  # of splits
_Lookup: TypeAlias = "_TextLookup | _ChatLookup"

_NO_TEXT: dict[Kind, str] = {
    "text": "its tokenizer does not say which characters it is",
    "end": "appended by the build, no text",
    "template": "put there by the chat template, no text",
    "turn": "of a turn that a Jinja template wrote, which does not separate words from markers",
}
_MOST_ORDERS = 4
"""Splits whose orders are tried."""
_BY_POSITION = "val when the hash of (seed, group, else position)"
_NO_TOKENS = "no_tokens"
"""The reason for which a build drops a text that gives none."""


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

    @property
    def note(self) -> str:
        """Why it has no characters; "" if it has."""
        return _NO_TEXT[self.kind] if self.start is None else ""


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
    total = opened.num_documents(split)
    if not 0 <= document < total:
        raise OptionError(f"document {document:,}: split {split!r} has {total:,}")
    starts = opened.document_starts(split)
    stop = int(starts[document + 1]) if document + 1 < total else opened.num_tokens(split)
    return range(int(starts[document]), stop)


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
    refuse_preferences(store, "where they came from is not looked up yet")
    problem = tokenizer_mismatch(store.manifest, tokenizer, repr(tokenizer))
    if problem is not None:
        raise OptionError(problem)
    sources = matched_inputs(store.manifest, inputs)
    lookup: _Lookup
    if store.is_chat:
        (source,) = cast(Sequence[ConversationSource], sources)
        lookup = _ChatLookup(store, tokenizer, source, template)
    else:
        lookup = _TextLookup(store, tokenizer, cast(Sequence[Source], sources), fill)
    starts = store.document_starts(split)
    found: list[Blame] = []
    token = tokens.start
    while token < tokens.stop:
        document = int(starts.searchsorted(token, "right")) - 1  # never one without tokens
        stop = min(blame_document(store, split, document).stop, tokens.stop)
        found += _blames(lookup, split, document, range(token, stop))
        token = stop
    return found


def _blames(lookup: _Lookup, split: str, document: int, tokens: range) -> Iterator[Blame]:
    """Where some tokens of one document came from."""
    store, first = lookup.store, blame_document(lookup.store, split, document).start
    ids = _stored_ids(store, split, document)
    region, picked = _find(lookup, split, document)
    location = _locate(region, picked)
    pieces, other, whole = lookup.pieces(picked.value)
    spans = [span_finder(lookup.tokenizer, piece, ids) for piece in pieces]
    example = None
    if store.is_chat:
        with closing(ChatSpace(store, split)) as space:
            example = space.examples([document])
    for offset in range(tokens.start - first, tokens.stop - first):
        kind, text, start, stop, part = other, whole, None, None, None
        turn = role = None
        if example is not None:
            turn = int(example.turn_starts.searchsorted(offset, "right")) - 1
            if turn >= 0:
                role = ROLES[int(example.turn_roles[turn])]
            else:  # before the first turn
                turn, kind = None, "template"
        for piece, span_at in zip(pieces, spans, strict=True):
            if piece.start <= offset < piece.stop:
                kind, text, part = "text", piece.content, piece.part
                start, stop = span_at(offset - piece.start) or (None, None)
        yield Blame(
            split=split,
            token=first + offset,
            token_id=int(ids[offset]),
            document=document,
            offset=offset,
            source=str(store.manifest.sources[region.feed].get("name")),
            file=location.file,
            row=location.row,
            row_id=location.id,
            own_id=location.own_id,
            kind=kind,
            text=text,
            start=start,
            stop=stop,
            turn=turn,
            role=role,
            part=part,
            found_by=region.found_by,
        )


def _stored_ids(store: Store, split: str, document: int) -> IntArray:
    span = blame_document(store, split, document)
    with closing(open_tokens(store, split)) as space:
        return space.read(span.start, span.stop)


# --- the row of a document


class _Region(NamedTuple):
    """A part of the input, and which of its documents is wanted."""

    source: AnySource
    at: int  # the number of the document among those that the source gives
    feed: int = 0
    rows_before: int | None = None
    found_by: FoundBy = "counting"
    cut: bool = False  # a token limit may have cut the document


class _Picked(NamedTuple):
    """One text or conversation, and how to find it again."""

    value: Any
    cursor: Cursor | None  # of the batch before it
    number: int  # after that
    given: int  # values of the source before it


def _pick(
    source: AnySource,
    kept: Callable[[Any], OffsetArray],
    indexes: Sequence[int],
) -> dict[int, _Picked]:
    """The documents with these numbers, which rise, of those that became documents of the store:
    `kept` gives their numbers among the values of a batch."""
    wanted, picked = list(indexes), dict[int, _Picked]()
    seen = given = 0
    cursor: Cursor | None = None
    for batch in source.batches():
        values = batch.texts if isinstance(batch, TextBatch) else batch.conversations
        numbers = kept(values)
        while wanted and wanted[0] < seen + len(numbers):
            number = int(numbers[wanted[0] - seen])
            picked[wanted.pop(0)] = _Picked(values[number], cursor, number, given + number)
        if not wanted:
            return picked
        seen, given, cursor = seen + len(numbers), given + len(values), batch.cursor
    raise SourceError(
        f"source {source.name!r} gives {seen:,} documents, but the store was built from more: "
        "the input is not the one of the build"
    )


def _find(lookup: _Lookup, split: str, document: int) -> tuple[_Region, _Picked]:
    """The text or conversation of a document, proved."""
    region = lookup.region(split, document)
    (picked,) = _pick(region.source, partial(lookup.kept, split), [region.at]).values()
    if not _holds(lookup, split, document, picked.value, cut=region.cut):
        raise SourceError(
            f"{lookup.store.folder}: document {document:,} of split {split!r} holds other tokens "
            f"than source {region.source.name!r} gives now in its place: the input changed where "
            "its fingerprint does not look, or the library of the tokenizer or template did"
        )
    return region, picked


def _holds(lookup: _Lookup, split: str, document: int, value: Any, *, cut: bool) -> bool:
    """Whether this value is the document; with `cut`, whether it begins with it."""
    stored, made = _stored_ids(lookup.store, split, document), lookup.encoded(value)
    return np.array_equal(stored, made[: len(stored)] if cut else made)


class _TextLookup:
    """Where the texts of a store are in the sources of its build."""

    def __init__(
        self,
        store: Store,
        tokenizer: Tokenizer,
        sources: Sequence[Source],
        fill: Sequence[str] | None = None,
    ) -> None:
        """`fill` is the order in which the build filled the splits, needed only where neither a
        table of origins nor the texts decide it."""
        self.store, self.tokenizer = store, tokenizer
        self._sources, self._fill = sources, fill
        manifest = store.manifest
        self._end = [manifest.special_token_ids["eot"]] if manifest.append_eot else []
        self._has_empty = bool(manifest.ledger.documents.dropped.get(_NO_TOKENS))
        self._origins = read_origins(store.folder, manifest)
        self._by_hash: HashSplit | None = None
        if self._origins is not None and self._origins.by_hash is not None:
            seed, fractions = self._origins.by_hash
            self._by_hash = HashSplit(seed=seed, fractions=fractions)
        if self._origins is None:
            log.warning("%s: has no table of origins: the input is counted", store.folder)
        self._grains: dict[int, Sequence[Source]] = {}

    def region(self, split: str, document: int) -> _Region:
        """Where a document is among those that became documents."""
        if self._origins is None:
            return self._by_counting(split, document)
        return self._by_table(self._origins, split, document)

    def _by_table(self, origins: Origins, split: str, document: int) -> _Region:
        """The grain of a document; the whole feed when the input is cut differently now."""
        table, entry = origins.table, int(origins.first(split).searchsorted(document, "right")) - 1
        feed, number, mark, rows = (int(table[entry, at]) for at in (FEED, GRAIN, MARK, ROWS))
        ends = [self.store.num_documents(one) for one in origins.splits]
        edges = np.vstack((table[:, len(COLUMNS) :], ends))
        mine = np.flatnonzero(table[:, FEED] == feed)
        grain = self._grain(feed, number, mark)
        start, stop = (entry, entry + 1) if grain else (int(mine[0]), int(mine[-1]) + 1)
        counts = dict(zip(origins.splits, (edges[stop] - edges[start]).tolist(), strict=True))
        firsts = dict(zip(origins.splits, edges[start].tolist(), strict=True))
        order, column = origins.fill[feed], origins.splits.index(split)
        # a build counts the lines or rows before such a part of a file
        numbered = (
            isinstance(grain, FileSource)
            and continues(grain)
            and grain.settings.get("kind") in ("jsonl", "arrow")
        )
        at, cut = document - firsts[split], False
        if self._by_hash is None:  # `kept` gives the documents of all splits
            at = _index(counts, order, split, at)
            cut = document == int(edges[mine[-1] + 1, column]) - 1
        return _Region(
            source=grain or self._sources[feed],
            at=at,
            feed=feed,
            rows_before=rows if numbered else None,
            found_by="counting" if grain in (None, self._sources[feed]) else "origins",
            cut=cut,
        )

    def _grain(self, feed: int, number: int, mark: int) -> Source | None:
        """The grain that the table names; None when the input is cut differently now."""
        if feed not in self._grains:
            self._grains[feed] = chunks_of(self._sources[feed])
        grains = self._grains[feed]
        if number < len(grains) and mark_of(grains[number]) == mark:
            return grains[number]
        log.warning("%s: is cut differently now, so it is counted", self._sources[feed].name)
        return None

    def _by_counting(self, split: str, document: int) -> _Region:
        """The number of a document among all of the one source, without a table."""
        store, source = self.store, self._sources[0]
        if len(self._sources) > 1:
            raise OptionError(
                f"{store.folder}: was built from {len(self._sources)} sources and has no table of "
                "origins, so it is not known how many documents each of them gave; build it again "
                "with this version"
            )
        if store.manifest.split_rule.startswith(BY_HASH):
            raise OptionError(
                f"{store.folder}: its splits were drawn by a hash, and the table of origins that "
                "says which one is gone: copy it again, or build the store again"
            )
        counts = {one: store.num_documents(one) for one in store.splits if store.num_documents(one)}
        # the wanted document, and the first of each split: those show which order is right
        probes = [(split, document), *((one, 0) for one in counts)]
        found = {
            order: [_index(counts, order, *probe) for probe in probes]
            for order in self._orders(counts)
        }
        if len({indexes[0] for indexes in found.values()}) > 1:
            every = sorted({index for indexes in found.values() for index in indexes})
            texts = _pick(source, partial(self.kept, split), every)
            right = {
                order: indexes
                for order, indexes in found.items()
                if all(
                    _holds(self, *probe, texts[index].value, cut=probe[1] == counts[probe[0]] - 1)
                    for probe, index in zip(probes, indexes, strict=True)
                )
            }
            # any one when none is right, so that the error is that of the text
            found = right or dict(list(found.items())[:1])
        if len({indexes[0] for indexes in found.values()}) > 1:
            orders = " or ".join(",".join(order) for order in found)
            raise OptionError(
                f"{store.folder}: has equal texts, so its splits may have been filled in the order "
                f"{orders}: say which with {{fill}}",
                fill=...,
            )
        at = next(iter(found.values()))[0]
        return _Region(source, at, cut=document == counts[split] - 1)

    def _orders(self, counts: dict[str, int]) -> Iterator[_Order]:
        """The orders in which splits with documents may have been filled."""
        if self._fill is not None:
            order = tuple(one for one in self._fill if one in counts)
            if set(order) != set(counts) or len(order) != len(counts):
                raise OptionError(
                    f"{{fill}}: wanted each of {sorted(counts)} once", fill=",".join(self._fill)
                )
            yield order
        elif len(counts) > _MOST_ORDERS:
            raise OptionError(f"{len(counts)} splits: give their order with {{fill}}", fill=...)
        else:
            yield from permutations(sorted(counts))

    def kept(self, split: str, values: pa.LargeStringArray) -> OffsetArray:
        """Numbers of the values of a batch that became documents: of any split, or where a hash
        chose the splits, of this one."""
        is_kept = np.ones(len(values), np.bool_)
        if self._has_empty:  # a text without tokens is no document
            is_kept = self.tokenizer.encode_batch(values).lengths > 0
        if self._by_hash is not None:
            is_kept &= self._by_hash.of_texts(values) == self._by_hash.splits.index(split)
        return np.flatnonzero(is_kept)

    def encoded(self, value: object) -> IntArray:
        """The ids that the build made of a value."""
        return np.array([*self.tokenizer.encode(str(value)), *self._end], np.int64)

    def pieces(self, value: object) -> tuple[list[Piece], Kind, str]:
        """The runs of tokens that are its texts, in order; what all others are, and the text that
        is shown with those."""
        text = str(value)
        return [Piece(0, len(self.tokenizer.encode(text)), None, text, text, 0)], "end", text


def _index(counts: dict[str, int], order: Sequence[str], split: str, document: int) -> int:
    return sum(counts[one] for one in order[: order.index(split)]) + document


def _locate(region: _Region, picked: _Picked) -> RowLocation:
    """Where in the input it was found."""
    source: Any = region.source
    if isinstance(source, ChatSource):
        return _locate_chat(source, picked)
    if isinstance(picked.value, Conversation):
        return RowLocation(id=picked.value.id)
    found = read_document(source, picked.cursor, picked.number, rows_before=region.rows_before)
    if found is None:
        return RowLocation(id=f"{source.name}: document {picked.given}", row=picked.given)
    if found[0] != str(picked.value):
        raise SourceError(f"source {source.name!r} changed while it was read: try again")
    return found[1]


def _locate_chat(source: ChatSource, picked: _Picked) -> RowLocation:
    number, own = picked.number, picked.value.id
    for batch in source.with_limits(num_documents=1).batches(picked.cursor):
        if number < len(batch.conversations):
            break
        number -= len(batch.conversations)
    name, position = str(batch.cursor["name"]), batch.cursor["position"]
    is_tree = str(source.describe()["shape"]).startswith("oasst")  # of several rows
    lines = position.get("lines") if isinstance(position, dict) and not is_tree else None
    row = lines if isinstance(lines, int) else None
    is_own = not own.startswith(f"{name}:")
    return RowLocation(id=own, file=name, row=row, own_id=own if is_own else None)


class _ChatLookup:
    """As `_TextLookup`, for conversations."""

    def __init__(
        self,
        store: Store,
        tokenizer: Tokenizer,
        source: ConversationSource,
        template: ChatTemplate | None,
    ) -> None:
        manifest = store.manifest
        facts = manifest.options["chat"]
        recorded = facts["template"]
        if template is None and "spec" not in recorded:
            raise OptionError(
                f"the store was rendered with the Jinja template {recorded.get('name')!r}: give it "
                "with {template}",
                template=...,
            )
        template = template or bind_template(spec_from_json(recorded["spec"]), tokenizer)
        if json.loads(json.dumps(template.describe())) != recorded:
            raise OptionError(
                f"the template {template.name!r} is not the one that the store was rendered with "
                f"({recorded.get('name')!r}, sha256 {recorded.get('sha256', '')[:12]}): use that"
            )
        self.store, self.tokenizer = store, tokenizer
        self._template, self._source = template, source
        self._policy = TrainPolicy(train_on=facts["train_on"], train_on_eot=facts["train_on_eot"])
        if manifest.split_rule.startswith(_BY_POSITION):
            raise OptionError(
                f"{store.folder}: an older version drew its splits from the positions of "
                "conversations: build it again with this one"
            )
        shares = facts["val_fraction"], facts.get("test_fraction", 0.0)
        self._by_hash = hash_split(manifest.seed, *shares)
        # the template left some out, so only rendering shows which
        self._drops = any(
            reason in REASONS or reason not in CHAT_REASONS
            for reason in manifest.ledger.documents.dropped
        )

    def region(self, split: str, document: int) -> _Region:  # noqa: ARG002
        return _Region(self._source, document)

    def kept(self, split: str, values: Sequence[Conversation]) -> OffsetArray:
        numbers: OffsetArray = np.arange(len(values))
        if self._drops:
            numbers = self._template.render(values, self._policy).kept
        splits = self._by_hash.of_conversations(values)
        mine: OffsetArray = numbers[splits[numbers] == self._by_hash.splits.index(split)]
        return mine

    def encoded(self, value: Conversation) -> IntArray:
        return self._template.render([value], self._policy).examples.ids.values

    def pieces(self, value: Conversation) -> tuple[list[Piece], Kind, str]:
        template = self._template
        if not isinstance(template, TokenTemplate):  # it does not separate texts from the rest
            return [], "turn", ""
        turns = lay_out(value, template.spec, self._policy)
        # A system turn for tools may have been put in front, or a system message folded into the
        # next.
        shift = len(turns) - len(value.messages)
        placed = [(turn - shift, one) for turn, (_, texts) in enumerate(turns) for one in texts]
        sizes = template.encoder.encode_batch([one.text for _, one in placed]).lengths.tolist()
        pieces, begin = [], 0
        for (number, one), size in zip(placed, sizes, strict=True):
            start = begin + _width(one.left, template)
            content, lead = _content(value, number, one.text)
            inserts = ("reasoning", "tool_call", "tools")
            part = next((name for name in inserts if f"{name}.before" in one.left), "content")
            pieces.append(Piece(start, start + size, part, one.text, content, lead))
            begin = start + size + _width(one.right, template)
        return pieces, "template", ""


def _content(conversation: Conversation, number: int, text: str) -> tuple[str, int]:
    """The content of a message that was trimmed to this text, and where in it the text starts."""
    messages = conversation.messages
    content = messages[number].get("content") if 0 <= number < len(messages) else None
    if isinstance(content, str) and content.strip() == text:
        return content, len(content) - len(content.lstrip())
    return text, 0


def _width(names: Names, template: TokenTemplate) -> int:
    return sum(len(template.pieces[name]) for name in names if name in template.pieces)
