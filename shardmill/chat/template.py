"""Conversations to tokens and their mask, by a template made of tokens.

In: conversations, a bound template, a policy.  Out: `Rendered`.
Promise: each turn is its role's opening, its words exactly as the encoder gives them (each text
encoded on its own), its end; nothing else is added. All texts of a batch go through one
`encode_batch`. Ids and mask are made of the same spans; nothing is searched. Structure comes from
the template alone: a conversation whose text encodes to a marker of the template is dropped.
Not here: truncation, padding, shifting; templates written as text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.chat.assemble import Fixed, assemble
from shardmill.chat.check import special_in_text
from shardmill.chat.contract import Rendered, TrainPolicy
from shardmill.chat.policy import check_policy, trained_turns
from shardmill.chat.roles import ASSISTANT
from shardmill.chat.spec import TemplateSpec
from shardmill.chat.turns import Collector, Columns, Forms
from shardmill.errors import TokenizerError
from shardmill.protocols import Encoder
from shardmill.records import (
    JSON,
    BoolArray,
    ChatExamples,
    Conversation,
    Drop,
    IntArray,
    OffsetArray,
    Ragged,
)

RULES = 1
"""Counts up when the same spec would give other ids or another mask."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTemplate:
    """A template made of tokens, bound to a tokenizer by `bind_template`."""

    spec: TemplateSpec
    markers: Mapping[str, int]  # every marker of the spec, as it is written there, to its id
    pieces: Mapping[str, Fixed]  # every fixed piece of the spec, encoded
    encoder: Encoder

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def marker_ids(self) -> frozenset[int]:
        return frozenset(self.markers.values())

    @property
    def end_ids(self) -> tuple[int, ...]:
        """What ends an assistant's turn and is trained with it."""
        ids: list[int] = self.pieces["assistant.end"].ids.tolist()
        return tuple(ids)

    def describe(self) -> dict[str, JSON]:
        """The name and the ids of the markers do not count for the sha256."""
        spec = self.spec.to_json()
        counted = {key: value for key, value in spec.items() if key != "name"}
        text = json.dumps({"rules": RULES, **counted}, sort_keys=True, separators=(",", ":"))
        return {
            "kind": "tokens",
            "name": self.name,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "markers": dict(self.markers),
            "end_ids": list(self.end_ids),
            "spec": spec,
        }

    def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
        check_policy(policy)
        forms = Forms(self.pieces)
        turns = Collector(self.spec, forms, policy).collect(conversations)
        texts = self._encode(turns.texts)
        columns = turns.columns()
        trained = trained_turns(columns.roles, columns.bounds, turns.flags, policy)
        laid = assemble(
            texts,
            columns.forms,
            forms.forms,
            columns.per_text(trained),
            train_ends=policy.train_on_eot,
        )
        starts = laid.offsets[columns.first_texts]
        starts[columns.bounds[:-1]] += len(self.pieces["begin"].ids)
        examples = ChatExamples(
            ids=Ragged(laid.values, laid.offsets[columns.edges]),
            mask=laid.mask,
            turn_starts=starts,
            turn_roles=columns.roles,
        )
        unsound = special_in_text(texts, self.marker_ids)
        reasons = _reasons(columns, laid.num_trained, unsound)
        for number in sorted(reasons):
            turns.dropped.append((turns.kept[number], reasons[number]))
        sound = np.ones(len(turns.kept), np.bool_)
        sound[list(reasons)] = False
        return Rendered(
            examples=examples.keep(sound),
            kept=np.array(turns.kept, np.int64)[sound],
            drops=_drops(turns.dropped, conversations),
        )

    def _encode(self, texts: list[str]) -> Ragged:
        encoded = self.encoder.encode_batch(texts)
        if len(encoded) != len(texts):
            raise TokenizerError(
                f"{self.encoder!r} gave {len(encoded):,} sequences for {len(texts):,} texts; "
                "wanted one each"
            )
        return encoded

    def __repr__(self) -> str:
        return f"TokenTemplate({self.name!r}, markers={dict(self.markers)})"


def _reasons(columns: Columns, num_trained: OffsetArray, unsound: OffsetArray) -> dict[int, str]:
    """Conversations that were laid out and yet cannot be used, to the reason."""
    trained = _sums(num_trained, columns.edges)
    assistants = _sums(columns.roles == ASSISTANT, columns.bounds)
    reasons = {
        number: "nothing_trained" if assistants[number] else "no_assistant"
        for number in np.flatnonzero(trained == 0).tolist()
    }
    owners = np.searchsorted(columns.edges, unsound, side="right") - 1
    return {**reasons, **dict.fromkeys(owners.tolist(), "special_in_text")}


def _sums(values: IntArray | BoolArray, bounds: OffsetArray) -> OffsetArray:
    """The sum of each stretch bounds[i]..bounds[i + 1]."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return np.diff(sums[bounds])


def _drops(
    dropped: list[tuple[int, str]], conversations: Sequence[Conversation]
) -> tuple[Drop, ...]:
    return tuple(
        Drop(id=conversations[position].id or f"conversation {position}", reason=reason)
        for position, reason in sorted(dropped)
    )
