"""The mask proof: a template trains what the assistant says and its end, or it is refused.

In: a template bound to a tokenizer, that tokenizer, a policy.  Out: a `Certificate`, or
`MaskProofError` with the smallest failing conversation, token by token.
Promise: equal template, tokenizer, policy and versions give an equal certificate.
Not here: what exactly is proved, and what cannot be (judge.py).
Cost: a few hundred small renderings, about a second.

A failure made small, and shown token by token.

In: a failure and a way to try again.  Out: the smallest conversation that fails alike; lines to
read.
Promise: the same check fails on what is shown; no line holds a control character.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np

from shardmill.chat.policy import ChatTemplate, TrainOn, TrainPolicy
from shardmill.chat.proof.battery import BATTERY_VERSION, Item, battery, battery_sha256, plain_item
from shardmill.chat.proof.example import DROPPED, Failure, TokenReader
from shardmill.chat.proof.judge import Judge
from shardmill.errors import MaskProofError, TemplateError
from shardmill.records import JSON, BoolArray, Conversation, Ragged

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


def table(failure: Failure, reader: TokenReader, markers: frozenset[int]) -> list[str]:
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


def _wanted(failure: Failure, reader: TokenReader, markers: frozenset[int]) -> BoolArray | None:
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
    failure: Failure, reader: TokenReader, markers: frozenset[int]
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


PROOF_VERSION = 1
_TRAIN_ON: tuple[TrainOn, ...] = get_args(TrainOn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was proved about a template; stored in the manifest of what it made."""

    template: dict[str, JSON]  # as it describes itself
    tokenizer: str  # fingerprint
    policy: dict[str, JSON]
    versions: dict[str, JSON]
    battery: dict[str, JSON]  # version, sha256, how many conversations
    checks: dict[str, dict[str, int]]  # policy -> what was looked at, and how often
    declined: dict[str, dict[str, list[str]]]  # policy -> reason -> battery items without a place
    trim: str  # which side of a text the template cuts blanks from: none, both, left, right
    end: str  # what is trained behind the assistant's words

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
    """Prove a template's loss mask on the battery, or refuse it.

    tokenizer: the one the template is bound to, ours or of transformers; only to read tokens back.
    Other values of `train_on` are proved too, and train_on_eot=False beside True; a template may
    decline those.
    """
    policy = policy or TrainPolicy()
    reader = TokenReader(tokenizer)
    literals = [reader.text(np.array([number])) for number in sorted(template.marker_ids)]
    items = battery(literals)
    court = _Court(template, reader)
    judge = court.hold(policy, items)
    court.compare_batch(policy, items)
    for other in _other_policies(policy):
        court.hold(other, [item for item in items if item.needed], asked=False)
    assert judge is not None
    assert judge.shape is not None
    return Certificate(
        template=template.describe(),
        tokenizer=reader.fingerprint,
        policy={"train_on": policy.train_on, "train_on_eot": policy.train_on_eot},
        versions=_versions(),
        battery={
            "version": BATTERY_VERSION,
            "sha256": battery_sha256(items),
            "conversations": len(items),
        },
        checks=court.checks,
        declined=court.declined,
        trim=judge.shape.trim,
        end=judge.shape.end,
    )


class _Court:
    """Holds a template against policies, and keeps the account."""

    def __init__(self, template: ChatTemplate, reader: TokenReader) -> None:
        self._template = template
        self._reader = reader
        self.checks: dict[str, dict[str, int]] = {}
        self.declined: dict[str, dict[str, list[str]]] = {}

    def hold(
        self, policy: TrainPolicy, items: Sequence[Item], *, asked: bool = True
    ) -> Judge | None:
        """Judge every item. A policy nobody asked for may be declined: then there is no judge."""
        declined = self.declined.setdefault(_told(policy), {})
        judge = Judge(self._template, self._reader, policy)
        failure = judge.learn(plain_item().conversation)
        if failure is not None and not asked and failure.check.startswith(DROPPED):
            declined[failure.check.removeprefix(DROPPED)] = ["everything"]
            return None
        if failure is not None:
            raise self._refusal(failure, Judge(self._template, self._reader, policy).learn)
        for item in items:
            needed = item.needed and asked
            found = judge.judge(item.conversation, needed=needed)
            if found == "trains_others":  # not a conversation without a place: a wrong mask
                found = judge.judge(item.conversation, needed=True)
            if isinstance(found, Failure):
                raise self._refusal(found, partial(judge.judge, needed=needed))
            if found is not None:
                declined.setdefault(found, []).append(item.name)
        self.checks[_told(policy)] = dict(sorted(judge.counts.items()))
        return judge

    def compare_batch(self, policy: TrainPolicy, items: Sequence[Item]) -> None:
        """Many at a time give what they give one by one."""
        chats = [item.conversation for item in items]
        whole = self._template.render(chats, policy)
        alone = [self._template.render([chat], policy) for chat in chats]
        kept = [place for place, one in enumerate(alone) if len(one.kept)]
        reasons = [drop.reason for one in alone for drop in one.drops]
        same = whole.kept.tolist() == kept and [d.reason for d in whole.drops] == reasons
        parts = [one.examples for one in alone if len(one.kept)]
        begins = np.cumsum([0, *(len(part.mask) for part in parts)])[:-1].tolist()
        found = (whole.examples.ids, whole.examples.mask, whole.examples.turn_starts)
        if not same or not _equal(
            [*found, whole.examples.turn_roles],
            [
                Ragged.concatenate([part.ids for part in parts]),
                np.concatenate([part.mask for part in parts]),
                np.concatenate(
                    [part.turn_starts + at for part, at in zip(parts, begins, strict=True)]
                ),
                np.concatenate([part.turn_roles for part in parts]),
            ],
        ):
            raise MaskProofError(
                f"{_who(self._template)}: {len(chats)} conversations of the battery rendered at "
                "once are not what they are one by one; its render() must treat each alone"
            )
        self.checks[_told(policy)]["batch is one by one"] = len(chats)

    def _refusal(
        self, failure: Failure, attempt: Callable[[Conversation], Failure | str | None]
    ) -> MaskProofError:
        small = smallest(failure, attempt)
        if small.ids is None:
            small = _drafted(small, self._template)
        lines = [
            f"{_who(self._template)} is refused ({_told(small.policy)}): {small.told}",
            f"the smallest conversation found that fails this check ({small.check}):",
            *as_lines(small.conversation),
            *table(small, self._reader, self._template.marker_ids),
        ]
        return MaskProofError("\n".join(lines))


def _equal(found: list[Any], wanted: list[Any]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(
        one == other if isinstance(one, Ragged) else np.array_equal(one, other)
        for one, other in pairs
    )


def _drafted(failure: Failure, template: ChatTemplate) -> Failure:
    """With the tokens of a dropped conversation, when the template can show them."""
    draft = getattr(template, "draft", None)
    if draft is None:
        return failure
    try:
        ids, mask = draft(failure.conversation)
    except TemplateError:
        return failure
    return replace(failure, ids=ids, mask=mask)


def _other_policies(policy: TrainPolicy) -> list[TrainPolicy]:
    """Every other `train_on`; and untrained ends, when trained ones are asked for."""
    ends = (True, False) if policy.train_on_eot else (False,)
    every = [TrainPolicy(train_on=on, train_on_eot=end) for end in ends for on in _TRAIN_ON]
    return [other for other in every if other != policy]


def _told(policy: TrainPolicy) -> str:
    return f"train_on={policy.train_on}, train_on_eot={str(policy.train_on_eot).lower()}"


def _who(template: ChatTemplate) -> str:
    return f"chat template {template.name!r}"


def _versions() -> dict[str, JSON]:
    return {
        "shardmill": importlib.metadata.version("shardmill"),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
