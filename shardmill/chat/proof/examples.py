"""The conversations on which a loss mask is proved: one of them rendered, and one that fails shown.

The battery is the same on every machine. Texts of different turns of a conversation share no word,
so a turn in the wrong position is noticed. A template must keep the `NEEDED` ones; it may decline
the others with a reason. `render_one` matches the turns that a template made with the messages;
`TokenReader` reads tokens back as text. `refusal` shows a wrong mask on the smallest conversation
found that fails the same check, one token to a line, with what is trained and what should be.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from shardmill.chat.policy import (
    SYSTEM,
    TOOL,
    ChatTemplate,
    CheckedMessage,
    Dropped,
    TrainPolicy,
    check_messages,
    trained_messages,
    trained_turns,
)
from shardmill.errors import MaskProofError, TemplateError, TokenizerError
from shardmill.records import ROLES, BoolArray, Conversation, IntArray

BATTERY_VERSION = 1

_MAX_LITERALS = 12
_EMOJI = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44b\U0001f3fd 1\ufe0f\u20e3"
_MARKS = "e\u0301 a\u0300\u0301\u0302 \u1e14\u0300 \ud55c\uae00 \u1112\u1161\u11ab"
_CJK = "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002\u4e2d\u6587\uff0c\u6807\u70b9"
_RTL = "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u202eback\u202c"
_LONG = " ".join(f"word{number}" for number in range(150))


def _say(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def _chat(*texts: str, system: str | None = None) -> Conversation:
    """User and assistant in turn; a question at the end gets an answer."""
    messages = [_say(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]
    messages += [_say("assistant", "fine")] if len(texts) % 2 else []
    return _talk(*([] if system is None else [_say("system", system)]), *messages)


def _talk(*messages: dict[str, Any], tools: Sequence[dict[str, Any]] | None = None) -> Conversation:
    return Conversation(messages=list(messages), tools=tools)


PLAIN = _chat("what is a mill", "a house that grinds")
"""The simplest one: a template's opening and end are learnt from it."""

PADDED = _chat("  so ", "  wind and water  ")
"""Blanks around the words: whether a template trims is learnt from it."""

NEEDED: Mapping[str, Conversation] = {
    "plain": PLAIN,
    "several turns": _chat(
        "first stone", "one, two", "second stone", "three, four", "third stone", "five!"
    ),
    "emoji": _chat(_EMOJI, f"yes {_EMOJI}"),
    "combining marks": _chat(_MARKS, f"so {_MARKS}"),
    "wide and right to left": _chat(f"{_CJK} {_RTL}", f"{_RTL} {_CJK}"),
    "one letter": _chat("q", "r"),
    "long": _chat(_LONG, _LONG.replace("word", "term")),
    "code": _chat("show", "def f(x):\n    return x\n\n\nf(1)"),
    "flags": _talk(
        _say("user", "alpha"),
        _say("assistant", "gamma", train=False),
        _say("user", "delta"),
        _say("assistant", "beta", train=True),
    ),
}
"""A template that drops one of these is refused."""

_BLANKS = {
    "blanks around": PADDED,
    "empty answer": _chat("say nothing", ""),
    "empty question": _chat("", "who is there"),
    "blank answer": _chat("say little", "   "),
    "newlines behind": _chat("stop late\n\n", "so be it\n\n", "on"),
    "newlines before": _chat("\n\nbegin late", "\nas you wish"),
    "tabs": _chat("\ttabs\t", "\twhy not\t"),
}

_ROLE_ORDERS = {
    "system": _chat("hello", "good day", system="be brief"),
    "system, turns": _chat("u", "v", "w", "x", system="be kind"),
    "empty system": _chat("ask", "tell", system=""),
    "assistant first": _talk(_say("assistant", "welcome"), _say("user", "thanks")),
    "assistant first, on": _talk(
        _say("assistant", "in"), _say("user", "ok"), _say("assistant", "out")
    ),
    "two users": _talk(_say("user", "north"), _say("user", "south"), _say("assistant", "east")),
    "two assistants": _talk(
        _say("user", "red"), _say("assistant", "green"), _say("assistant", "blue")
    ),
    "open end": _talk(_say("user", "tick"), _say("assistant", "tock"), _say("user", "and")),
    "trained question": _talk(
        _say("user", "trained question", train=True), _say("assistant", "its reply")
    ),
}

_TOOL = {
    "type": "function",
    "function": {
        "name": "find_quarry",
        "description": "Where a stone comes from",
        "parameters": {"type": "object", "properties": {"stone": {"type": "string"}}},
    },
}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "find_quarry", "arguments": {"stone": "marble"}},
}
_ASKED = _say("user", "where is marble from")
_CALLING = _say("assistant", None, tool_calls=[_CALL])
_RESULT = _say("tool", "Carrara", name="find_quarry", tool_call_id="call00001")
_TOLD = _say("assistant", "out of Italy")
_ADD_UP = _say("user", "add up")
_SEVEN = _say("assistant", "seven", reasoning_content="three plus four")
_EIGHT = _say("assistant", "eight", reasoning_content="one beyond")

_TOOLS = {
    "tool call": _talk(_ASKED, _CALLING),
    "tool call with words": _talk(_ASKED, {**_CALLING, "content": "let me look"}),
    "tool result": _talk(_ASKED, _CALLING, _RESULT, _TOLD),
    "two tool results": _talk(_ASKED, _CALLING, _RESULT, {**_RESULT, "content": "Paros"}, _TOLD),
    "reasoning": _talk(_ADD_UP, _SEVEN),
    "reasoning, turns": _talk(_ADD_UP, _SEVEN, _say("user", "once more"), _EIGHT),
    "tools": _talk(_ASKED, _CALLING, _RESULT, _TOLD, tools=[_TOOL]),
}


def battery(literals: Sequence[str] = ()) -> dict[str, Conversation]:
    """Every conversation by its name. `literals`: the markers of a template as text."""
    injected = _injected(sorted(set(literals)))
    every = {**NEEDED, **_BLANKS, **_ROLE_ORDERS, **_TOOLS, **injected}
    return {name: replace(conversation, id=name) for name, conversation in every.items()}


def _injected(literals: Sequence[str]) -> dict[str, Conversation]:
    """The literal of every marker inside text, where it must stay text."""
    found = {}
    for literal in literals[:_MAX_LITERALS]:
        if literal.strip():
            found[f"{literal} asked"] = _chat(f"see {literal} there", "indeed")
            found[f"{literal} answered"] = _chat("well", f"a{literal}b {literal}")
    every = "".join(literals)
    if every.strip():
        found["all markers"] = _chat(every, f"right {every}", "more")
    return found


def battery_sha256(items: Mapping[str, Conversation]) -> str:
    chats = [[name, name in NEEDED, chat.messages] for name, chat in items.items()]
    tools = [chat.tools for chat in items.values()]
    return hashlib.sha256(json.dumps([chats, tools], sort_keys=True).encode()).hexdigest()


@dataclass(eq=False)
class Failure(Exception):
    """One conversation on which a check failed."""

    check: str
    message: str
    conversation: Conversation
    policy: TrainPolicy
    ids: IntArray | None = None
    mask: BoolArray | None = None
    answers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    # start and stop in `ids` of the turns that should be trained -> their words


@dataclass(frozen=True, slots=True, eq=False)
class ProofExample:
    """One kept conversation."""

    conversation: Conversation
    policy: TrainPolicy
    checked: list[CheckedMessage]
    ids: IntArray
    mask: BoolArray
    bounds: list[int]  # where each turn starts, and where the last one stops
    roles: list[int]  # positions in ROLES, one per turn
    groups: list[list[int]]  # the messages of each turn; none for a turn the template made up
    wanted: list[bool | None]  # whether each turn should be trained; None if either is right

    def failure(self, check: str, message: str) -> Failure:
        answers = {
            (self.bounds[turn], self.bounds[turn + 1]): self.checked[group[-1]].text or ""
            for turn, group in enumerate(self.groups)
            if self.wanted[turn] and group
        }
        return Failure(check, message, self.conversation, self.policy, self.ids, self.mask, answers)

    def trained_span(self, turn: int) -> tuple[int, int]:
        """The trained part of a turn; empty at its end if nothing is trained."""
        start, stop = self.bounds[turn : turn + 2]
        trained = np.flatnonzero(self.mask[start:stop]) + start
        if not len(trained):
            return stop, stop
        first, last = int(trained[0]), int(trained[-1]) + 1
        if last - first != len(trained):
            raise self.failure("words", f"the trained part of turn {turn} has gaps")
        return first, last


def render_one(
    template: ChatTemplate, conversation: Conversation, policy: TrainPolicy
) -> ProofExample | str:
    """The example, or the reason it was dropped for. Raises Failure if it is neither."""
    rendered = template.render([conversation], policy)
    if not len(rendered.kept) and len(rendered.drops) == 1 and rendered.drops[0].reason:
        return rendered.drops[0].reason
    try:
        checked = check_messages(conversation.messages)
    except Dropped:
        checked = []
    if rendered.kept.tolist() != [0] or rendered.drops or not checked:
        message = f"{rendered.kept.tolist()} kept and {len(rendered.drops)} dropped of one"
        raise Failure("account", message, conversation, policy)
    examples = rendered.examples
    ids, mask = np.asarray(examples.ids[0]), np.asarray(examples.mask)
    starts, roles = examples.turn_starts.tolist(), examples.turn_roles.tolist()
    groups = match_turns(roles, [message.role for message in checked])
    wrong = None
    if mask.shape != ids.shape or mask.dtype != np.bool_ or len(starts) != len(roles):
        wrong = f"{len(ids)} ids, {mask.shape} mask, {len(starts)} turns, {len(roles)} roles"
    elif not starts or starts[0] < 0 or (np.diff([*starts, len(ids)]) <= 0).any():
        wrong = f"turns start at {starts} of {len(ids)} ids"
    elif groups is None:
        said = [ROLES[message.role] for message in checked]
        found = [ROLES[role] if role < len(ROLES) else f"role {role}" for role in roles]
        wrong = f"the roles of the turns are {found}, those of the messages {said}"
    if wrong is not None or groups is None:
        raise Failure("turns", str(wrong), conversation, policy, ids, mask)
    trained = trained_messages(checked, policy)
    system = trained_turns(np.array([SYSTEM]), np.array([0, 1]), [], policy)[0]
    made_up = None if system else False  # a system turn of the template's own
    wanted = [bool(trained[group].any()) if group else made_up for group in groups]
    bounds = [*starts, len(ids)]
    return ProofExample(conversation, policy, checked, ids, mask, bounds, roles, groups, wanted)


def match_turns(roles: list[int], messages: list[int]) -> list[list[int]] | None:
    """Which messages make up each turn; None if they do not match.

    One message each, except that system messages may be folded into the turn after them, a run of
    tool results may be one turn, and a template may add a system turn at the start.
    """
    groups: list[list[int]] = []
    at = 0
    for turn, role in enumerate(roles):
        start = at
        while role != SYSTEM and at < len(messages) and messages[at] == SYSTEM:
            at += 1  # folded
        if at > start and start != 0:
            return None
        if turn == 0 and role == SYSTEM and messages[0] != SYSTEM:
            groups.append([])
            continue
        if at == len(messages) or messages[at] != role:
            return None
        at += 1
        if role == TOOL and roles[turn + 1 : turn + 2] != [TOOL] and roles[turn - 1] != TOOL:
            while at < len(messages) and messages[at] == TOOL:
                at += 1
        groups.append(list(range(start, at)))
    return groups if at == len(messages) else None


class TokenReader:
    """Reads ids back as text. Special tokens show as their strings, and nothing is tidied up.

    tokenizer: one of ours, or one of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._of_transformers = hasattr(tokenizer, "apply_chat_template")
        self._spelt: dict[str, list[str]] = {}
        own = getattr(tokenizer, "fingerprint", None)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(own, str):
            self.fingerprint = own
        elif backend is not None:
            self.fingerprint = hashlib.sha256(str(backend.to_str()).encode()).hexdigest()
        else:
            raise TokenizerError(
                f"{type(tokenizer).__name__} has no fingerprint, so a certificate could not name "
                "it; open it with shardmill.tokenizers.open_tokenizer"
            )

    def text(self, ids: Any) -> str:
        """What these ids say by themselves."""
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        options = plain if self._of_transformers else {}
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), **options))

    def readings(self, ids: IntArray, start: int, stop: int) -> list[str]:
        """What ids start..stop say: by themselves, and after what precedes them.

        The two differ in a tokenizer that marks the start of a text. Both readings are correct.
        """
        alone = self.text(ids[start:stop])
        before, with_it = self.text(ids[:start]), self.text(ids[:stop])
        return [alone, with_it[len(before) :]] if with_it.startswith(before) else [alone, alone]

    def spellings(self, text: str) -> list[str]:
        """The text, and what remains of it in a tokenizer that cannot represent all of it."""
        if text not in self._spelt:
            options = {"add_special_tokens": False} if self._of_transformers else {}
            back = self.text(list(self._tokenizer.encode(text, **options)))
            self._spelt[text] = [text] if back == text else [text, back]
        return self._spelt[text]


# A counterexample.

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
