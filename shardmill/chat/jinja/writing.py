"""Everything a template must write about one conversation before its tokens can be trusted.

In: an engine, facts, one conversation.  Out: a `Writing`, or the reason why there is none.
Promise: only `apply_chat_template` writes; nothing is cut out of a text or glued to one.
Cost: one rendering per message, one per assistant turn, and two for the whole; two more for each
other turn that is trained.
Not here: tokens (turns.py).
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.chat.jinja.engine import JinjaEngine, Messages, Tools
from shardmill.chat.jinja.facts import (
    TemplateFacts,
    as_messages,
    find_preamble,
    harmless,
    leaves,
    names_of_tools,
    text_or_none,
)
from shardmill.chat.messages import CheckedMessage, tool_texts
from shardmill.records import BoolArray, Conversation

_ROOM = 2**20
_ROOM_PER_CHARACTER = 64
"""A template that writes more than this is broken or hostile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """The texts of one conversation. Each is what the template wrote, whole."""

    messages: list[dict[str, Any]]
    checked: list[CheckedMessage]
    tools: Tools
    whole: str
    prefixes: list[str | None]  # for the first 1, 2, ... messages; None where it refuses
    words: dict[int, str]  # message -> all that stands before its first word, for those trained
    openings: tuple[str, ...]  # what may stand before the first turn and belong to nobody
    harmless: str

    def texts(self) -> Iterator[str]:
        """Everything that must become tokens."""
        yield self.whole
        yield from (prefix for prefix in self.prefixes if prefix is not None)
        yield from self.words.values()
        yield from self.openings
        yield self.harmless


def write(
    engine: JinjaEngine,
    facts: TemplateFacts,
    conversation: Conversation,
    checked: list[CheckedMessage],
    trained: BoolArray,
) -> Writing | str:
    """Write a conversation in all the ways its proof needs, or say why it is dropped."""
    messages = as_messages(conversation.messages, checked, facts.arguments)
    tools = conversation.tools or None
    reason = _reason(facts, messages, checked, tools)
    if reason:
        return reason
    whole = text_or_none(engine, messages, tools)
    plain = text_or_none(engine, harmless(messages), harmless(tools))
    if whole is None or plain is None:
        return "template_refuses"
    size = sum(map(len, leaves([messages, tools])))
    if len(whole) > _ROOM + _ROOM_PER_CHARACTER * size:
        return "template_refuses"
    if any(name not in whole for name in names_of_tools(tools or ())):
        return "no_place_for_tools"
    stops = range(1, len(messages))
    prefixes = [*(text_or_none(engine, messages[:stop], tools) for stop in stops), whole]
    words = _words(engine, facts, messages, tools, trained)
    if words is None:
        return "template_refuses"
    return Writing(
        messages=messages,
        checked=checked,
        tools=tools,
        whole=whole,
        prefixes=prefixes,
        words=words,
        openings=_openings(engine, facts, messages, tools, prefixes[0]),
        harmless=plain,
    )


def _reason(
    facts: TemplateFacts,
    messages: list[dict[str, Any]],
    checked: Sequence[CheckedMessage],
    tools: Tools,
) -> str | None:
    """What can be said before anything is written."""
    if tools is not None and tool_texts(tools) is None:
        return "bad_tools"
    if facts.arguments == "none" and any(message.calls for message in checked):
        return "no_place_for_tool_calls"
    # Roles are ours; everything else came from outside.
    said = [{key: part for key, part in one.items() if key != "role"} for one in messages]
    if facts.literals:
        structure = re.compile("|".join(map(re.escape, facts.literals)))
        if any(structure.search(text) for text in leaves([said, tools])):
            return "special_in_text"
    return None


def _words(
    engine: JinjaEngine,
    facts: TemplateFacts,
    messages: list[dict[str, Any]],
    tools: Tools,
    trained: BoolArray,
) -> dict[int, str] | None:
    """What stands before the words of every assistant turn and of every other trained one."""
    found = {}
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _prompt(engine, facts, messages[:place], tools, messages)
        elif trained[place]:
            before = _before_words(engine, messages, place, tools)
        else:
            continue
        if before is None:
            return None
        found[place] = before
    return found


def _prompt(
    engine: JinjaEngine, facts: TemplateFacts, before: Messages, tools: Tools, messages: Messages
) -> str | None:
    """The generation prompt that this assistant turn answers."""
    if before:
        return text_or_none(engine, before, tools, prompt=True)
    # Nobody can ask for a prompt behind no message: it is the opening, behind what opens a chat.
    first = text_or_none(engine, messages[:1], tools) or ""
    for start in (facts.preamble, facts.bos, ""):
        if first.startswith(start + facts.opening):
            return start + facts.opening
    return None


def _before_words(
    engine: JinjaEngine, messages: list[dict[str, Any]], place: int, tools: Tools
) -> str | None:
    """All that is the same whatever this message says: up to its first word."""
    written = []
    for text in ("alpha", "omega"):
        other = {**messages[place], "content": text}
        found = text_or_none(engine, [*messages[:place], other, *messages[place + 1 :]], tools)
        if found is None:
            return None
        written.append(found)
    return os.path.commonprefix(written)  # noqa: RUF071 - texts, not paths


def _openings(
    engine: JinjaEngine,
    facts: TemplateFacts,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    first: str | None,
) -> tuple[str, ...]:
    """What may open this conversation. Tools are often written before the first turn."""
    usual = (facts.preamble, facts.bos)
    if tools is None or first is None or messages[0]["role"] != "user":
        return usual
    found = find_preamble(engine, messages[:1], tools, first)
    return usual if found is None else (found, *usual)
