"""What a chat template is asked for, whatever kind it is.

In: conversations and a policy.  Out: `Rendered`: their tokens and which of them are trained.
Promise of every template: ids and mask come out of one pass over the conversation, never out of a
search in ids or text; a conversation comes out whole or among the drops; every example trains at
least one token; text never becomes structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shardmill.records import JSON, ChatExamples, Conversation, Drop, OffsetArray

TrainOn = Literal["assistant", "last-assistant", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPolicy:
    """Which turns are trained. A message's own "train": true or false is stronger."""

    train_on: TrainOn = "assistant"  # or the last assistant turn only, or every turn's words
    train_on_eot: bool = True  # a trained turn trains its end too


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """What a template made of some conversations."""

    examples: ChatExamples
    kept: OffsetArray  # (len(examples.ids),) position of each among the input, ascending
    drops: tuple[Drop, ...]  # the others, in order


class ChatTemplate(Protocol):
    """Conversations to tokens with a loss mask, bound to one tokenizer."""

    @property
    def name(self) -> str: ...

    @property
    def marker_ids(self) -> frozenset[int]:
        """Every id that only structure may have: no content encodes to one of them."""

    def describe(self) -> dict[str, JSON]:
        """What identifies it, for the manifest: kind, name, and a "sha256" over everything that
        decides ids or mask apart from the tokenizer."""

    def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered: ...
