"""Conversation to ids, and which of them are trained.

check.py     is this a conversation? if not, the reason code
template.py  conversations -> ids
mask.py      ids -> which of them the assistant said
"""

from __future__ import annotations

from shardmill.chat.check import (
    REASONS,
    ROLES,
    Conversation,
    Message,
    reason_to_drop,
    sift,
    special_in_text,
)
from shardmill.chat.mask import assistant_mask
from shardmill.chat.template import TokenTemplate, render, render_sound

__all__ = [
    "REASONS",
    "ROLES",
    "Conversation",
    "Message",
    "TokenTemplate",
    "assistant_mask",
    "reason_to_drop",
    "render",
    "render_sound",
    "sift",
    "special_in_text",
]
