"""Conversations of a source to examples in the dtype of the store, each with its split.

In: a source, a template, a policy, where to go on.  Out: portions for the journal.
Promise: a portion for each batch of the source, in order; every conversation is in it, whole, or
among its drops; a conversation's split depends on the seed and its group (or else its place among
all conversations of the source) and on nothing else, so a group never parts.
Not here: what a template does (chat), where bytes go (segments.py, commit.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from shardmill.ahead import read_ahead
from shardmill.build.portion import Account, ChatPart, Portion
from shardmill.build.tokenise import EncoderDesk, TokenRules
from shardmill.chat.contract import ChatTemplate, Rendered, TrainPolicy
from shardmill.errors import BuildError, SourceError, TokenRangeError
from shardmill.protocols import ConversationSource, Encoder
from shardmill.records import ChatExamples, Conversation, ConversationBatch, Cursor

MAX_EXAMPLE_TOKENS = 2**31 - 1
"""One conversation; more is a mistake in the input, and rows count in 32 bits elsewhere."""

Bind = Callable[[Encoder], ChatTemplate]
"""A template over the encoder that a build chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Train or val, by a hash. The number of a split is its place in `splits`."""

    seed: int
    val_fraction: float

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "val") if self.val_fraction else ("train",)

    def words(self) -> str:
        if not self.val_fraction:
            return "all to train"
        return (
            f"val when the hash of (seed, group, else position) is in the lowest "
            f"{self.val_fraction:g} of its range, else train"
        )

    def assign(self, conversations: Iterable[Conversation], *, first: int) -> npt.NDArray[np.uint8]:
        """The split of each; `first` is the number of conversations of the source before them."""
        limit = int(self.val_fraction * 2**64)
        if not limit:
            return np.zeros(len(list(conversations)), np.uint8)
        numbers = [
            self._hash(position, conversation.group) < limit
            for position, conversation in enumerate(conversations, start=first)
        ]
        return np.array(numbers, np.uint8)

    def _hash(self, position: int, group: str | None) -> int:
        key = ("position", position) if group is None else ("group", group)
        digest = hashlib.sha256(repr((self.seed, "split", *key)).encode()).digest()
        return int.from_bytes(digest[:8], "little")


class ChatFeeder:
    """The conversations of a source on their way into the journal. Reading, rendering and what
    the caller does with portions go on at the same time, each in a thread of its own."""

    def __init__(
        self,
        source: ConversationSource,
        bind: Bind,
        policy: TrainPolicy,
        *,
        desk: EncoderDesk,
        rules: TokenRules,
        split_rule: SplitRule,
    ) -> None:
        self._source, self._bind, self._policy = source, bind, policy
        self._desk, self._rules, self._split_rule = desk, rules, split_rule
        self._given = 0

    def portions(
        self, cursor: Cursor | None, given: int
    ) -> Generator[tuple[Portion, Account], None, None]:
        """What follows `cursor`, before which lie `given` conversations."""
        self._given = given
        with closing(read_ahead(self._source.batches(cursor))) as batches:
            first = next(batches, None)
            template = self._bind(self._desk.encoder(_contents(first)))
            rest = chain([first], batches) if first is not None else iter(())
            with closing(read_ahead(self._rendered(rest, template))) as rendered:
                for batch, result in rendered:
                    yield self._portion(batch, result)

    def _rendered(
        self, batches: Iterator[ConversationBatch], template: ChatTemplate
    ) -> Iterator[tuple[ConversationBatch, Rendered]]:
        name = self._source.name
        for batch in batches:
            given = len(batch.conversations)
            if batch.num_read != given + len(batch.drops):
                raise SourceError(
                    f"source {name!r} says it read {batch.num_read:,} conversations, but gave "
                    f"{given:,} and dropped {len(batch.drops):,}: each is one or the other"
                )
            result = template.render(batch.conversations, self._policy)
            found = len(result.examples.ids)
            if found + len(result.drops) != given or found != len(result.kept):
                raise BuildError(
                    f"template {template.name!r} made {found:,} examples and {len(result.drops):,} "
                    f"drops of {given:,} conversations: each must become one or the other"
                )
            yield batch, result

    def _portion(self, batch: ConversationBatch, result: Rendered) -> tuple[Portion, Account]:
        examples = self._fitted(result.examples)
        splits = self._split_rule.assign(batch.conversations, first=self._given)
        part = ChatPart(examples=examples, splits=splits[result.kept])
        self._given += len(batch.conversations)
        account = Account(
            num_read=batch.num_read,
            num_given=len(batch.conversations),
            num_bytes=4 * len(examples.ids.values),  # nobody counts bytes of records
            counts=batch.counts,
            cursor=batch.cursor,
        )
        drops = (*batch.drops, *result.drops)
        return Portion(documents=examples.ids, drops=drops, chat=part), account

    def _fitted(self, examples: ChatExamples) -> ChatExamples:
        longest = int(examples.ids.lengths.max(initial=0))
        if longest > MAX_EXAMPLE_TOKENS:
            raise TokenRangeError(
                f"source {self._source.name!r}: a conversation of {longest:,} tokens; one may have "
                f"{MAX_EXAMPLE_TOKENS:,}: cut it in the input"
            )
        ids = self._rules.fit(examples.ids, source=self._source.name, first=self._given)
        return ChatExamples(
            ids=ids,
            mask=examples.mask,
            turn_starts=examples.turn_starts,
            turn_roles=examples.turn_roles,
        )


def _contents(batch: ConversationBatch | None) -> list[str]:
    """Texts of the first conversations, to try an engine on."""
    conversations = batch.conversations if batch is not None else ()
    contents = (
        message.get("content")
        for conversation in conversations
        for message in conversation.messages
        if isinstance(message, dict)
    )
    return [content for content in contents if isinstance(content, str)]
