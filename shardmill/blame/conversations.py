"""The conversation of input that an example of a store came from, and the words of its turns.

In: a chat store, the number of an example, the source of the build.  Out: the conversation, where
it was, and which of its tokens are words.
Promise: conversations are counted as the build counted them, from the start of the source; rendered
again, the one that is told gives the stored ids, every one of them.
Not here: which characters a token is (spans).
"""

from __future__ import annotations

import json
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardmill.blame.records import Piece
from shardmill.build.render import SplitRule
from shardmill.chat import (
    JINJA_REASONS,
    REASONS,
    ChatTemplate,
    TokenTemplate,
    TrainPolicy,
    bind_template,
    spec_from_json,
)
from shardmill.chat.places import Names, lay_out
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import ConversationSource, Tokenizer
from shardmill.records import Conversation, ConversationBatch, Cursor, IntArray, OffsetArray
from shardmill.shards import Manifest
from shardmill.sources import CHAT_REASONS, ChatSource, RowPlace


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
) -> tuple[Conversation, RowPlace]:
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
) -> RowPlace:
    if not isinstance(source, ChatSource):
        return RowPlace(id=found.id)
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
    return RowPlace(id=found.id, file=name, row=row, own_id=own)


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
