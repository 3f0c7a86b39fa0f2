"""One rendered conversation: its turns matched with its messages, its tokens as text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.chat.messages import CheckedMessage, check_messages, trained_messages
from shardmill.chat.policy import SYSTEM, TOOL, ChatTemplate, TrainPolicy, trained_turns
from shardmill.errors import TokenizerError
from shardmill.records import ROLES, BoolArray, Conversation, IntArray


class Failure(Exception):
    """One conversation on which a check failed."""

    def __init__(
        self,
        check: str,
        message: str,
        conversation: Conversation,
        policy: TrainPolicy,
        ids: IntArray | None = None,
        mask: BoolArray | None = None,
    ) -> None:
        super().__init__(message)
        self.check = check
        self.conversation = conversation
        self.policy = policy
        self.ids = ids
        self.mask = mask
        self.answers: Mapping[tuple[int, int], str] = {}
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
        found = Failure(check, message, self.conversation, self.policy, self.ids, self.mask)
        found.answers = {
            (self.bounds[turn], self.bounds[turn + 1]): self.checked[group[-1]].text or ""
            for turn, group in enumerate(self.groups)
            if self.wanted[turn] and group
        }
        return found

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
    checked = check_messages(conversation.messages)
    if rendered.kept.tolist() != [0] or rendered.drops or isinstance(checked, str):
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
    tool results may be one turn, and a template may open with a system turn of its own.
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
