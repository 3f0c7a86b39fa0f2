"""The row of input that a document of a store came from.

In: a store, the number of a document, the sources of the build.  Out: its text and where that was.
Promise: documents are counted as the build counted them; with the store's table of origins one
grain of input is read, without it all that lies before, and the answer is the same. It is proved by
the ids; where two orders of the splits could both be true, that is said.
Not here: conversations, the place of a token in the text.

The conversation of input that an example of a store came from, and the words of its turns.

In: a chat store, the number of an example, the source of the build.  Out: the conversation, where
it was, and which of its tokens are words.
Promise: conversations are counted as the build counted them, from the start of the source; rendered
again, the one that is told gives the stored ids, every one of them.
Not here: which characters a token is (spans).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, permutations
from typing import Any

import numpy as np

from shardmill.building.assembly import mark_of
from shardmill.building.chats import SplitRule
from shardmill.building.plan import chunks_of
from shardmill.chat import (
    JINJA_REASONS,
    REASONS,
    ChatTemplate,
    TokenTemplate,
    TrainPolicy,
    bind_template,
    spec_from_json,
)
from shardmill.chat.turns import Names, lay_out
from shardmill.errors import OptionError, SourceError
from shardmill.inspect.blame_records import FoundBy, FoundText, Piece, Proof
from shardmill.protocols import ConversationSource, Source, Tokenizer, continues
from shardmill.records import Conversation, ConversationBatch, Cursor, IntArray, OffsetArray
from shardmill.sources import CHAT_REASONS, ChatSource, FileSource, RowLocation, read_document
from shardmill.store import Manifest, Origins, read_origins
from shardmill.store.origins import COLUMNS, FEED, GRAIN, MARK, ROWS

log = logging.getLogger(__name__)


_MOST_ORDERS = 4
"""Splits whose orders are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """Some input, and which of its documents is meant."""

    source: Source
    index: int  # among the documents that it gave
    feed: int
    rows_before: int | None
    found_by: FoundBy
    cut: bool  # a token limit may have cut the document


@dataclass(frozen=True, slots=True)
class _Picked:
    """One text, and how to find it again."""

    text: str
    cursor: Cursor | None  # of the batch before it
    number: int  # behind that
    given: int  # texts of the source before it


class SourceLookup:
    """The documents of a store and the sources that they came from."""

    def __init__(
        self, proof: Proof, sources: Sequence[Source], fill: Sequence[str] | None = None
    ) -> None:
        """`fill` is the order in which the build filled the splits, needed only where neither a
        table of origins nor the texts tell it."""
        self._proof, self._sources, self._fill = proof, sources, fill
        store = proof.store
        self._origins = read_origins(store.folder, store.manifest)
        if self._origins is None:
            log.warning("%s: has no table of origins: the input is counted", store.folder)
        self._grains: dict[int, Sequence[Source]] = {}

    def find(self, split: str, document: int) -> FoundText:
        """The text of a document."""
        proof = self._proof
        if self._origins is not None:
            region = self._by_table(self._origins, split, document)
        else:
            region = _by_counting(proof, split, document, self._sources, self._fill)
        (picked,) = _pick(region.source, [region.index], proof).values()
        if not proof.holds(split, document, picked.text, cut=region.cut):
            raise SourceError(
                f"{proof.store.folder}: document {document:,} of split {split!r} holds other "
                f"tokens than source {region.source.name!r} gives now at its place: the input "
                "changed where its fingerprint does not look, or the library of the tokenizer did"
            )
        place = _row(region, picked)
        return FoundText(text=picked.text, place=place, feed=region.feed, found_by=region.found_by)

    def _by_table(self, origins: Origins, split: str, document: int) -> _Region:
        """The grain of a document; the whole feed when the input is cut otherwise now."""
        table, entry = origins.table, int(origins.first(split).searchsorted(document, "right")) - 1
        feed, number, mark, rows = (int(table[entry, at]) for at in (FEED, GRAIN, MARK, ROWS))
        ends = [self._proof.store.num_documents(one) for one in origins.splits]
        edges = np.vstack((table[:, len(COLUMNS) :], ends))
        mine = np.flatnonzero(table[:, FEED] == feed)
        grain = self._grain(feed, number, mark)
        start, stop = (entry, entry + 1) if grain else (int(mine[0]), int(mine[-1]) + 1)
        counts = dict(zip(origins.splits, (edges[stop] - edges[start]).tolist(), strict=True))
        firsts = dict(zip(origins.splits, edges[start].tolist(), strict=True))
        order, column = origins.fill[feed], origins.splits.index(split)
        before = sum(counts[one] for one in order[: order.index(split)])
        return _Region(
            source=grain or self._sources[feed],
            index=before + document - firsts[split],
            feed=feed,
            rows_before=rows if grain and _counts_lines(grain) else None,
            found_by="origins" if grain else "counting",
            cut=document == int(edges[mine[-1] + 1, column]) - 1,
        )

    def _grain(self, feed: int, number: int, mark: int) -> Source | None:
        """The grain that a table means; None when the input is cut otherwise now."""
        if feed not in self._grains:
            self._grains[feed] = chunks_of(self._sources[feed])
        grains = self._grains[feed]
        if number < len(grains) and mark_of(grains[number]) == mark:
            return grains[number]
        log.warning("%s: is cut otherwise now: it is counted", self._sources[feed].name)
        return None


def _counts_lines(grain: Source) -> bool:
    """Whether a build counts the lines that lie before such a part of a file."""
    return (
        continues(grain) and isinstance(grain, FileSource) and grain.settings.get("kind") == "jsonl"
    )


def _by_counting(
    proof: Proof, split: str, document: int, sources: Sequence[Source], fill: Sequence[str] | None
) -> _Region:
    """The number of a document among all of the one source, when no table tells."""
    store = proof.store
    if len(sources) > 1:
        raise OptionError(
            f"{store.folder}: was built from {len(sources)} sources and has no table of origins, "
            "so nobody knows how many documents each of them gave; build it again with this "
            "version"
        )
    counts = {one: store.num_documents(one) for one in store.splits if store.num_documents(one)}
    found = {order: _index(counts, order, split, document) for order in _orders(counts, fill)}
    if len(set(found.values())) > 1:
        found = _proved(proof, counts, found, sources[0], (split, document))
    if len(set(found.values())) > 1:
        orders = " or ".join(",".join(order) for order in found)
        raise OptionError(
            f"{store.folder}: equal texts, so that its splits may have been filled in the order "
            f"{orders}: say which with --fill (fill=)"
        )
    return _Region(
        source=sources[0],
        index=next(iter(found.values())),
        feed=0,
        rows_before=None,
        found_by="counting",
        cut=document == counts[split] - 1,
    )


def _orders(counts: dict[str, int], fill: Sequence[str] | None) -> Iterator[tuple[str, ...]]:
    """The orders in which splits with documents may have been filled."""
    if fill is not None:
        order = tuple(one for one in fill if one in counts)
        if set(order) != set(counts) or len(order) != len(counts):
            raise OptionError(f"fill={list(fill)}: wanted each of {sorted(counts)} once")
        yield order
    elif len(counts) > _MOST_ORDERS:
        raise OptionError(f"{len(counts)} splits: say their order with --fill (fill=)")
    else:
        yield from permutations(sorted(counts))


def _index(counts: dict[str, int], order: Sequence[str], split: str, document: int) -> int:
    before = accumulate((counts[one] for one in order), initial=0)
    return dict(zip(order, before, strict=False))[split] + document


def _proved(
    proof: Proof,
    counts: dict[str, int],
    found: dict[tuple[str, ...], int],
    source: Source,
    asked: tuple[str, int],
) -> dict[tuple[str, ...], int]:
    """The orders in which the first document of each split, and the one asked for, are the right
    texts; any one when none is, so that the error is that of the text."""
    probes = {*((one, 0) for one in counts), asked}
    places = {(order, probe): _index(counts, order, *probe) for order in found for probe in probes}
    picked = _pick(source, sorted({*places.values()}), proof)

    def is_right(order: tuple[str, ...], split: str, number: int) -> bool:
        text, cut = picked[places[order, (split, number)]].text, number == counts[split] - 1
        return proof.holds(split, number, text, cut=cut)

    right = [order for order in found if all(is_right(order, *probe) for probe in probes)]
    return {order: found[order] for order in right or list(found)[:1]}


def _pick(source: Source, indexes: Sequence[int], proof: Proof) -> dict[int, _Picked]:
    """The texts of the documents with these numbers, which rise."""
    wanted, picked = list(indexes), dict[int, _Picked]()
    seen = given = 0
    cursor: Cursor | None = None
    for batch in source.batches():
        numbers = np.flatnonzero(proof.filled(batch.texts))
        while wanted and wanted[0] < seen + len(numbers):
            number = int(numbers[wanted[0] - seen])
            text = str(batch.texts[number].as_py())
            picked[wanted.pop(0)] = _Picked(text, cursor, number, given + number)
        if not wanted:
            return picked
        seen, given, cursor = seen + len(numbers), given + len(batch.texts), batch.cursor
    raise SourceError(
        f"source {source.name!r} gives {seen:,} documents, but the store was built from more: the "
        "input is not the one of the build"
    )


def _row(region: _Region, picked: _Picked) -> RowLocation:
    found = read_document(
        region.source, picked.cursor, picked.number, rows_before=region.rows_before
    )
    if found is None:
        return RowLocation(id=f"{region.source.name}: document {picked.given}", row=picked.given)
    if found[0] != picked.text:
        raise SourceError(f"source {region.source.name!r} changed while it was read: try again")
    return found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How the conversations of a store became tokens."""

    template: ChatTemplate
    policy: TrainPolicy
    rule: SplitRule
    drops: bool  # the template left some out, so that only rendering tells which


def rendering_of(
    manifest: Manifest, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Rendering:
    """By the facts of a manifest; a template that was written in Jinja must be given."""
    facts = manifest.options["chat"]
    told = facts["template"]
    if template is None and "spec" not in told:
        raise OptionError(
            f"the store was rendered with the Jinja template {told.get('name')!r}, which it does "
            "not hold: give it with --template (template=)"
        )
    template = template or bind_template(spec_from_json(told["spec"]), tokenizer)
    if json.loads(json.dumps(template.describe())) != told:
        raise OptionError(
            f"the template {template.name!r} is not the one that the store was rendered with "
            f"({told.get('name')!r}, sha256 {told.get('sha256', '')[:12]}): take that one"
        )
    reasons = manifest.ledger.documents.dropped
    written = REASONS.keys() | JINJA_REASONS.keys()
    return Rendering(
        template=template,
        policy=TrainPolicy(train_on=facts["train_on"], train_on_eot=facts["train_on_eot"]),
        rule=SplitRule(seed=manifest.seed, val_fraction=facts["val_fraction"]),
        drops=any(reason in written or reason not in CHAT_REASONS for reason in reasons),
    )


def find_conversation(
    source: ConversationSource, rendering: Rendering, split: str, number: int, stored: IntArray
) -> tuple[Conversation, RowLocation]:
    """The conversation that became example `number` of a split, whose ids are `stored`."""
    wanted = rendering.rule.splits.index(split)
    given = seen = 0
    cursor: Cursor | None = None
    for batch in source.batches():
        splits = rendering.rule.assign(batch.conversations, first=given)
        kept = _kept(batch, rendering)
        mine = kept[splits[kept] == wanted]
        if number < seen + len(mine):
            place = int(mine[number - seen])
            found = batch.conversations[place]
            if not _is_same(found, rendering, stored):
                break
            return found, _place(source, cursor, place, found)
        given, seen, cursor = given + len(batch.conversations), seen + len(mine), batch.cursor
    raise SourceError(
        f"source {source.name!r}: what stands at the place of example {number:,} of split "
        f"{split!r} gives other tokens than the store holds: the input is not that of the build, "
        "or a library changed"
    )


def _kept(batch: ConversationBatch, rendering: Rendering) -> OffsetArray:
    """Numbers of the conversations that became examples."""
    if not rendering.drops:
        return np.arange(len(batch.conversations))
    return rendering.template.render(batch.conversations, rendering.policy).kept


def _is_same(conversation: Conversation, rendering: Rendering, stored: IntArray) -> bool:
    rendered = rendering.template.render([conversation], rendering.policy)
    return len(rendered.kept) == 1 and np.array_equal(rendered.examples.ids.values, stored)


def _place(
    source: ConversationSource, cursor: Cursor | None, number: int, found: Conversation
) -> RowLocation:
    if not isinstance(source, ChatSource):
        return RowLocation(id=found.id)
    one: Any = copy(source)
    one._limits = replace(one._limits, num_documents=1)
    for batch in one.batches(cursor):
        if number < len(batch.conversations):
            break
        number -= len(batch.conversations)
    name, position = str(batch.cursor["name"]), batch.cursor["position"]
    is_tree = str(source.describe()["shape"]).startswith("oasst")  # of several rows
    lines = position.get("lines") if isinstance(position, dict) and not is_tree else None
    row = lines if isinstance(lines, int) else None
    own = None if found.id.startswith(f"{name}:") else found.id
    return RowLocation(id=found.id, file=name, row=row, own_id=own)


def pieces_of(conversation: Conversation, rendering: Rendering) -> list[Piece] | None:
    """The runs of tokens that are texts of the conversation, in order; all others are the
    template's. None for a template that does not tell them apart."""
    template = rendering.template
    if not isinstance(template, TokenTemplate):
        return None
    laid = lay_out(conversation, template.spec, rendering.policy)
    assert not isinstance(laid, str), "it was rendered"
    # A system turn for tools may have been put in front, or a system message folded into the next.
    shift = len(laid) - len(conversation.messages)
    placed = [(turn - shift, one) for turn, (_, texts) in enumerate(laid) for one in texts]
    sizes = template.encoder.encode_batch([one.text for _, one in placed]).lengths.tolist()
    pieces, begin = [], 0
    for (number, one), size in zip(placed, sizes, strict=True):
        start = begin + _width(one.left, template)
        content, lead = _content(conversation, number, one.text)
        pieces.append(
            Piece(
                start=start,
                stop=start + size,
                part=_part(one.left),
                text=one.text,
                content=content,
                lead=lead,
            )
        )
        begin = start + size + _width(one.right, template)
    return pieces


def _content(conversation: Conversation, number: int, text: str) -> tuple[str, int]:
    """The content of a message that was trimmed to this text, and how far in it begins."""
    messages = conversation.messages
    content = messages[number].get("content") if 0 <= number < len(messages) else None
    if isinstance(content, str) and content.strip() == text:
        return content, len(content) - len(content.lstrip())
    return text, 0


def _width(names: Names, template: TokenTemplate) -> int:
    return sum(len(template.pieces[name].ids) for name in names if name in template.pieces)


def _part(left: Names) -> str:
    inserts = ("reasoning", "tool_call", "tools")
    return next((name for name in inserts if f"{name}.before" in left), "content")
