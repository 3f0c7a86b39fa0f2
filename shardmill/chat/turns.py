"""Many conversations as columns: texts in order, and who says each.

In: conversations and a spec.  Out: `Turns`, the columns; what has no place is named.
Promise: three ways, each takes what the one before leaves, and all give the same: the quick one for
conversations of plain messages, {"role", "content"} and nothing else; the short one, message by
message; the long one (places.py).
Not here: ids, the mask.

One conversation laid out by a template: which texts, and which fixed pieces around each.

In: a conversation of any kind and a spec.  Out: the texts of each turn, or the reason why none.
Promise: every word of the conversation has a place in its turns, or the conversation none.
Not here: ids. Most conversations take a shorter way to the same result (turns.py).

Texts and the fixed tokens around them, laid behind one another.

In: encoded texts, the form of each (which tokens stand left and right of it), whether it is
trained.  Out: the ids, which of them are trained, and where each text with its surroundings starts.
Promise: the ids of a text are copied as they are; the mask follows from the same numbers as the
ids, never from looking at them. Cost: a few passes over the tokens, none of them in Python.
Not here: what a form means (spec.py, bind.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.chat.messages import (
    CheckedMessage,
    check_message,
    check_messages,
    has_bytes,
    tool_texts,
)
from shardmill.chat.policy import ROLE_NAMES, SYSTEM, USER, TrainPolicy, normal_role
from shardmill.chat.template_spec import TemplateSpec
from shardmill.records import ROLES, BoolArray, Conversation, IntArray, OffsetArray, Ragged

Names: TypeAlias = tuple[str, ...]
"""Names of fixed pieces: "begin", "user.before", "tool_call.after", ..."""

NO_WORDS = CheckedMessage(SYSTEM, "")
"""The system turn that tools stand in when the conversation has none."""


class PlacedText(NamedTuple):
    """One text of a turn, and what stands around it."""

    text: str
    left: Names
    right: Names


Turn: TypeAlias = tuple[CheckedMessage, list[PlacedText]]
"""A turn has at least one text."""


def lay_out(
    conversation: Conversation, spec: TemplateSpec, policy: TrainPolicy
) -> list[Turn] | str:
    """The turns of a conversation, or one of `REASONS`."""
    checked = check_messages(conversation.messages)
    if isinstance(checked, str):
        return checked
    tools = tool_texts(conversation.tools) if conversation.tools else ()
    if tools is None:
        return "bad_tools"
    if not all(map(has_bytes, tools)):
        return "invalid_unicode"
    for message in checked:
        reason = no_place(message, tools, spec)
        if reason is not None:
            return reason
    messages = [trimmed(message) for message in checked] if spec.trim else checked
    if spec.fold_system is not None:
        folded = _fold(checked, messages, spec.fold_system, policy)
        if isinstance(folded, str):
            return folded
        messages = folded
    if tools and messages[0].role != SYSTEM:
        messages = [NO_WORDS, *messages]
    return [
        (message, place(message, () if number else tools, first=not number))
        for number, message in enumerate(messages)
    ]


def no_place(message: CheckedMessage, tools: Sequence[str], spec: TemplateSpec) -> str | None:
    """Why the template cannot say this, or None."""
    role = ROLES[message.role]
    if role == "system" and role not in spec.roles and spec.fold_system is None:
        return "no_place_for_system"
    if role == "tool" and role not in spec.roles:
        return "no_place_for_tool_results"
    if message.calls and spec.tool_call is None:
        return "no_place_for_tool_calls"
    if message.reasoning and spec.reasoning is None:
        return "no_place_for_reasoning"
    if tools and spec.tools is None:
        return "no_place_for_tools"
    return None


def trimmed(message: CheckedMessage) -> CheckedMessage:
    """Without white space around its words."""
    text = None if message.text is None else message.text.strip()
    return replace(message, text=text, reasoning=message.reasoning.strip())


def _fold(
    original: list[CheckedMessage], messages: list[CheckedMessage], join: str, policy: TrainPolicy
) -> list[CheckedMessage] | str:
    """The system message opens the user turn behind it, as it was written."""
    places = [number for number, message in enumerate(messages) if message.role == SYSTEM]
    if not places:
        return messages
    if places != [0] or len(messages) == 1 or messages[1].role != USER:
        return "system_not_first"
    system, user = original[0], messages[1]
    usual = policy.train_on == "all"
    told = {usual if flag is None else flag for flag in (system.train, user.train)}
    if len(told) > 1:
        return "mixed_train"
    text = f"{system.text}{join}{user.text}"
    return [CheckedMessage(USER, text, train=told.pop()), *messages[2:]]


def place(message: CheckedMessage, tools: Sequence[str], *, first: bool) -> list[PlacedText]:
    """The texts of one turn in order: reasoning, words, calls, tools."""
    role, words = ROLES[message.role], message.text
    inside: list[tuple[str, Names, Names]] = []
    if message.reasoning:
        inside.append((message.reasoning, ("reasoning.before",), ("reasoning.after",)))
    if words is not None:
        inside.append((words, (), ()))
    behind = bool(words)
    for call in message.calls:
        inside.append((call, _before("tool_call", behind), ("tool_call.after",)))
        behind = True
    if tools:
        inside.append(("\n".join(tools), _before("tools", behind), ("tools.after",)))
    opening = ("begin", f"{role}.before") if first else (f"{role}.before",)
    ending = (f"{role}.end", f"{role}.after")
    last = len(inside) - 1
    return [
        PlacedText(
            text, left if number else opening + left, right + ending if number == last else right
        )
        for number, (text, left, right) in enumerate(inside)
    ]


def _before(name: str, behind: bool) -> Names:
    return (f"{name}.between", f"{name}.before") if behind else (f"{name}.before",)


STRUCTURE, WORDS, END = 0, 1, 2
"""What a fixed token is: never trained; trained with its turn; its turn's end."""


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """Fixed tokens, encoded once."""

    ids: OffsetArray  # (n,)
    kinds: IntArray  # (n,) STRUCTURE, WORDS or END


NOTHING = Fixed(np.empty(0, np.int64), np.empty(0, np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What stands around a text."""

    left: tuple[Fixed, ...]
    right: tuple[Fixed, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """All texts with their surroundings."""

    values: IntArray  # (total,)
    mask: BoolArray  # (total,)
    offsets: OffsetArray  # (texts + 1,) text i with its surroundings is offsets[i]..offsets[i + 1]
    num_trained: OffsetArray  # (texts,) trained tokens of each


def assemble(
    texts: Ragged,
    numbers: IntArray,
    forms: Sequence[Form],
    trained: BoolArray,
    *,
    train_ends: bool,
) -> Assembled:
    """Text i stands between the fixed tokens of `forms[numbers[i]]`."""
    table = _table(forms, train_ends)
    sizes, left, right = texts.lengths, table.left.take(numbers), table.right.take(numbers)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(left + sizes + right, out=offsets[1:])
    # Fixed tokens left of a text, the text, fixed tokens right of it:  . . x x x . | . . x x .
    lengths = np.stack((left, sizes, right), axis=1).reshape(-1)
    flags = np.zeros((len(texts), 3), np.bool_)
    flags[:, 1] = trained
    mask: BoolArray = np.repeat(flags.reshape(-1), lengths)
    fixed, spots = table.places(numbers, offsets[:-1], sizes)
    is_text = np.ones(len(mask), np.bool_)
    is_text[spots] = False
    dtype = np.result_type(texts.values.dtype, np.min_scalar_type(int(table.ids.max(initial=0))))
    values: IntArray = np.empty(len(mask), dtype)
    values[is_text] = texts.values
    values[spots] = table.ids.astype(dtype).take(fixed)
    mask[spots] = table.wanted.take(fixed) & np.repeat(trained, left + right)
    num_trained = trained * (sizes + table.num_wanted.take(numbers))
    return Assembled(values, mask, offsets, num_trained)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The forms behind one another: form f is left[f] + right[f] tokens from starts[f] on."""

    ids: OffsetArray
    wanted: BoolArray  # which of the fixed tokens are trained when their turn is
    starts: OffsetArray
    left: OffsetArray
    right: OffsetArray
    num_wanted: OffsetArray  # per form

    def places(
        self, numbers: IntArray, offsets: OffsetArray, sizes: OffsetArray
    ) -> tuple[OffsetArray, OffsetArray]:
        """For every fixed token around the texts, in order: its place here, and in the result."""
        left, right = self.left.take(numbers), self.right.take(numbers)
        before = np.cumsum(left + right) - left - right
        from_table = self.starts.take(numbers) - before
        fixed: OffsetArray = np.repeat(from_table, left + right)
        count = np.arange(len(fixed))
        fixed += count
        # Those on the right of a text lie behind it, so as many places further as it is long.
        shifts = np.stack((offsets - before, offsets + sizes - before), axis=1)
        spots: OffsetArray = np.repeat(
            shifts.reshape(-1), np.stack((left, right), axis=1).reshape(-1)
        )
        spots += count
        return fixed, spots


def _table(forms: Sequence[Form], train_ends: bool) -> _Table:
    pieces = [NOTHING, *chain.from_iterable((*form.left, *form.right) for form in forms)]
    kinds = np.concatenate([piece.kinds for piece in pieces])
    wanted = (kinds == WORDS) | (kinds == END) if train_ends else kinds == WORDS
    left = np.array([_width(form.left) for form in forms], np.int64)
    right = np.array([_width(form.right) for form in forms], np.int64)
    ends = np.cumsum(left + right)
    wanted_before = np.concatenate(([0], np.cumsum(wanted)))
    return _Table(
        ids=np.concatenate([piece.ids for piece in pieces]),
        wanted=wanted,
        starts=ends - left - right,
        left=left,
        right=right,
        num_wanted=wanted_before[ends] - wanted_before[ends - left - right],
    )


def _width(pieces: tuple[Fixed, ...]) -> int:
    return sum(len(piece.ids) for piece in pieces)


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
class TurnColumns:
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

    def add(self, message: CheckedMessage, placed: list[PlacedText], forms: Forms) -> None:
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


class TurnCollector:
    """Collects turns for one template and policy."""

    def __init__(self, spec: TemplateSpec, forms: Forms, policy: TrainPolicy) -> None:
        self.spec, self.forms, self.policy = spec, forms, policy
        self.turns = TurnColumns()
        # The usual spellings of the roles that have turns of their own.
        self._codes = {
            spelling: ROLES.index(role)
            for name, role in ROLE_NAMES.items()
            if role in spec.roles
            for spelling in (name, name.title(), name.upper())
        }

    def collect(self, conversations: Sequence[Conversation]) -> TurnColumns:
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
