"""A mask that is wrong, shown on the smallest conversation found that fails the same check.

The tokens are listed one to a line, with what is trained and what should be, without control
characters.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import numpy as np

from shardmill.chat.messages import Dropped
from shardmill.chat.policy import ChatTemplate
from shardmill.chat.proof.examples import Failure, TokenReader
from shardmill.errors import MaskProofError, TemplateError
from shardmill.records import BoolArray, Conversation

Attempt: TypeAlias = Callable[[Conversation], object]
"""Runs the checks on another conversation; raises a Failure if one fails."""


def refusal(
    template: ChatTemplate, reader: TokenReader, failure: Failure, attempt: Attempt
) -> MaskProofError:
    """The error for a template that fails a check."""
    small = _smallest(failure, attempt)
    draft = getattr(template, "draft", None)
    if small.ids is None and draft is not None:
        # Show the tokens of a dropped conversation if it can.
        with suppress(TemplateError, Dropped):
            small.ids, small.mask = draft(small.conversation)
    conversation = small.conversation
    lines = [
        f"chat template {template.name!r} is refused ({{train_on}}, {{train_on_eot}}): "
        f"{small.message}",
        f"the smallest conversation found that fails this check ({small.check}):",
        *("  " + json.dumps(dict(message), default=str) for message in conversation.messages),
    ]
    if conversation.tools:
        tools = [dict(tool) for tool in conversation.tools]
        lines.append("  tools " + json.dumps(tools, default=str))
    lines += _token_table(small, reader, template.marker_ids)
    return MaskProofError("\n".join(lines), **asdict(small.policy))


_MAX_TRIES = 400
_WORD = "zq"  # in no template's own text


def _smallest(failure: Failure, attempt: Attempt) -> Failure:
    """Fewest messages first, then the shortest texts, as long as the same check fails."""
    tries = itertools.count()
    while True:
        for smaller in _smaller(failure.conversation):
            if next(tries) >= _MAX_TRIES:
                return failure
            try:
                attempt(smaller)
            except Failure as found:
                if found.check == failure.check:
                    failure = found
                    break
        else:
            return failure


def _smaller(conversation: Conversation) -> Iterator[Conversation]:
    messages = [dict(message) for message in conversation.messages]
    for at in range(len(messages)):
        left = messages[:at] + messages[at + 1 :]
        # The first role stays: many templates refuse another one for good reasons.
        if left and left[0].get("role") == messages[0].get("role"):
            yield replace(conversation, messages=left)
    if conversation.tools:
        yield replace(conversation, tools=None)
    for at, message in enumerate(messages):
        for other in _shorter(message):
            yield replace(conversation, messages=[*messages[:at], other, *messages[at + 1 :]])


def _shorter(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in sorted(set(message) - {"role", "content"}):
        if message.get("content") is not None or key != "tool_calls":
            yield {name: value for name, value in message.items() if name != key}
    for key in ("content", "reasoning_content"):
        text = message.get(key)
        if isinstance(text, str) and len(text) > len(_WORD):
            half = len(text) // 2
            for part in (_WORD, text[:half], text[half:], text[1:], text[:-1]):
                if len(part) < len(text):
                    yield {**message, key: part}


# Showing a failure.

_MAX_LINES = 60
_MAX_TEXT = 24
_YES_NO = {True: "yes", False: "-"}


def _token_table(failure: Failure, reader: TokenReader, markers: frozenset[int]) -> list[str]:
    """One line per token: position, id, text, whether it is trained, and whether it should be."""
    if failure.ids is None:
        return []
    ids, mask = failure.ids, failure.mask
    if mask is not None and mask.shape != ids.shape:
        mask = None
    wanted = _wanted_mask(failure, reader, markers)
    wrong = np.zeros(len(ids), np.bool_) if mask is None or wanted is None else mask != wanted
    first = max(0, int(wrong.argmax()) - _MAX_LINES // 2)
    first = min(first, max(0, len(ids) - _MAX_LINES))
    lines = [f"  {'pos':>5} {'id':>7}  {'text':<{_MAX_TEXT}}  trained"]
    if first:
        lines.append(f"    ... {first} tokens before")
    for at in range(first, min(len(ids), first + _MAX_LINES)):
        text = json.dumps(reader.text(ids[at : at + 1]))
        text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
        trained = "?" if mask is None else _YES_NO[bool(mask[at])]
        if wrong[at]:
            trained = f"{trained:<4} <-- wanted {_YES_NO[not mask[at]]}"  # type: ignore[index]
        lines.append(f"  {at:5} {int(ids[at]):7}  {text:<{_MAX_TEXT}}  {trained}")
    left = len(ids) - first - _MAX_LINES
    return [*lines, f"    ... {left} tokens after"] if left > 0 else lines


def _wanted_mask(
    failure: Failure, reader: TokenReader, markers: frozenset[int]
) -> BoolArray | None:
    """What should be trained, found by searching the answers in their turns. For display only."""
    ids = failure.ids
    assert ids is not None
    answers = failure.answers or _answers_of_draft(failure, reader, markers)
    if not answers:
        return None
    wanted = np.zeros(len(ids), np.bool_)
    for (start, stop), text in answers.items():
        part, said = ids[start:stop], text.strip()
        # reach[i]: the number of characters of the turn up to token i.
        reach = np.array([len(reader.text(part[: at + 1])) for at in range(len(part))])
        begin = reader.text(part).rfind(said)
        if begin < 0:
            continue
        end = begin + len(said)
        words = (reach > begin) & (np.concatenate(([0], reach[:-1])) < end)
        markers_after = np.flatnonzero(np.isin(part, sorted(markers)) & (reach > end))
        if failure.policy.train_on_eot and len(markers_after):
            words[int(np.searchsorted(reach, end, side="right")) : markers_after[-1] + 1] = True
        wanted[start:stop] |= words
    return wanted


def _answers_of_draft(
    failure: Failure, reader: TokenReader, markers: frozenset[int]
) -> dict[tuple[int, int], str]:
    """Where the assistant's turns should be: each after the text of the message before it."""
    ids = failure.ids
    assert ids is not None
    if failure.mask is None or failure.policy.train_on != "assistant":
        return {}
    reach = np.array([len(reader.text(ids[: at + 1])) for at in range(len(ids))])
    whole = reader.text(ids)
    is_marker = np.isin(ids, sorted(markers))
    spans = {}
    start = position = 0
    for message in failure.conversation.messages:
        text = str(message.get("content") or "").strip()
        found = whole.find(text, position)
        if not text or found < 0:
            return {}
        position = found + len(text)
        last = int(np.searchsorted(reach, position)) + 1
        if message.get("role") == "assistant":
            stop = last + int(is_marker[last:].argmax()) + 1 if is_marker[last:].any() else last
            spans[start, stop] = text
        start = last
    return spans
