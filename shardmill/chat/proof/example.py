"""One rendered conversation, its turns matched with its messages.

In: a template and a conversation.  Out: an `Example`, a reason code, or `Refuted` with a `Failure`.
Promise: an `Example` has one mask bit per id, turns that ascend, and a message for every turn.
Not here: whether the right tokens are trained (judge.py).

Tokens as text, the way a proof reads them.

In: a tokenizer of ours, or one of transformers.  Out: what spans of ids say.
Promise: special tokens show as their strings, and nothing is tidied up.
A tokenizer that marks the start of a text says a span alone otherwise than inside; a proof tries
both readings, and each is honest: these are the tokens that are trained.

How a template writes a trained assistant turn, learnt from the plainest conversations.

In: an example.  Out: its `Shape`; `Refuted` when the turn has none that could be right.
Promise: the shape holds the words first and, behind them, an end that the policy allows.
Not here: whether every other turn has the same shape (judge.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardmill.chat.messages import CheckedMessage, check_messages
from shardmill.chat.policy import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    ChatTemplate,
    Rendered,
    TrainPolicy,
    trained_turns,
)
from shardmill.errors import TokenizerError
from shardmill.records import ROLES, BoolArray, Conversation, IntArray

DROPPED = "dropped: "
"""The name of the check that a needed conversation is kept, before the reason it was dropped."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failure:
    """One conversation on which a check failed."""

    check: str  # the name of the check
    told: str  # what is wrong, in one sentence
    conversation: Conversation
    policy: TrainPolicy
    ids: IntArray | None = None
    mask: BoolArray | None = None
    answers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    # the turns that should be trained, start and stop in `ids`, and their words


class Refuted(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.told)
        self.failure = failure


@dataclass(frozen=True, slots=True, eq=False)
class ProofExample:
    """One kept conversation."""

    conversation: Conversation
    policy: TrainPolicy
    checked: list[CheckedMessage]
    ids: IntArray
    mask: BoolArray
    bounds: list[int]  # where each turn starts, and where the last one stops
    roles: list[int]  # places in ROLES, one per turn
    groups: list[list[int]]  # the messages of each turn; none for one the template made up
    wanted: list[bool | None]  # whether each turn should be trained; None when nobody says

    def refute(self, check: str, told: str) -> Refuted:
        answers = {
            (self.bounds[turn], self.bounds[turn + 1]): self.checked[group[-1]].text or ""
            for turn, group in enumerate(self.groups)
            if self.wanted[turn] and group
        }
        failure = Failure(
            check=check,
            told=told,
            conversation=self.conversation,
            policy=self.policy,
            ids=self.ids,
            mask=self.mask,
            answers=answers,
        )
        return Refuted(failure)


def render_one(
    template: ChatTemplate, conversation: Conversation, policy: TrainPolicy
) -> ProofExample | str:
    """The example, or the reason it was dropped for. Raises Refuted when it is neither."""
    rendered = template.render([conversation], policy)
    if not len(rendered.kept) and len(rendered.drops) == 1 and rendered.drops[0].reason:
        return rendered.drops[0].reason
    checked = check_messages(conversation.messages)
    if rendered.kept.tolist() != [0] or rendered.drops or isinstance(checked, str):
        told = f"{rendered.kept.tolist()} kept and {len(rendered.drops)} dropped of one"
        raise Refuted(Failure(check="account", told=told, conversation=conversation, policy=policy))
    return _matched(rendered, conversation, checked, policy)


def _matched(
    rendered: Rendered,
    conversation: Conversation,
    checked: list[CheckedMessage],
    policy: TrainPolicy,
) -> ProofExample:
    examples = rendered.examples
    ids, mask = np.asarray(examples.ids[0]), np.asarray(examples.mask)
    starts, roles = examples.turn_starts.tolist(), examples.turn_roles.tolist()
    groups = match_turns(roles, [message.role for message in checked])
    failure = Failure(
        check="turns", told="", conversation=conversation, policy=policy, ids=ids, mask=mask
    )
    if mask.shape != ids.shape or mask.dtype != np.bool_ or len(starts) != len(roles):
        told = f"{len(ids)} ids, {mask.shape} mask, {len(starts)} turns, {len(roles)} roles"
        raise Refuted(replace(failure, told=told))
    if not starts or starts[0] < 0 or (np.diff([*starts, len(ids)]) <= 0).any():
        raise Refuted(replace(failure, told=f"turns start at {starts} of {len(ids)} ids"))
    if groups is None:
        said = [ROLES[message.role] for message in checked]
        found = [ROLES[role] if role < len(ROLES) else f"role {role}" for role in roles]
        raise Refuted(replace(failure, told=f"the turns are of {found}, the messages of {said}"))
    wanted = _wanted(checked, groups, policy)
    bounds = [*starts, len(ids)]
    return ProofExample(conversation, policy, checked, ids, mask, bounds, roles, groups, wanted)


def _wanted(
    checked: list[CheckedMessage], groups: list[list[int]], policy: TrainPolicy
) -> list[bool | None]:
    roles = np.array([message.role for message in checked], np.uint8)
    flags = [(place, m.train) for place, m in enumerate(checked) if m.train is not None]
    trained = trained_turns(roles, np.array([0, len(roles)]), flags, policy)
    made_up = None if policy.train_on == "all" else False
    return [bool(trained[group].any()) if group else made_up for group in groups]


def match_turns(roles: list[int], messages: list[int]) -> list[list[int]] | None:
    """Which messages make each turn; None when they do not fit.

    One each, but: system messages may be folded into the turn behind them, a run of tool results
    may be one turn, and a template may open with a system turn of its own.
    """
    groups: list[list[int]] = []
    place = 0
    for turn, role in enumerate(roles):
        start = place
        while role != SYSTEM and place < len(messages) and messages[place] == SYSTEM:
            place += 1  # folded
        if place > start and start != 0:
            return None
        if turn == 0 and role == SYSTEM and messages[0] != SYSTEM:
            groups.append([])
            continue
        if place == len(messages) or messages[place] != role:
            return None
        place += 1
        if role == TOOL and roles[turn + 1 : turn + 2] != [TOOL] and roles[turn - 1] != TOOL:
            while place < len(messages) and messages[place] == TOOL:
                place += 1
        groups.append(list(range(start, place)))
    return groups if place == len(messages) else None


def is_assistant(example: ProofExample, turn: int) -> bool:
    return example.roles[turn] == ASSISTANT


class TokenReader:
    """Reads ids back."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = _decoder(tokenizer)
        self._encode = _encoder(tokenizer)
        self._spelt: dict[str, list[str]] = {}
        self.fingerprint = _fingerprint(tokenizer)

    def text(self, ids: IntArray) -> str:
        """What these ids say when they stand alone."""
        return self._decode(ids.tolist())

    def readings(self, ids: IntArray, start: int, stop: int) -> list[str]:
        """What ids start..stop say: alone, and behind what stands before them."""
        alone = self.text(ids[start:stop])
        before, with_it = self.text(ids[:start]), self.text(ids[:stop])
        return [alone, with_it[len(before) :]] if with_it.startswith(before) else [alone, alone]

    def spellings(self, text: str) -> list[str]:
        """The text, and what is left of it in a tokenizer that cannot hold it whole."""
        if text not in self._spelt:
            back = self._decode(self._encode(text))
            self._spelt[text] = [text] if back == text else [text, back]
        return self._spelt[text]


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    if hasattr(tokenizer, "apply_chat_template"):
        return lambda ids: str(
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
    return lambda ids: str(tokenizer.decode(ids))


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    if hasattr(tokenizer, "apply_chat_template"):
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    return lambda text: list(tokenizer.encode(text))


def _fingerprint(tokenizer: Any) -> str:
    own = getattr(tokenizer, "fingerprint", None)
    if isinstance(own, str):
        return own
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(str(backend.to_str()).encode()).hexdigest()
    raise TokenizerError(
        f"{type(tokenizer).__name__} has no fingerprint, so a certificate could not say what it is "
        "for; open it with shardmill.tokenizers.open_tokenizer"
    )


TRIMS: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "both": str.strip,
    "left": str.lstrip,
    "right": str.rstrip,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnShape:
    """How a template writes every trained assistant turn."""

    opening: IntArray  # ids before the words
    tail: IntArray  # ids behind the end
    leads: tuple[str | None, ...]  # blanks each reading has before the words; None: no such reading
    end: str  # what is trained behind the words
    end_markers: list[int]
    trim: str = "none"  # one of TRIMS


def span(example: ProofExample, turn: int) -> tuple[int, int]:
    """The trained part of a turn; empty at its end when there is none."""
    start, stop = example.bounds[turn : turn + 2]
    places = np.flatnonzero(example.mask[start:stop]) + start
    if not len(places):
        return stop, stop
    first, last = int(places[0]), int(places[-1]) + 1
    if last - first != len(places):
        raise example.refute("words", f"the trained part of turn {turn} has gaps")
    return first, last


def learn_shape(
    example: ProofExample, turn: int, reader: TokenReader, markers: frozenset[int]
) -> TurnShape:
    start, stop = example.bounds[turn : turn + 2]
    first, last = span(example, turn)
    if first == last:
        raise example.refute("words", f"turn {turn} must be trained, and is not")
    text = example.checked[example.groups[turn][-1]].text or ""
    read = reader.readings(example.ids, first, last)
    leads = tuple(_lead(found, text, reader.text(example.ids[first : first + 1])) for found in read)
    good = [found[len(lead) :] for lead, found in zip(leads, read, strict=True) if lead is not None]
    if not good:
        raise example.refute(
            "words", f"turn {turn} trains {read[0]!r}: wanted {text!r} and its end"
        )
    shape = TurnShape(
        opening=example.ids[start:first],
        tail=example.ids[last:stop],
        leads=leads,
        end=good[0][len(text) :],
        end_markers=markers_in(example.ids[first:last], markers),
    )
    _check_end(example, turn, shape, markers)
    return shape


def _check_end(example: ProofExample, turn: int, shape: TurnShape, markers: frozenset[int]) -> None:
    behind = markers_in(shape.tail, markers)
    if example.policy.train_on_eot:
        if not shape.end_markers:
            raise example.refute(
                "end", f"turn {turn} trains no special token behind its words: nothing would stop"
            )
        if behind:
            raise example.refute("end", f"turn {turn} trains only a part of its end")
    elif shape.end_markers or shape.end.strip():
        raise example.refute(
            "end", f"turn {turn} trains {shape.end!r} behind its words, with train_on_eot=False"
        )


def _lead(found: str, text: str, first_token: str) -> str | None:
    """The blanks before the words, if they are part of the first word's own token."""
    lead = found[: len(found) - len(found.lstrip())]
    if not found[len(lead) :].startswith(text):
        return None
    return lead if not lead or first_token.strip() else None


def markers_in(ids: IntArray, markers: frozenset[int]) -> list[int]:
    return [number for number in ids.tolist() if number in markers]


def learn_trim(example: ProofExample, shape: TurnShape, reader: TokenReader) -> str:
    """Which way of trimming makes the padded answer right."""
    turn = len(example.roles) - 1
    text = example.checked[-1].text or ""
    first, last = span(example, turn)
    read = reader.readings(example.ids, first, last)
    for name, trim in TRIMS.items():
        for lead, found in zip(shape.leads, read, strict=True):
            if lead is not None and found == lead + trim(text) + shape.end:
                return name
    raise example.refute(
        "words", f"turn {turn} trains {read[0]!r}: wanted {text + shape.end!r}, or trimmed"
    )
