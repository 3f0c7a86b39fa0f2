"""The mask proof: a template trains what the assistant says and its end, or it is refused.

In: a template bound to a tokenizer, that tokenizer, a policy.  Out: a `Certificate`, or
`MaskProofError` with the smallest failing conversation, token by token.
Promise: equal template, tokenizer, policy and versions give an equal certificate.
Not here: what exactly is proved, and what cannot be (judge.py).
Cost: a few hundred small renderings, about a second.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np

from shardmill.chat.contract import ChatTemplate, TrainOn, TrainPolicy
from shardmill.chat.proof.battery import BATTERY_VERSION, Item, battery, battery_sha256, plain_item
from shardmill.chat.proof.example import DROPPED, Failure
from shardmill.chat.proof.judge import Judge
from shardmill.chat.proof.reader import Reader
from shardmill.chat.proof.show import as_lines, smallest, table
from shardmill.errors import MaskProofError, TemplateError
from shardmill.records import JSON, Conversation, Ragged

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
    reader = Reader(tokenizer)
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

    def __init__(self, template: ChatTemplate, reader: Reader) -> None:
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
