"""The mask proof: a template trains what the assistant says and its end, or it is refused.

Equal template, tokenizer, policy and versions give an equal certificate. A refusal shows the
smallest conversation found that fails the same check, token by token, without control characters.
The cost is a few hundred small renderings, about a second. judge.py says what is proved.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shardmill.chat.policy import TRAIN_ON, ChatTemplate, TrainPolicy
from shardmill.chat.proof.battery import (
    BATTERY_VERSION,
    BatteryItem,
    battery,
    battery_sha256,
    plain_conversation,
)
from shardmill.chat.proof.example import Failure, TokenReader
from shardmill.chat.proof.judge import DROPPED, Judge
from shardmill.errors import MaskProofError, TemplateError
from shardmill.records import JSON, BoolArray, Conversation, Ragged

PROOF_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was proved about a template; stored in the manifest of what it made."""

    template: dict[str, JSON]  # as it describes itself
    tokenizer: str  # fingerprint
    policy: dict[str, JSON]
    versions: dict[str, JSON]
    battery: dict[str, JSON]  # version, sha256, number of conversations
    checks: dict[str, dict[str, int]]  # policy -> what was checked, and how often
    declined: dict[str, dict[str, list[str]]]  # policy -> reason -> battery items it dropped
    trim: str  # which side of a text the template cuts blanks from: none, both, left, right
    end: str  # what is trained after the assistant's words

    def to_json(self) -> dict[str, JSON]:
        return {
            "proof_version": PROOF_VERSION,
            "template": self.template,
            "tokenizer": self.tokenizer,
            "policy": self.policy,
            "versions": self.versions,
            "battery": self.battery,
            "checks": {on: dict(counts) for on, counts in self.checks.items()},
            "declined": {
                on: {why: list[JSON](names) for why, names in reasons.items()}
                for on, reasons in self.declined.items()
            },
            "trim": self.trim,
            "end": self.end,
        }


def prove_mask(
    template: ChatTemplate, tokenizer: Any, policy: TrainPolicy | None = None
) -> Certificate:
    """Prove a template's loss mask on the battery; MaskProofError if it is wrong.

    tokenizer: the one the template is bound to, ours or of transformers; used only to decode.
    Other values of `train_on` are proved too, and train_on_eot=False if True was asked for; a
    template may decline those.
    """
    policy = policy or TrainPolicy()
    reader = TokenReader(tokenizer)
    items = battery([reader.text([number]) for number in sorted(template.marker_ids)])
    proof = _Proof(template, reader)
    judge = proof.prove_policy(policy, items)
    proof.compare_batch(policy, items)
    ends = (True, False) if policy.train_on_eot else (False,)
    needed = [item for item in items if item.needed]
    for end, train_on in itertools.product(ends, TRAIN_ON):
        other = TrainPolicy(train_on=train_on, train_on_eot=end)
        if other != policy:
            proof.prove_policy(other, needed, may_decline=True)
    assert judge is not None
    assert judge.shape is not None
    return Certificate(
        template=template.describe(),
        tokenizer=reader.fingerprint,
        policy={"train_on": policy.train_on, "train_on_eot": policy.train_on_eot},
        versions={
            "shardmill": importlib.metadata.version("shardmill"),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        battery={
            "version": BATTERY_VERSION,
            "sha256": battery_sha256(items),
            "conversations": len(items),
        },
        checks=proof.checks,
        declined=proof.declined,
        trim=judge.shape.trim,
        end=judge.shape.end,
    )


class _Proof:
    """A proof in progress: counts of what was checked and declined, by policy."""

    def __init__(self, template: ChatTemplate, reader: TokenReader) -> None:
        self._template = template
        self._reader = reader
        self.checks: dict[str, dict[str, int]] = {}
        self.declined: dict[str, dict[str, list[str]]] = {}

    def prove_policy(
        self, policy: TrainPolicy, items: Sequence[BatteryItem], *, may_decline: bool = False
    ) -> Judge | None:
        """Judge every item. None if the template declined the policy, where it may."""
        declined = self.declined.setdefault(_key(policy), {})
        judge = Judge(self._template, self._reader, policy)
        failure = judge.learn(plain_conversation())
        if failure is not None and may_decline and failure.check.startswith(DROPPED):
            declined[failure.check.removeprefix(DROPPED)] = ["everything"]
            return None
        if failure is not None:
            raise self._refusal(failure, Judge(self._template, self._reader, policy).learn)
        for item in items:
            needed = item.needed and not may_decline
            found = judge.judge(item.conversation, needed=needed)
            if found == "trains_others":  # not a conversation it cannot write: a wrong mask
                found = judge.judge(item.conversation, needed=True)
            if isinstance(found, Failure):
                raise self._refusal(found, partial(judge.judge, needed=needed))
            if found is not None:
                declined.setdefault(found, []).append(item.name)
        self.checks[_key(policy)] = dict(sorted(judge.counts.items()))
        return judge

    def compare_batch(self, policy: TrainPolicy, items: Sequence[BatteryItem]) -> None:
        """Many conversations at once give what they give one by one."""
        chats = [item.conversation for item in items]
        whole = self._template.render(chats, policy)
        alone = [self._template.render([chat], policy) for chat in chats]
        parts = [one.examples for one in alone if len(one.kept)]
        begins = np.cumsum([0, *(len(part.mask) for part in parts)])[:-1].tolist()
        starts = [part.turn_starts + at for part, at in zip(parts, begins, strict=True)]
        found = whole.examples
        same = (
            whole.kept.tolist() == [at for at, one in enumerate(alone) if len(one.kept)]
            and [d.reason for d in whole.drops] == [d.reason for one in alone for d in one.drops]
            and found.ids == Ragged.concatenate([part.ids for part in parts])
            and np.array_equal(found.mask, np.concatenate([part.mask for part in parts]))
            and np.array_equal(found.turn_starts, np.concatenate(starts))
            and np.array_equal(found.turn_roles, np.concatenate([p.turn_roles for p in parts]))
        )
        if not same:
            raise MaskProofError(
                f"chat template {self._template.name!r}: {len(chats)} conversations of the battery "
                "rendered at once differ from the same rendered one by one; render() must treat "
                "each separately"
            )
        self.checks[_key(policy)]["batch is one by one"] = len(chats)

    def _refusal(
        self, failure: Failure, attempt: Callable[[Conversation], Failure | str | None]
    ) -> MaskProofError:
        small = _smallest(failure, attempt)
        draft = getattr(self._template, "draft", None)
        if small.ids is None and draft is not None:
            with suppress(TemplateError):  # show the tokens of a dropped conversation if it can
                small.ids, small.mask = draft(small.conversation)
        name, policy = self._template.name, _key(small.policy)
        conversation = small.conversation
        lines = [
            f"chat template {name!r} is refused ({policy}): {small}",
            f"the smallest conversation found that fails this check ({small.check}):",
            *("  " + json.dumps(dict(message), default=str) for message in conversation.messages),
        ]
        if conversation.tools:
            tools = [dict(tool) for tool in conversation.tools]
            lines.append("  tools " + json.dumps(tools, default=str))
        lines += _token_table(small, self._reader, self._template.marker_ids)
        return MaskProofError("\n".join(lines))


def _key(policy: TrainPolicy) -> str:
    return f"train_on={policy.train_on}, train_on_eot={str(policy.train_on_eot).lower()}"


# Making a failure small.

_MAX_TRIES = 400
_WORD = "zq"  # in no template's own text


def _smallest(failure: Failure, attempt: Callable[[Conversation], Failure | str | None]) -> Failure:
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
