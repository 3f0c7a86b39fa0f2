"""Conversations to ids, by a template made of tokens.

In: checked conversations, a template, an encoder.  Out: one sequence of ids per conversation.
Promise: each message is its role's opening id, the ids of its content exactly as the encoder
gives them, and the end id; nothing else is added. All contents go through one `encode_batch`.
Structure comes from the template alone: a content that encodes to a marker is refused.
Not here: the loss mask (mask.py), truncation, templates written as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.chat.check import ROLES, Conversation, special_in_text
from shardmill.errors import OptionError, TokenizerError
from shardmill.protocols import Encoder
from shardmill.records import IntArray, OffsetArray, Ragged


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTemplate:
    """One opening id per role and one end id for every message; all different."""

    openings: Mapping[str, int]  # role -> id
    end_id: int

    def __post_init__(self) -> None:
        if set(self.openings) != set(ROLES):
            raise OptionError(f"openings for {sorted(self.openings)}: wanted {sorted(ROLES)}")
        if len(set(self.marker_ids)) < len(self.marker_ids) or min(self.marker_ids) < 0:
            raise OptionError(
                f"markers {dict(self.openings)}, end {self.end_id}: wanted different ids from 0 up"
            )

    @property
    def marker_ids(self) -> tuple[int, ...]:
        return (*self.openings.values(), self.end_id)


def render(
    conversations: Sequence[Conversation], template: TokenTemplate, encoder: Encoder
) -> Ragged:
    """The ids of each conversation, in order. A text that becomes a marker is an error."""
    rendered, kept = render_sound(conversations, template, encoder)
    if len(kept) < len(conversations):
        bad = int(np.setdiff1d(np.arange(len(conversations)), kept)[0])
        raise TokenizerError(
            f"conversation {bad}: its text encodes to a marker of the template "
            f"({sorted(template.marker_ids)}), and text must never become structure; open the "
            "model with shardmill.tokenizer.open_tokenizer, which keeps them apart"
        )
    return rendered


def render_sound(
    conversations: Sequence[Conversation], template: TokenTemplate, encoder: Encoder
) -> tuple[Ragged, OffsetArray]:
    """The ids of the conversations whose text stayed text, and the positions of these.

    The rest is for the caller's ledger, as "special_in_text".
    """
    contents = [message["content"] for chat in conversations for message in chat]
    openings = [template.openings[message["role"]] for chat in conversations for message in chat]
    texts = encoder.encode_batch(contents)
    messages = _wrap(texts, np.asarray(openings, np.int64), template.end_id)
    # Conversation c is messages first[c]..first[c + 1], which lie behind one another already.
    first = np.zeros(len(conversations) + 1, np.int64)
    np.cumsum([len(chat) for chat in conversations], out=first[1:])
    rendered = Ragged(messages.values, messages.offsets[first])
    sound = np.ones(len(conversations), np.bool_)
    bad = special_in_text(texts, template.marker_ids)
    sound[np.searchsorted(first, bad, side="right") - 1] = False
    kept = rendered if sound.all() else rendered.keep(sound)
    return kept, np.flatnonzero(sound)


def _wrap(texts: Ragged, openings: IntArray, end_id: int) -> Ragged:
    """[4 5 | 6], openings [1 2], end 9 -> [1 4 5 9 | 2 6 9]: text i moves right by 2 i + 1."""
    offsets = texts.offsets + 2 * np.arange(len(texts) + 1)
    largest = int(max(openings.max(initial=0), end_id))
    dtype = np.result_type(texts.values.dtype, np.min_scalar_type(largest))
    values: IntArray = np.empty(offsets[-1], dtype)
    is_text = np.ones(len(values), np.bool_)
    is_text[offsets[:-1]] = False
    is_text[offsets[1:] - 1] = False
    values[is_text] = texts.values
    values[offsets[:-1]] = openings
    values[offsets[1:] - 1] = end_id
    return Ragged(values, offsets)
