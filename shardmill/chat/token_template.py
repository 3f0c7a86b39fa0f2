"""Templates made of tokens: conversations to ids and loss mask.

Each turn is its role's opening, its words exactly as the encoder gives them (each text encoded on
its own, or with `join` what is inside a turn as one) and its end; nothing else is added. Structure
comes from the template alone: every marker is exactly one special id of the tokenizer, and a
conversation whose text encodes to a marker is dropped.

A batch is rendered in three steps, with no Python loop over tokens: `collect_turns` lists the texts
of all conversations and the fixed pieces around each, one `encode_batch` encodes them all, and
`assemble` joins the encoded texts and the fixed tokens. The mask follows from the same numbers as
the ids, never from looking at them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import numpy as np

from shardmill.chat.layout import MARKER, Turns, collect_turns
from shardmill.chat.policy import (
    ASSISTANT,
    SYSTEM,
    ChatTemplate,
    Rendered,
    TrainPolicy,
    special_in_text,
    trained_turns,
)
from shardmill.chat.template_spec import (
    INSERTS,
    Fragments,
    Insert,
    Marker,
    Piece,
    TemplateSpec,
    Text,
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
"""Increased when the same spec would give other ids or another mask."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTemplate:
    """A template made of tokens, bound to a tokenizer by `bind_template`. It pickles with it."""

    spec: TemplateSpec
    markers: Mapping[str, int]  # marker as written in the spec -> id
    pieces: Mapping[str, OffsetArray]  # the fixed pieces of the spec: "user.before" -> ids
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
        ids: list[int] = self.pieces["assistant.end"].tolist()
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
        # What opens the conversation is not part of the first turn.
        default = len(self.pieces.get("default_system", ()))
        without = turns.roles[turns.bounds[:-1]] != SYSTEM
        starts[turns.bounds[:-1]] += len(self.pieces["begin"]) + default * without
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
                Drop(id=found.id or f"conversation {at}", reason=reason, row=found.row)
                for at, reason in sorted(dropped)
                for found in (conversations[at],)
            ),
        )

    def with_encoder(self, encoder: Encoder) -> TokenTemplate:
        return replace(self, encoder=encoder)

    def __repr__(self) -> str:
        return f"TokenTemplate({self.name!r}, markers={dict(self.markers)})"


def _late_reasons(
    turns: Turns, num_trained: OffsetArray, with_markers: OffsetArray
) -> dict[int, str]:
    """Why collected conversations cannot be used: number in `turns.kept` -> reason."""
    # A conversation has at least one turn, and a turn at least one text.
    trained = np.add.reduceat(num_trained, turns.text_bounds[:-1])
    said = np.logical_or.reduceat(turns.roles == ASSISTANT, turns.bounds[:-1])
    reasons = {
        number: "nothing_trained" if said[number] else "no_assistant"
        for number in np.flatnonzero(trained == 0).tolist()
    }
    owners = np.searchsorted(turns.text_bounds, with_markers, side="right") - 1
    return {**reasons, **dict.fromkeys(owners.tolist(), "special_in_text")}


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
    fixed = _fixed_pieces(spec)
    markers = _find_markers(spec, fixed, tokenizer)
    texts = sorted({part.text for one in fixed.values() for part in one if isinstance(part, Text)})
    encoded = tokenizer.encode_batch(texts) if texts else Ragged.from_sequences([])
    for number in special_in_text(encoded, markers.values()).tolist():
        raise TokenizerError(
            f"template {spec.name!r}: {tokenizer!r} encodes the plain text {texts[number]!r} to a "
            "marker; write it as a marker, or open the model with "
            "shardmill.tokenizers.open_tokenizer, which keeps them apart"
        )
    ids_of: dict[Piece, IntArray] = {
        **{Text(text): ids for text, ids in zip(texts, encoded, strict=True)},
        **{Marker(marker): np.array([number]) for marker, number in markers.items()},
    }
    nothing = np.empty(0, np.int64)
    pieces = {
        name: np.concatenate([nothing, *(ids_of[part].astype(np.int64) for part in parts)])
        for name, parts in fixed.items()
    }
    opening = pieces["assistant.before"]
    for role in spec.roles:
        other = pieces[f"{role}.before"]
        common = min(len(opening), len(other))
        # A turn without an opening is told from others by its position: see `template_spec`.
        if common and role != "assistant" and np.array_equal(other[:common], opening[:common]):
            raise TokenizerError(
                f"template {spec.name!r}: a turn of the {role} opens with {other.tolist()}, one of "
                f"the assistant with {opening.tolist()} in {tokenizer!r}: one is the beginning of "
                "the other, so text could make them look the same"
            )
    return TokenTemplate(
        spec=spec, markers=markers, pieces=pieces, encoder=tokenizer if encoder is None else encoder
    )


def with_encoder(template: ChatTemplate, encoder: Encoder) -> ChatTemplate:
    """The template with an encoder that gives the same ids for the words, such as a fast engine,
    which stays in its process. One that takes none is returned as it is."""
    if isinstance(template, CanEncode):
        return template.with_encoder(encoder)
    return template


@runtime_checkable
class CanEncode(Protocol):
    """A template whose texts any encoder with the same ids may encode."""

    def with_encoder(self, encoder: Encoder) -> ChatTemplate: ...


def _fixed_pieces(spec: TemplateSpec) -> dict[str, Fragments]:
    """Everything fixed by name, with adjacent texts joined."""
    named = {"begin": spec.begin, "no_reasoning": spec.no_reasoning, "calls.end": spec.call_end}
    named["tools.end"] = spec.tools_end
    for role, turn in spec.roles.items():
        named |= {f"{role}.before": turn.before, f"{role}.end": turn.end}
        named[f"{role}.after"] = turn.after
        if spec.shared_ends:
            named[f"{role}.opened"] = turn.before[1:]
    answer = spec.roles["assistant"].content
    named["assistant.content"] = answer.before if answer else ()
    if spec.default_system is not None:
        system = spec.roles["system"]
        around = system.content or Insert()
        words = (Text(spec.default_system),) if spec.default_system else ()
        inside = (*around.before, *words, *around.after)
        named["default_system"] = (*system.before, *inside, *system.end, *system.after)
    inserts = {name: getattr(spec, name) for name in INSERTS}
    if spec.join:
        inserts |= {f"{role}.content": turn.content for role, turn in spec.roles.items()}
        inserts |= {"preamble": spec.preamble, "argument": spec.argument}
        inner = [
            piece
            for one in inserts.values()
            if one is not None
            for part in fields(one)
            for piece in getattr(one, part.name)
        ]
        named |= {MARKER + piece.marker: (piece,) for piece in inner if isinstance(piece, Marker)}
    else:
        for name, one in inserts.items():
            if one is not None:
                named |= {f"{name}.{part.name}": getattr(one, part.name) for part in fields(one)}
    return {name: _joined(fragments) for name, fragments in named.items()}


def _joined(fragments: Fragments) -> Fragments:
    joined: list[Piece] = []
    for fragment in fragments:
        if joined and isinstance(fragment, Text) and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + fragment.text)
        else:
            joined.append(fragment)
    return tuple(joined)


def _find_markers(
    spec: TemplateSpec, fixed: Mapping[str, Fragments], tokenizer: Tokenizer
) -> dict[str, int]:
    specials = tokenizer.special_token_ids()
    by_string = getattr(tokenizer, "marker_id", None)
    found: dict[str, int] = {}
    for name, parts in fixed.items():
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
            other = next((one for one, taken in found.items() if taken == number), marker)
            if other != marker:
                raise TokenizerError(
                    f"template {spec.name!r}: {other!r} and {marker!r} are both id {number} of "
                    f"{tokenizer!r}; wanted different ids"
                )
            found[marker] = int(number)
    return found


def assemble(
    texts: Ragged,
    turns: Turns,
    pieces: Mapping[str, OffsetArray],
    trained_turn: BoolArray,
    *,
    train_ends: bool,
) -> tuple[IntArray, BoolArray, OffsetArray, OffsetArray]:
    """All encoded texts with the fixed tokens of their forms around them.

    Returns values and mask of all tokens; offsets, with text i and its fixed tokens at
    offsets[i]..offsets[i + 1]; and the number of trained tokens of each text.
    """
    trained = np.repeat(trained_turn, np.diff(turns.first_texts, append=len(texts)))
    # The forms in one table: form f is left_of[f] + right_of[f] tokens from starts[f] on. A role
    # that the template has no turns for has no pieces, and no text uses its form.
    sides = [[name for name in side if name in pieces] for form in turns.forms for side in form]
    names = [name for side in sides for name in side]
    ids = np.concatenate([pieces[name] for name in names])
    is_wanted = [
        name.partition(".")[0] in INSERTS
        or name.startswith(MARKER)
        or (train_ends and name.endswith(".end"))
        for name in names
    ]
    wanted = np.repeat(is_wanted, [len(pieces[name]) for name in names])
    widths = [sum(len(pieces[name]) for name in side) for side in sides]
    left_of, right_of = np.array(widths).reshape(-1, 2).T
    stops = np.cumsum(left_of + right_of)
    starts = stops - left_of - right_of
    wanted_before = np.concatenate(([0], np.cumsum(wanted)))
    num_wanted = wanted_before[stops] - wanted_before[starts]

    sizes, left, right = texts.lengths, left_of[turns.form_of], right_of[turns.form_of]
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(left + sizes + right, out=offsets[1:])
    # Fixed tokens left of a text, the text, fixed tokens right of it:  . . x x x . | . . x x .
    flags = np.zeros((len(texts), 3), np.bool_)
    flags[:, 1] = trained
    lengths = np.stack((left, sizes, right), axis=1).reshape(-1)
    mask: BoolArray = np.repeat(flags.reshape(-1), lengths)
    # For every fixed token, in order: its position in the table, and in the result. Those right of
    # a text come after it, so as many positions further as it is long.
    before = np.cumsum(left + right) - left - right
    in_table: OffsetArray = np.repeat(starts[turns.form_of] - before, left + right)
    count = np.arange(len(in_table))
    in_table += count
    shifts = np.stack((offsets[:-1] - before, offsets[:-1] + sizes - before), axis=1)
    sided = np.stack((left, right), axis=1)
    in_result: OffsetArray = np.repeat(shifts.reshape(-1), sided.reshape(-1))
    in_result += count

    is_text = np.ones(len(mask), np.bool_)
    is_text[in_result] = False
    dtype = np.result_type(texts.values.dtype, np.min_scalar_type(int(ids.max(initial=0))))
    values: IntArray = np.empty(len(mask), dtype)
    values[is_text] = texts.values
    values[in_result] = ids.astype(dtype)[in_table]
    mask[in_result] = wanted[in_table] & np.repeat(trained, left + right)
    return values, mask, offsets, trained * (sizes + num_wanted[turns.form_of])
