"""Templates made of tokens: conversations to ids and loss mask.

Each turn is its role's opening, its words exactly as the encoder gives them (each text encoded on
its own) and its end; nothing else is added. All texts of a batch go through one `encode_batch`.
Structure comes from the template alone: every marker is exactly one special id of the tokenizer,
and a conversation whose text encodes to a marker is dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.chat.messages import special_in_text
from shardmill.chat.policy import ASSISTANT, Rendered, TrainPolicy, check_policy, trained_turns
from shardmill.chat.template_spec import Fragments, Marker, TemplateSpec, Text
from shardmill.chat.turns import END, STRUCTURE, WORDS, Fixed, Turns, assemble, collect_turns
from shardmill.errors import TokenizerError
from shardmill.protocols import Encoder, Tokenizer
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
"""Increased when the same spec would give other ids or another mask."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTemplate:
    """A template made of tokens, bound to a tokenizer by `bind_template`."""

    spec: TemplateSpec
    markers: Mapping[str, int]  # marker as written in the spec -> id
    pieces: Mapping[str, Fixed]  # the fixed pieces of the spec, encoded: "user.before" -> tokens
    encoder: Encoder

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def marker_ids(self) -> frozenset[int]:
        return frozenset(self.markers.values())

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end an assistant's turn and are trained with it."""
        ids: list[int] = self.pieces["assistant.end"].ids.tolist()
        return tuple(ids)

    def describe(self) -> dict[str, JSON]:
        """The sha256 covers neither the name nor the ids of the markers."""
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
        turns = collect_turns(conversations, self.spec, policy)
        texts = self.encoder.encode_batch(turns.texts)
        if len(texts) != len(turns.texts):
            raise TokenizerError(
                f"{self.encoder!r} gave {len(texts):,} sequences for {len(turns.texts):,} texts; "
                "wanted one each"
            )
        trained = trained_turns(turns.roles, turns.bounds, turns.flags, policy)
        values, mask, offsets, num_trained = assemble(
            texts, turns, self.pieces, trained, train_ends=policy.train_on_eot
        )
        starts = offsets[turns.first_texts]
        starts[turns.bounds[:-1]] += len(self.pieces["begin"].ids)  # not part of the first turn
        examples = ChatExamples(
            ids=Ragged(values, offsets[turns.text_bounds]),
            mask=mask,
            turn_starts=starts,
            turn_roles=turns.roles,
        )
        reasons = _late_reasons(turns, num_trained, special_in_text(texts, self.marker_ids))
        usable = np.ones(len(turns.kept), np.bool_)
        usable[list(reasons)] = False
        dropped = turns.dropped + [(turns.kept[at], reason) for at, reason in reasons.items()]
        return Rendered(
            examples=examples.keep(usable),
            kept=np.array(turns.kept, np.int64)[usable],
            drops=tuple(
                Drop(id=conversations[at].id or f"conversation {at}", reason=reason)
                for at, reason in sorted(dropped)
            ),
        )

    def __repr__(self) -> str:
        return f"TokenTemplate({self.name!r}, markers={dict(self.markers)})"


def _late_reasons(
    turns: Turns, num_trained: OffsetArray, with_markers: OffsetArray
) -> dict[int, str]:
    """Why conversations that were laid out cannot be used: number in `turns.kept` -> reason."""
    trained = _sums(num_trained, turns.text_bounds)
    assistants = _sums(turns.roles == ASSISTANT, turns.bounds)
    reasons = {
        number: "nothing_trained" if assistants[number] else "no_assistant"
        for number in np.flatnonzero(trained == 0).tolist()
    }
    owners = np.searchsorted(turns.text_bounds, with_markers, side="right") - 1
    return {**reasons, **dict.fromkeys(owners.tolist(), "special_in_text")}


def _sums(values: IntArray | BoolArray, bounds: OffsetArray) -> OffsetArray:
    """The sum of each range bounds[i]..bounds[i + 1]."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return np.diff(sums[bounds])


def bind_template(
    spec: TemplateSpec, tokenizer: Tokenizer, encoder: Encoder | None = None
) -> TokenTemplate:
    """A template that renders with this tokenizer.

    A marker is looked up as a name in `special_token_ids()`, then as a literal string by
    `marker_id(text)`, which the tokenizers of this library have. `encoder` is a faster encoder with
    the same ids for the words. TokenizerError if a marker is not one special id, if two markers
    share an id, if fixed text encodes to a marker, or if the opening of an assistant's turn is the
    beginning of another's or the other way round.
    """
    named = list(_named_fragments(spec))
    markers = _find_markers(spec, named, tokenizer)
    texts = _encode_texts(spec, named, tokenizer, markers)
    pieces: dict[str, Fixed] = {}
    for name, kind, parts in named:
        encoded = [
            [markers[part.marker]] if isinstance(part, Marker) else texts[part.text]
            for part in parts
        ]
        ids = np.concatenate([np.empty(0, np.int64), *(np.asarray(e, np.int64) for e in encoded)])
        pieces[name] = Fixed(ids, np.full(len(ids), kind, np.uint8))
    opening = pieces["assistant.before"].ids
    for role in spec.roles:
        other = pieces[f"{role}.before"].ids
        common = min(len(opening), len(other))
        if role != "assistant" and np.array_equal(other[:common], opening[:common]):
            raise TokenizerError(
                f"template {spec.name!r}: a turn of the {role} opens with {other.tolist()}, one of "
                f"the assistant with {opening.tolist()} in {tokenizer!r}: one is the beginning of "
                "the other, so text could make them look the same"
            )
    return TokenTemplate(
        spec=spec, markers=markers, pieces=pieces, encoder=tokenizer if encoder is None else encoder
    )


def _named_fragments(spec: TemplateSpec) -> Iterator[tuple[str, int, Fragments]]:
    """(name, kind, fragments) of everything fixed, with adjacent texts joined."""
    yield "begin", STRUCTURE, _joined(spec.begin)
    for role, one in spec.roles.items():
        yield f"{role}.before", STRUCTURE, _joined(one.before)
        yield f"{role}.end", END, _joined(one.end)
        yield f"{role}.after", STRUCTURE, _joined(one.after)
    for name in ("reasoning", "tool_call", "tools"):
        insert = getattr(spec, name)
        if insert is not None:
            for part in ("between", "before", "after"):
                yield f"{name}.{part}", WORDS, _joined(getattr(insert, part))


def _joined(fragments: Fragments) -> Fragments:
    joined: list[Marker | Text] = []
    for fragment in fragments:
        if joined and isinstance(fragment, Text) and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + fragment.text)
        else:
            joined.append(fragment)
    return tuple(joined)


def _find_markers(
    spec: TemplateSpec, named: list[tuple[str, int, Fragments]], tokenizer: Tokenizer
) -> dict[str, int]:
    specials = tokenizer.special_token_ids()
    by_string = getattr(tokenizer, "marker_id", None)
    found: dict[str, int] = {}
    for name, _, parts in named:
        for marker in (part.marker for part in parts if isinstance(part, Marker)):
            number = specials.get(marker)
            if number is None and callable(by_string):
                number = by_string(marker)
            if number is None or number < 0:
                shown = [f"{name!r} ({number})" for name, number in list(specials.items())[:20]]
                shown += [f"{len(specials) - 20} more"] if len(specials) > 20 else []
                raise TokenizerError(
                    f"template {spec.name!r}, {name}: the marker {marker!r} is not one special "
                    f"token of {tokenizer!r}, which has {', '.join(shown) or 'no special tokens'}; "
                    "use a tokenizer with this token, or a template file that names tokens it has"
                )
            found[marker] = int(number)
    by_id: dict[int, str] = {}
    for marker, number in found.items():
        if number in by_id:
            raise TokenizerError(
                f"template {spec.name!r}: {by_id[number]!r} and {marker!r} are both id {number} of "
                f"{tokenizer!r}; wanted different ids"
            )
        by_id[number] = marker
    return found


def _encode_texts(
    spec: TemplateSpec,
    named: list[tuple[str, int, Fragments]],
    tokenizer: Tokenizer,
    markers: Mapping[str, int],
) -> dict[str, IntArray]:
    """Fixed text -> its ids."""
    texts = sorted({p.text for _, _, parts in named for p in parts if isinstance(p, Text)})
    if not texts:
        return {}
    encoded = tokenizer.encode_batch(texts)
    for number in special_in_text(encoded, markers.values()).tolist():
        raise TokenizerError(
            f"template {spec.name!r}: {tokenizer!r} encodes the plain text {texts[number]!r} to a "
            "marker; write it as a marker, or open the model with "
            "shardmill.tokenizers.open_tokenizer, which keeps them apart"
        )
    return dict(zip(texts, encoded, strict=True))
