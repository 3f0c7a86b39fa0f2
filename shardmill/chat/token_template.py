"""Conversations to tokens and their mask, by a template made of tokens.

In: conversations, a bound template, a policy.  Out: `Rendered`.
Promise: each turn is its role's opening, its words exactly as the encoder gives them (each text
encoded on its own), its end; nothing else is added. All texts of a batch go through one
`encode_batch`. Ids and mask are made of the same spans; nothing is searched. Structure comes from
the template alone: a conversation whose text encodes to a marker of the template is dropped.
Not here: truncation, padding, shifting; templates written as text.

A template meets a tokenizer: markers become ids, fixed text is encoded once.

In: a spec and a tokenizer.  Out: a TokenTemplate.
Promise: every marker is exactly one special id of the tokenizer, and different markers have
different ids; fixed text holds no marker; the opening of an assistant's turn is not the
beginning of another's, nor the other way round. Anything else is an error that says what
the tokenizer has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.chat.messages import special_in_text
from shardmill.chat.policy import ASSISTANT, Rendered, TrainPolicy, check_policy, trained_turns
from shardmill.chat.template_spec import Marker, Pieces, TemplateSpec, Text
from shardmill.chat.turns import (
    END,
    STRUCTURE,
    WORDS,
    Columns,
    Fixed,
    Forms,
    TurnCollector,
    assemble,
)
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
        turns = TurnCollector(self.spec, forms, policy).collect(conversations)
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


def bind_template(
    spec: TemplateSpec, tokenizer: Tokenizer, encoder: Encoder | None = None
) -> TokenTemplate:
    """A template that renders with this tokenizer.

    A marker is looked up as a name in `special_token_ids()`, then as a literal string by
    `marker_id(text)`, which the tokenizers of this library have. `encoder` is a faster way to the
    same ids, and encodes the words when there is one.
    """
    named = list(_named_pieces(spec))
    markers = _find_markers(spec, named, tokenizer)
    texts = _encode_texts(spec, named, tokenizer, markers)
    pieces = {name: _fixed(parts, kind, markers, texts) for name, kind, parts in named}
    opening = pieces["assistant.before"].ids
    for role in spec.roles:
        other = pieces[f"{role}.before"].ids
        common = min(len(opening), len(other))
        if role != "assistant" and np.array_equal(other[:common], opening[:common]):
            raise TokenizerError(
                f"template {spec.name!r}: a turn of the {role} opens with {other.tolist()}, one of "
                f"the assistant with {opening.tolist()} in {tokenizer!r}: one is the beginning of "
                "the other, so text could make them alike"
            )
    return TokenTemplate(
        spec=spec, markers=markers, pieces=pieces, encoder=tokenizer if encoder is None else encoder
    )


def _named_pieces(spec: TemplateSpec) -> Iterator[tuple[str, int, Pieces]]:
    """(name, kind, pieces) of everything fixed; adjoining texts are one."""
    yield "begin", STRUCTURE, _merged(spec.begin)
    for role, one in spec.roles.items():
        yield f"{role}.before", STRUCTURE, _merged(one.before)
        yield f"{role}.end", END, _merged(one.end)
        yield f"{role}.after", STRUCTURE, _merged(one.after)
    for name in ("reasoning", "tool_call", "tools"):
        insert = getattr(spec, name)
        if insert is not None:
            yield f"{name}.between", WORDS, _merged(insert.between)
            yield f"{name}.before", WORDS, _merged(insert.before)
            yield f"{name}.after", WORDS, _merged(insert.after)


def _merged(pieces: Pieces) -> Pieces:
    merged: list[Marker | Text] = []
    for piece in pieces:
        if merged and isinstance(piece, Text) and isinstance(merged[-1], Text):
            merged[-1] = Text(merged[-1].text + piece.text)
        else:
            merged.append(piece)
    return tuple(merged)


def _find_markers(
    spec: TemplateSpec, named: list[tuple[str, int, Pieces]], tokenizer: Tokenizer
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
                raise TokenizerError(
                    f"template {spec.name!r}, {name}: the marker {marker!r} is not one special "
                    f"token of {tokenizer!r}, which has {_shown(specials)}; use a tokenizer with "
                    "this token, or a template file that names tokens it has"
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


def _shown(specials: Mapping[str, int]) -> str:
    if not specials:
        return "no special tokens"
    shown = [f"{name!r} ({number})" for name, number in list(specials.items())[:20]]
    more = f" and {len(specials) - 20} more" if len(specials) > 20 else ""
    return ", ".join(shown) + more


def _encode_texts(
    spec: TemplateSpec,
    named: list[tuple[str, int, Pieces]],
    tokenizer: Tokenizer,
    markers: Mapping[str, int],
) -> dict[str, IntArray]:
    """Each fixed text to its ids."""
    texts = sorted({p.text for _, _, parts in named for p in parts if isinstance(p, Text)})
    if not texts:
        return {}
    encoded = tokenizer.encode_batch(texts)
    for number in special_in_text(encoded, markers.values()).tolist():
        raise TokenizerError(
            f"template {spec.name!r}: {tokenizer!r} makes a marker out of the plain text "
            f"{texts[number]!r}; write it as a marker, or open the model with "
            "shardmill.tokenizers.open_tokenizer, which keeps them apart"
        )
    return dict(zip(texts, encoded, strict=True))


def _fixed(
    pieces: Pieces, kind: int, markers: Mapping[str, int], texts: Mapping[str, IntArray]
) -> Fixed:
    parts = [
        [markers[piece.marker]] if isinstance(piece, Marker) else texts[piece.text]
        for piece in pieces
    ]
    ids = np.concatenate([np.empty(0, np.int64), *(np.asarray(part, np.int64) for part in parts)])
    return Fixed(ids, np.full(len(ids), kind, np.uint8))
