"""A failure made small, and shown token by token.

In: a failure and a way to try again.  Out: the smallest conversation that fails alike; lines to
read.
Promise: the same check fails on what is shown; no line holds a control character.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardmill.chat.proof.example import Failure
from shardmill.chat.proof.reader import Reader
from shardmill.records import BoolArray, Conversation

_MAX_TRIES = 400
_MAX_LINES = 60
_MAX_TEXT = 24
_YES_NO = {True: "yes", False: "-"}
_WORD = "zq"  # found again in no template's own text
_TEXTS = ("content", "reasoning_content")

Try = Callable[[Conversation], Failure | str | None]


def smallest(failure: Failure, attempt: Try) -> Failure:
    """Fewest messages first, then the shortest texts, as long as the same check fails."""
    tries = itertools.count()
    while True:
        for smaller in _smaller(failure.conversation):
            if next(tries) >= _MAX_TRIES:
                return failure
            found = attempt(smaller)
            if isinstance(found, Failure) and found.check == failure.check:
                failure = found
                break
        else:
            return failure


def _smaller(conversation: Conversation) -> Iterator[Conversation]:
    messages = [dict(message) for message in conversation.messages]
    for place in range(len(messages)):
        left = messages[:place] + messages[place + 1 :]
        # Who speaks first stays: many templates refuse the other for good reasons of their own.
        if left and left[0].get("role") == messages[0].get("role"):
            yield replace(conversation, messages=left)
    if conversation.tools:
        yield replace(conversation, tools=None)
    for place, message in enumerate(messages):
        for other in _shorter(message):
            yield replace(conversation, messages=[*messages[:place], other, *messages[place + 1 :]])


def _shorter(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in sorted(set(message) - {"role", "content"}):
        if message.get("content") is not None or key != "tool_calls":
            yield {name: value for name, value in message.items() if name != key}
    for key in _TEXTS:
        text = message.get(key)
        if isinstance(text, str) and len(text) > len(_WORD):
            half = len(text) // 2
            for part in (_WORD, text[:half], text[half:], text[1:], text[:-1]):
                if len(part) < len(text):
                    yield {**message, key: part}


def table(failure: Failure, reader: Reader, markers: frozenset[int]) -> list[str]:
    """One line per token: position, id, text, whether it is trained, and whether it should be."""
    if failure.ids is None:
        return []
    ids = failure.ids
    mask = failure.mask
    if mask is not None and mask.shape != ids.shape:
        mask = None
    wanted = _wanted(failure, reader, markers)
    wrong = np.zeros(len(ids), np.bool_) if mask is None or wanted is None else mask != wanted
    first = max(0, int(wrong.argmax()) - _MAX_LINES // 2)
    first = min(first, max(0, len(ids) - _MAX_LINES))
    lines = [f"  {'pos':>5} {'id':>7}  {'text':<{_MAX_TEXT}}  trained"]
    if first:
        lines.append(f"    ... {first} tokens before")
    for place in range(first, min(len(ids), first + _MAX_LINES)):
        text = json.dumps(reader.text(ids[place : place + 1]))
        text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
        told = "?" if mask is None else _YES_NO[bool(mask[place])]
        if wrong[place]:
            told = f"{told:<4} <-- wanted {_YES_NO[not mask[place]]}"  # type: ignore[index]
        lines.append(f"  {place:5} {int(ids[place]):7}  {text:<{_MAX_TEXT}}  {told}")
    left = len(ids) - first - _MAX_LINES
    return [*lines, f"    ... {left} tokens behind"] if left > 0 else lines


def _wanted(failure: Failure, reader: Reader, markers: frozenset[int]) -> BoolArray | None:
    """What should be trained, found by looking for the answers in their turns. To show only."""
    ids = failure.ids
    assert ids is not None
    answers = failure.answers or _answers_of_draft(failure, reader, markers)
    if not answers:
        return None
    wanted = np.zeros(len(ids), np.bool_)
    for (start, stop), text in answers.items():
        part, said = ids[start:stop], text.strip()
        # reach[i]: how many characters of the turn there are up to token i.
        reach = np.array([len(reader.text(part[: place + 1])) for place in range(len(part))])
        begin = reader.text(part).rfind(said)
        if begin < 0:
            continue
        upto = begin + len(said)
        words = (reach > begin) & (np.concatenate(([0], reach[:-1])) < upto)
        behind = np.flatnonzero(np.isin(part, sorted(markers)) & (reach > upto))
        if failure.policy.train_on_eot and len(behind):
            words[int(np.searchsorted(reach, upto, side="right")) : behind[-1] + 1] = True
        wanted[start:stop] |= words
    return wanted


def _answers_of_draft(
    failure: Failure, reader: Reader, markers: frozenset[int]
) -> dict[tuple[int, int], str]:
    """Where the assistant's turns should be: each behind the text of the message before it."""
    ids = failure.ids
    assert ids is not None
    if failure.mask is None or failure.policy.train_on != "assistant":
        return {}
    reach = np.array([len(reader.text(ids[: place + 1])) for place in range(len(ids))])
    whole = reader.text(ids)
    is_marker = np.isin(ids, sorted(markers))
    spans = {}
    start = place = 0
    for message in failure.conversation.messages:
        text = str(message.get("content") or "").strip()
        found = whole.find(text, place)
        if not text or found < 0:
            return {}
        place = found + len(text)
        last = int(np.searchsorted(reach, place)) + 1
        if message.get("role") == "assistant":
            stop = last + int(is_marker[last:].argmax()) + 1 if is_marker[last:].any() else last
            spans[start, stop] = text
        start = last
    return spans


def as_lines(conversation: Conversation) -> list[str]:
    """The conversation as JSON, one message per line; everything unusual is escaped."""
    lines = ["  " + json.dumps(dict(message), default=str) for message in conversation.messages]
    if conversation.tools:
        lines.append(
            "  tools " + json.dumps([dict(tool) for tool in conversation.tools], default=str)
        )
    return lines
