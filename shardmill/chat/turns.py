"""Many conversations as columns: texts in order, and who says each.

In: conversations and a spec.  Out: `Turns`, the columns; what has no place is named.
Promise: three ways, each takes what the one before leaves, and all give the same: the quick one for
conversations of plain messages, {"role", "content"} and nothing else; the short one, message by
message; the long one (places.py).
Not here: ids, the mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardmill.chat.assemble import Fixed, Form
from shardmill.chat.check import CheckedMessage, check_message, has_bytes
from shardmill.chat.contract import TrainPolicy
from shardmill.chat.places import NO_WORDS, Names, Placed, lay_out, no_place, place, trimmed
from shardmill.chat.roles import ROLE_NAMES, normal_role
from shardmill.chat.spec import TemplateSpec
from shardmill.chat.tools import tool_texts
from shardmill.records import ROLES, BoolArray, Conversation, IntArray, OffsetArray

FIRST = len(ROLES)
"""The form of a plain message is its role's place in ROLES; of a conversation's first, FIRST more.
"""


class Forms:
    """The forms in use, by number. Plain ones first; others are added as they are met."""

    def __init__(self, pieces: Mapping[str, Fixed]) -> None:
        self._pieces = pieces
        self._numbers: dict[tuple[Names, Names], int] = {}
        self.forms: list[Form] = []
        for begin in ((), ("begin",)):
            for role in ROLES:
                self.number((*begin, f"{role}.before"), (f"{role}.end", f"{role}.after"))

    def number(self, left: Names, right: Names) -> int:
        key = (left, right)
        if key not in self._numbers:
            self._numbers[key] = len(self.forms)
            self.forms.append(Form(self._pieces_of(left), self._pieces_of(right)))
        return self._numbers[key]

    def _pieces_of(self, names: Names) -> tuple[Fixed, ...]:
        # A role without a place has no pieces, and no message gets this far.
        return tuple(self._pieces[name] for name in names if name in self._pieces)


@dataclass(slots=True)
class Turns:
    """Columns over the conversations that have a place, as they are collected."""

    texts: list[str] = field(default_factory=list)
    roles: bytearray = field(default_factory=bytearray)  # per turn: a place in ROLES
    num_turns: list[int] = field(default_factory=list)  # per conversation
    kept: list[int] = field(default_factory=list)  # per conversation: its position in the input
    dropped: list[tuple[int, str]] = field(default_factory=list)  # (position, reason)
    # Few have these:
    continued: list[int] = field(default_factory=list)  # texts that go on a turn
    other_forms: list[tuple[int, int]] = field(default_factory=list)  # (text, form), not plain
    flags: list[tuple[int, bool]] = field(default_factory=list)  # (turn, its own "train")

    def add(self, message: CheckedMessage, placed: list[Placed], forms: Forms) -> None:
        """One turn that is not plain."""
        if message.train is not None:
            self.flags.append((len(self.roles), message.train))
        self.roles.append(message.role)
        start = len(self.texts)
        if len(placed) > 1:
            self.continued.extend(range(start + 1, start + len(placed)))
        for number, (text, left, right) in enumerate(placed, start=start):
            self.other_forms.append((number, forms.number(left, right)))
            self.texts.append(text)

    def cut(self, num_texts: int, num_turns: int) -> None:
        """Take back what was added since there were that many."""
        del self.texts[num_texts:], self.roles[num_turns:]
        while self.continued and self.continued[-1] >= num_texts:
            self.continued.pop()
        while self.other_forms and self.other_forms[-1][0] >= num_texts:
            self.other_forms.pop()
        while self.flags and self.flags[-1][0] >= num_turns:
            self.flags.pop()

    def columns(self) -> Columns:
        roles = np.frombuffer(bytes(self.roles), np.uint8)
        bounds = np.zeros(len(self.num_turns) + 1, np.int64)
        np.cumsum(self.num_turns, out=bounds[1:])
        first_texts = np.arange(len(self.texts))
        if self.continued:
            first_texts = np.delete(first_texts, self.continued)
        forms: IntArray = np.zeros(len(self.texts), np.intp)
        forms[first_texts] = roles
        forms[first_texts[bounds[:-1]]] += FIRST
        if self.other_forms:
            texts, numbers = np.array(self.other_forms, np.intp).T
            forms[texts] = numbers
        return Columns(
            roles=roles,
            bounds=bounds,
            forms=forms,
            first_texts=first_texts,
            edges=np.append(first_texts, len(self.texts))[bounds],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """The collected turns as arrays."""

    roles: npt.NDArray[np.uint8]  # (turns,) places in ROLES
    bounds: OffsetArray  # (conversations + 1,) conversation c is turns bounds[c]..bounds[c + 1]
    forms: IntArray  # (texts,) numbers of forms
    first_texts: OffsetArray  # (turns,) the text that each turn starts with
    edges: OffsetArray  # (conversations + 1,) conversation c is texts edges[c]..edges[c + 1]

    def per_text(self, of_turn: BoolArray) -> BoolArray:
        """What holds for a turn, for each of its texts."""
        if len(self.forms) == len(of_turn):
            return of_turn
        return np.repeat(of_turn, np.diff(self.first_texts, append=len(self.forms)))


class Collector:
    """Collects turns for one template and policy."""

    def __init__(self, spec: TemplateSpec, forms: Forms, policy: TrainPolicy) -> None:
        self.spec, self.forms, self.policy = spec, forms, policy
        self.turns = Turns()
        # The usual spellings of the roles that have turns of their own.
        self._codes = {
            spelling: ROLES.index(role)
            for name, role in ROLE_NAMES.items()
            if role in spec.roles
            for spelling in (name, name.title(), name.upper())
        }

    def collect(self, conversations: Sequence[Conversation]) -> Turns:
        """The turns of all conversations that have a place, and the reasons of the others."""
        turns = self.turns
        for position in self._quick_way(conversations):
            conversation = conversations[position]
            num_texts, num_turns = len(turns.texts), len(turns.roles)
            if not self._short_way(conversation, first=num_turns):
                turns.cut(num_texts, num_turns)
                laid = lay_out(conversation, self.spec, self.policy)
                if isinstance(laid, str):
                    turns.dropped.append((position, laid))
                    continue
                for message, placed in laid:
                    turns.add(message, placed, self.forms)
            turns.kept.append(position)
            turns.num_turns.append(len(turns.roles) - num_turns)
        return turns

    def _quick_way(self, conversations: Sequence[Conversation]) -> Iterator[int]:
        """Add every conversation of plain messages; the caller adds those that this one names."""
        codes, strip = self._codes, self.spec.trim
        texts, roles = self.turns.texts, self.turns.roles
        kept, sizes = self.turns.kept, self.turns.num_turns
        for position, conversation in enumerate(conversations):
            num_texts, num_turns = len(texts), len(roles)
            messages = conversation.messages
            plain = type(messages) is list and not conversation.tools
            for message in messages if plain else ():
                if type(message) is not dict or len(message) != 2:
                    break
                try:
                    text, role = message["content"], codes[message["role"]]
                except (KeyError, TypeError):
                    break
                if type(text) is not str or not (text.isascii() or has_bytes(text)):
                    break
                texts.append(text.strip() if strip else text)
                roles.append(role)
            else:
                if len(roles) > num_turns:
                    kept.append(position)
                    sizes.append(len(roles) - num_turns)
                    continue
            del texts[num_texts:], roles[num_turns:]
            yield position

    def _short_way(self, conversation: Conversation, *, first: int) -> bool:
        """Add a conversation, whose first turn has the number `first`; False to take it back."""
        messages, texts, roles = conversation.messages, self.turns.texts, self.turns.roles
        if not messages or type(messages) not in (list, tuple):
            return False
        codes, strip = self._codes, self.spec.trim
        if conversation.tools:
            told = self._add_tools(conversation.tools, messages[0])
            if told is None:
                return False
            messages = messages[told:]
        try:
            for message in messages:
                if type(message) is not dict:
                    return False
                if len(message) != 2:
                    if not self._add_message(message, first=len(roles) == first):
                        return False
                    continue
                text = message["content"]
                role = codes[message["role"]]
                if type(text) is not str:
                    return False
                if not text.isascii():
                    text.encode()  # a lone surrogate raises
                texts.append(text.strip() if strip else text)
                roles.append(role)
        except (KeyError, TypeError, UnicodeEncodeError):
            return False
        return True

    def _add_message(self, message: object, *, first: bool, tools: Sequence[str] = ()) -> bool:
        checked = check_message(message)
        if isinstance(checked, str) or ROLES[checked.role] not in self.spec.roles:
            return False
        if no_place(checked, tools, self.spec) is not None:
            return False
        if self.spec.trim:
            checked = trimmed(checked)
        self.turns.add(checked, place(checked, tools, first=first), self.forms)
        return True

    def _add_tools(self, tools: object, message: object) -> int | None:
        """The system turn with the tools: how many messages it took, None when it has no place."""
        texts = tool_texts(tools)
        if self.spec.tools is None or not texts or not all(map(has_bytes, texts)):
            return None
        role = normal_role(message.get("role")) if isinstance(message, dict) else None
        if role == "system":
            return 1 if self._add_message(message, first=True, tools=texts) else None
        self.turns.add(NO_WORDS, place(NO_WORDS, texts, first=True), self.forms)
        return 0
