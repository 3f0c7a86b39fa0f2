"""The words that files of conversations use for roles and parts, and what can be wrong with a turn.

Sources read turns in these words and give messages of one form; templates take that form only, and
drop what is left with the same reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

PartKind = Literal["text", "reasoning", "tool_call"]

ROLE_NAMES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "prompter": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Names that datasets use, in lower case -> role."""

MESSAGE_REASONS = {
    "content_part_not_text": "a part of a content is neither text, reasoning nor a tool call, or "
    "does not hold what its type says",
    "image_part": "a part of a content is an image",
    "audio_part": "a part of a content is audio",
    "video_part": "a part of a content is a video",
    "part_order": "the parts of a content are not in the order of a message: reasoning, text, tool "
    "calls",
    "reasoning_not_text": "a reasoning is not a string",
    "two_reasonings": "two places of a message hold different reasoning (reasoning_content, "
    "thinking, reasoning, a part, <think>)",
    "unclosed_think": "a text begins with <think>, which was to be split off, and has no </think>",
    "bad_tool_call": "a tool call has no name, or arguments that are not a JSON object",
    "two_tool_calls": "two places of a message hold tool calls (tool_calls, function_call, parts)",
}
"""Reason code -> sentence, of a turn that cannot become a message."""

_PART_KINDS: Mapping[str, PartKind] = {
    "text": "text",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "tool_call": "tool_call",
}
_MEDIA = ("image", "audio", "video")


class Dropped(Exception):
    """Why a conversation cannot be rendered: its text is the code of a reason."""


def normal_role(role: object) -> str | None:
    """The role that a name means, in any case; None for an unknown name, which is never guessed."""
    return ROLE_NAMES.get(role.lower()) if isinstance(role, str) else None


def read_part(part: object) -> tuple[PartKind, object]:
    """What kind of part it is, and its value under "text", "value" or the name of its type.

    Text and reasoning are strings. Dropped when it is none of these, or holds two values.
    """
    if not isinstance(part, Mapping):
        raise Dropped("content_part_not_text")
    name = part.get("type")
    kind = _PART_KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        media = (f"{one}_part" for one in _MEDIA if isinstance(name, str) and one in name.lower())
        raise Dropped(next(media, "content_part_not_text"))
    given = [part[key] for key in {"text", "value", name} if part.get(key) is not None]
    found = [value for value in given if value != ""] or given
    if not found or any(value != found[0] for value in found):
        raise Dropped("content_part_not_text")
    if kind != "tool_call" and not isinstance(found[0], str):
        raise Dropped("reasoning_not_text" if kind == "reasoning" else "content_part_not_text")
    return kind, found[0]
