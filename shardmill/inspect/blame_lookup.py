"""The row of input that a document or conversation of a store came from.

Input is counted as the build counted it. With the store's table of origins one part of the input is
read, without it everything before the document, and the answer is the same. Each answer is proved:
encoded or rendered again, the row gives the stored ids, every one of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate, permutations
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from shardmill.building.assembly import mark_of
from shardmill.building.chats import SplitRule
from shardmill.building.plan import chunks_of
from shardmill.chat import (
    REASONS,
    ChatTemplate,
    TokenTemplate,
    TrainPolicy,
    bind_template,
    spec_from_json,
)
from shardmill.chat.token_template import Names, lay_out
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import ConversationSource, Source, Texts, Tokenizer, continues
from shardmill.records import Conversation, Cursor, IntArray, OffsetArray, TextBatch
from shardmill.sources import CHAT_REASONS, ChatSource
from shardmill.sources.source import FileSource, RowLocation, read_document
from shardmill.store import Origins, Store, read_origins
from shardmill.store.origins import COLUMNS, FEED, GRAIN, MARK, ROWS
from shardmill.store.readers import open_tokens

log = logging.getLogger(__name__)

FoundBy: TypeAlias = Literal["origins", "counting"]
Kind: TypeAlias = Literal["text", "end", "template", "turn"]
_Order: TypeAlias = tuple[str, ...]  # of splits

_MOST_ORDERS = 4
"""Splits whose orders are tried."""
_NO_TOKENS = "no_tokens"
"""The reason for which a build drops a text that gives none."""


def document_span(store: Store, split: str, document: int) -> tuple[int, int]:
    """The positions of a document's tokens, half-open."""
    total = store.num_documents(split)
    if not 0 <= document < total:
        raise OptionError(f"document {document:,}: split {split!r} has {total:,}")
    starts = store.document_starts(split)
    stop = int(starts[document + 1]) if document + 1 < total else store.num_tokens(split)
    return int(starts[document]), stop


def stored_ids(store: Store, split: str, document: int) -> IntArray:
    with closing(open_tokens(store, split)) as space:
        return space.read(*document_span(store, split, document))


class Piece(NamedTuple):
    """Some tokens of a document or conversation that one text became."""

    start: int  # in the document; one that was cut may end before `stop`
    stop: int
    part: str | None  # "content", "reasoning", "tool_call" or "tools"; None: of a document
    text: str  # as it was encoded
    content: str  # of its row or message, where that holds the whole text; else the text
    lead: int  # characters of the content before the text


class FoundRow(NamedTuple):
    """The row that a document or conversation came from."""

    location: RowLocation
    feed: int
    found_by: FoundBy
    pieces: list[Piece]  # the runs of tokens that are its texts, in order
    other: Kind  # what all other tokens are
    text: str = ""  # that is shown with them


class _Region(NamedTuple):
    """A part of the input, and which of its documents is wanted."""

    source: Source
    at: int  # the number of the document among those that the source gives
    feed: int
    rows_before: int | None
    found_by: FoundBy
    cut: bool  # a token limit may have cut the document


class _Picked(NamedTuple):
    """One text or conversation, and how to find it again."""

    value: Any
    cursor: Cursor | None  # of the batch before it
    number: int  # after that
    given: int  # values of the source before it


def _pick(
    source: Source | ConversationSource,
    kept: Callable[[Any, int], OffsetArray],
    indexes: Sequence[int],
) -> dict[int, _Picked]:
    """The documents with these numbers, which rise, of those that became documents of the store:
    `kept` gives their numbers in a batch, from its values and how many came before."""
    wanted, picked = list(indexes), dict[int, _Picked]()
    seen = given = 0
    cursor: Cursor | None = None
    for batch in source.batches():
        values = batch.texts if isinstance(batch, TextBatch) else batch.conversations
        numbers = kept(values, given)
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


class SourceLookup:
    """Finds the text of any document of a store in the sources of its build."""

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
        if self._origins is None:
            log.warning("%s: has no table of origins: the input is counted", store.folder)
        self._grains: dict[int, Sequence[Source]] = {}

    def find(self, split: str, document: int) -> FoundRow:
        """The row of a document."""
        if self._origins is not None:
            region = self._by_table(self._origins, split, document)
        else:
            region = self._by_counting(split, document)
        (picked,) = _pick(region.source, self._kept, [region.at]).values()
        text = str(picked.value)
        if not self._holds(split, document, text, cut=region.cut):
            raise SourceError(
                f"{self.store.folder}: document {document:,} of split {split!r} holds other "
                f"tokens than source {region.source.name!r} gives now in its place: the input "
                "changed where its fingerprint does not look, or the library of the tokenizer did"
            )
        piece = Piece(0, len(self.tokenizer.encode(text)), None, text, text, 0)
        location = _locate(region, picked)
        return FoundRow(location, region.feed, region.found_by, [piece], "end", text)

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
        before = sum(counts[one] for one in order[: order.index(split)])
        # a build counts the lines before such a part of a file
        numbered = (
            isinstance(grain, FileSource)
            and continues(grain)
            and grain.settings.get("kind") == "jsonl"
        )
        return _Region(
            source=grain or self._sources[feed],
            at=before + document - firsts[split],
            feed=feed,
            rows_before=rows if numbered else None,
            found_by="origins" if grain else "counting",
            cut=document == int(edges[mine[-1] + 1, column]) - 1,
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
        counts = {one: store.num_documents(one) for one in store.splits if store.num_documents(one)}
        # the wanted document, and the first of each split: those show which order is right
        probes = [(split, document), *((one, 0) for one in counts)]
        found = {
            order: [_index(counts, order, *probe) for probe in probes]
            for order in self._orders(counts)
        }
        if len({indexes[0] for indexes in found.values()}) > 1:
            every = sorted({index for indexes in found.values() for index in indexes})
            texts = {at: str(one.value) for at, one in _pick(source, self._kept, every).items()}
            right = {
                order: indexes
                for order, indexes in found.items()
                if all(
                    self._holds(*probe, texts[index], cut=probe[1] == counts[probe[0]] - 1)
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
        return _Region(
            source=source,
            at=next(iter(found.values()))[0],
            feed=0,
            rows_before=None,
            found_by="counting",
            cut=document == counts[split] - 1,
        )

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

    def _kept(self, texts: Texts, given: int) -> OffsetArray:  # noqa: ARG002
        """Numbers of the texts that became documents: those without tokens did not."""
        if not self._has_empty:
            return np.arange(len(texts))
        return np.flatnonzero(self.tokenizer.encode_batch(texts).lengths > 0)

    def _holds(self, split: str, document: int, text: str, *, cut: bool) -> bool:
        """Whether this text is the document; with `cut`, whether it begins with it."""
        stored = stored_ids(self.store, split, document)
        made = np.array([*self.tokenizer.encode(text), *self._end], np.int64)
        return np.array_equal(stored, made[: len(stored)] if cut else made)


def _index(counts: dict[str, int], order: Sequence[str], split: str, document: int) -> int:
    before = accumulate((counts[one] for one in order), initial=0)
    return dict(zip(order, before, strict=False))[split] + document


def _locate(region: _Region, picked: _Picked) -> RowLocation:
    found = read_document(
        region.source, picked.cursor, picked.number, rows_before=region.rows_before
    )
    if found is None:
        return RowLocation(id=f"{region.source.name}: document {picked.given}", row=picked.given)
    if found[0] != str(picked.value):
        raise SourceError(f"source {region.source.name!r} changed while it was read: try again")
    return found[1]


class ChatLookup:
    """Finds any conversation of a store in the source of its build, and the words of its turns."""

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
                f"the store was rendered with the Jinja template {recorded.get('name')!r}, which "
                "it does not hold: give it with {template}",
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
        self._rule = SplitRule(seed=manifest.seed, val_fraction=facts["val_fraction"])
        # the template left some out, so only rendering shows which
        self._drops = any(
            reason in REASONS or reason not in CHAT_REASONS
            for reason in manifest.ledger.documents.dropped
        )

    def find(self, split: str, document: int) -> FoundRow:
        """The row of a conversation."""

        def kept(conversations: Sequence[Conversation], given: int) -> OffsetArray:
            numbers: OffsetArray = np.arange(len(conversations))
            if self._drops:
                numbers = self._template.render(conversations, self._policy).kept
            splits = self._rule.assign(conversations, first=given)
            mine: OffsetArray = numbers[splits[numbers] == self._rule.splits.index(split)]
            return mine

        (picked,) = _pick(self._source, kept, [document]).values()
        rendered = self._template.render([picked.value], self._policy)
        stored = stored_ids(self.store, split, document)
        if len(rendered.kept) != 1 or not np.array_equal(rendered.examples.ids.values, stored):
            raise SourceError(
                f"source {self._source.name!r}: what is in the place of example {document:,} of "
                f"split {split!r} gives other tokens than the store holds: the input is not that "
                "of the build, or a library changed"
            )
        location = self._locate(picked.cursor, picked.number, picked.value)
        pieces = self._pieces(picked.value)
        other: Kind = "turn" if pieces is None else "template"
        return FoundRow(location, 0, "counting", pieces or [], other)

    def _locate(self, cursor: Cursor | None, number: int, found: Conversation) -> RowLocation:
        source = self._source
        if not isinstance(source, ChatSource):
            return RowLocation(id=found.id)
        for batch in source.with_limits(num_documents=1).batches(cursor):
            if number < len(batch.conversations):
                break
            number -= len(batch.conversations)
        name, position = str(batch.cursor["name"]), batch.cursor["position"]
        is_tree = str(source.describe()["shape"]).startswith("oasst")  # of several rows
        lines = position.get("lines") if isinstance(position, dict) and not is_tree else None
        row = lines if isinstance(lines, int) else None
        own = None if found.id.startswith(f"{name}:") else found.id
        return RowLocation(id=found.id, file=name, row=row, own_id=own)

    def _pieces(self, conversation: Conversation) -> list[Piece] | None:
        """The texts of the conversation; all other tokens are the template's. None for a template
        that does not separate them."""
        template = self._template
        if not isinstance(template, TokenTemplate):
            return None
        turns = lay_out(conversation, template.spec, self._policy)
        # A system turn for tools may have been put in front, or a system message folded into the
        # next.
        shift = len(turns) - len(conversation.messages)
        placed = [(turn - shift, one) for turn, (_, texts) in enumerate(turns) for one in texts]
        sizes = template.encoder.encode_batch([one.text for _, one in placed]).lengths.tolist()
        pieces, begin = [], 0
        for (number, one), size in zip(placed, sizes, strict=True):
            start = begin + _width(one.left, template)
            content, lead = _content(conversation, number, one.text)
            inserts = ("reasoning", "tool_call", "tools")
            part = next((name for name in inserts if f"{name}.before" in one.left), "content")
            pieces.append(Piece(start, start + size, part, one.text, content, lead))
            begin = start + size + _width(one.right, template)
        return pieces


def _content(conversation: Conversation, number: int, text: str) -> tuple[str, int]:
    """The content of a message that was trimmed to this text, and where in it the text starts."""
    messages = conversation.messages
    content = messages[number].get("content") if 0 <= number < len(messages) else None
    if isinstance(content, str) and content.strip() == text:
        return content, len(content) - len(content.lstrip())
    return text, 0


def _width(names: Names, template: TokenTemplate) -> int:
    return sum(len(template.pieces[name]) for name in names if name in template.pieces)
