"""Templates made of tokens: conversations to ids and loss mask.

Each turn is its role's opening, its words exactly as the encoder gives them (each text encoded on
its own) and its end; nothing else is added. Structure comes from the template alone: every marker
is exactly one special id of the tokenizer, and a conversation whose text encodes to a marker is
dropped. Every word of a conversation appears in its turns, or the conversation is dropped with a
reason.

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
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardmill.chat.policy import (
    ASSISTANT,
    ROLE_NAMES,
    SYSTEM,
    USER,
    ChatTemplate,
    CheckedMessage,
    Dropped,
    Rendered,
    TrainPolicy,
    check_messages,
    check_tools,
    has_bytes,
    special_in_text,
    trained_messages,
    trained_turns,
)
from shardmill.chat.template_spec import INSERTS, Fragments, Marker, TemplateSpec, Text
from shardmill.errors import TokenizerError
from shardmill.protocols import Encoder, Tokenizer
from shardmill.records import (
    JSON,
    ROLES,
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

Names: TypeAlias = tuple[str, ...]
"""Names of fixed pieces: "begin", "user.before", "tool_call.after", ..."""
Form: TypeAlias = tuple[Names, Names]
"""The fixed pieces left and right of a text."""

PLAIN_FORMS: list[Form] = [
    ((*begin, f"{role}.before"), (f"{role}.end", f"{role}.after"))
    for begin in ((), ("begin",))
    for role in ROLES
]
"""The form of a turn that is one text: by role, then by role for the first of a conversation."""


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
        starts[turns.bounds[:-1]] += len(self.pieces["begin"])  # not part of the first turn
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
    ids_of: dict[Marker | Text, IntArray] = {
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
        if role != "assistant" and np.array_equal(other[:common], opening[:common]):
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
    named = {"begin": spec.begin}
    surroundings = {**spec.roles, **{name: getattr(spec, name) for name in INSERTS}}
    for name, one in surroundings.items():
        if one is not None:
            named |= {f"{name}.{part.name}": getattr(one, part.name) for part in fields(one)}
    return {name: _joined(fragments) for name, fragments in named.items()}


def _joined(fragments: Fragments) -> Fragments:
    joined: list[Marker | Text] = []
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


class PlacedText(NamedTuple):
    """One text of a turn, and the fixed pieces around it."""

    text: str
    left: Names
    right: Names


def lay_out(
    conversation: Conversation, spec: TemplateSpec, policy: TrainPolicy
) -> list[tuple[CheckedMessage, list[PlacedText]]]:
    """The turns of a conversation, each with at least one text; Dropped if it cannot be written."""
    messages = check_messages(conversation.messages)
    tools = check_tools(conversation.tools)
    for message in messages:
        _check_support(message, tools, spec)
    untrimmed = messages
    if spec.trim:
        messages = [
            replace(m, text=m.text and m.text.strip(), reasoning=m.reasoning.strip())
            for m in messages
        ]
    if spec.fold_system is not None and any(m.role == SYSTEM for m in messages):
        # The system message becomes the beginning of the user turn after it, untrimmed.
        roles = [m.role for m in messages]
        if SYSTEM in roles[1:] or roles[:2] != [SYSTEM, USER]:
            raise Dropped("system_not_first")
        trained = trained_messages(messages, policy)
        if trained[0] != trained[1]:
            raise Dropped("mixed_train")
        text = f"{untrimmed[0].text}{spec.fold_system}{messages[1].text}"
        messages = [CheckedMessage(USER, text, train=bool(trained[0])), *messages[2:]]
    if tools and messages[0].role != SYSTEM:
        messages = [CheckedMessage(SYSTEM, ""), *messages]  # tools are in the system turn
    return [
        (message, _turn_texts(message, () if number else tools, first=not number))
        for number, message in enumerate(messages)
    ]


def _check_support(message: CheckedMessage, tools: Sequence[str], spec: TemplateSpec) -> None:
    role = ROLES[message.role]
    if role == "system" and role not in spec.roles and spec.fold_system is None:
        raise Dropped("no_place_for_system")
    if role == "tool" and role not in spec.roles:
        raise Dropped("no_place_for_tool_results")
    if message.calls and spec.tool_call is None:
        raise Dropped("no_place_for_tool_calls")
    if message.reasoning and spec.reasoning is None:
        raise Dropped("no_place_for_reasoning")
    if tools and spec.tools is None:
        raise Dropped("no_place_for_tools")


def _turn_texts(message: CheckedMessage, tools: Sequence[str], *, first: bool) -> list[PlacedText]:
    """The texts of one turn in order: reasoning, words, calls, tools."""
    words = message.text
    opening, ending = PLAIN_FORMS[message.role + len(ROLES) * first]
    if words is not None and not (message.reasoning or message.calls or tools):
        return [PlacedText(words, opening, ending)]
    inside: list[tuple[str, Names, Names]] = []
    if message.reasoning:
        inside.append((message.reasoning, ("reasoning.before",), ("reasoning.after",)))
    if words is not None:
        inside.append((words, (), ()))
    preceded = bool(words)  # `between` is written only if something of the turn precedes it
    inserts = [("tool_call", call) for call in message.calls]
    inserts += [("tools", "\n".join(tools))] if tools else []
    for name, text in inserts:
        between = (f"{name}.between",) if preceded else ()
        inside.append((text, (*between, f"{name}.before"), (f"{name}.after",)))
        preceded = True
    last = len(inside) - 1
    return [
        PlacedText(text, left if at else opening + left, right + ending if at == last else right)
        for at, (text, left, right) in enumerate(inside)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The turns of many conversations as columns, without those that were dropped."""

    texts: list[str]
    roles: npt.NDArray[np.uint8]  # (turns,) positions in ROLES
    flags: list[tuple[int, bool]]  # (turn, its own "train"), for the few that have one
    bounds: OffsetArray  # (conversations + 1,) conversation c is turns bounds[c]..bounds[c + 1]
    first_texts: OffsetArray  # (turns,) the text that each turn starts with
    text_bounds: OffsetArray  # (conversations + 1,) the same bounds, counted in texts
    forms: list[Form]
    form_of: IntArray  # (texts,) positions in `forms`
    kept: list[int]  # (conversations,) position of each in the input
    dropped: list[tuple[int, str]]  # (position in the input, reason)


def collect_turns(
    conversations: Sequence[Conversation], spec: TemplateSpec, policy: TrainPolicy
) -> Turns:
    """The turns of all conversations that the template can write, and reasons for the others."""
    # Usual spellings of the roles that have turns of their own.
    codes = {
        spelling: ROLES.index(role)
        for name, role in ROLE_NAMES.items()
        if role in spec.roles
        for spelling in (name, name.title(), name.upper())
    }
    forms = list(PLAIN_FORMS)
    numbers = {form: number for number, form in enumerate(forms)}
    texts: list[str] = []
    roles, stops, kept = bytearray(), [0], list[int]()  # stops: of the turns of each conversation
    dropped, flags = list[tuple[int, str]](), list[tuple[int, bool]]()
    continued: list[int] = []  # texts that do not start a turn
    other_forms: list[tuple[int, int]] = []  # (text, form) where the form is not the plain one
    trim = spec.trim
    for position, conversation in enumerate(conversations):
        texts_before = len(texts)
        messages = conversation.messages
        for message in messages if type(messages) is list and not conversation.tools else ():
            if type(message) is not dict or len(message) != 2:
                break
            try:
                text, role = message["content"], codes[message["role"]]
            except (KeyError, TypeError):
                break
            if type(text) is not str or not (text.isascii() or has_bytes(text)):
                break
            texts.append(text.strip() if trim else text)
            roles.append(role)
        else:
            if len(roles) > stops[-1]:
                kept.append(position)
                stops.append(len(roles))
                continue
        del texts[texts_before:], roles[stops[-1] :]
        try:
            laid = lay_out(conversation, spec, policy)
        except Dropped as why:
            dropped.append((position, str(why)))
            continue
        for checked, placed in laid:
            if checked.train is not None:
                flags.append((len(roles), checked.train))
            roles.append(checked.role)
            continued.extend(range(len(texts) + 1, len(texts) + len(placed)))
            for text, left, right in placed:
                number = numbers.setdefault((left, right), len(forms))
                if number == len(forms):
                    forms.append((left, right))
                other_forms.append((len(texts), number))
                texts.append(text)
        kept.append(position)
        stops.append(len(roles))
    bounds = np.array(stops)
    turn_roles = np.frombuffer(bytes(roles), np.uint8)
    first_texts = np.delete(np.arange(len(texts)), continued)
    form_of: IntArray = np.zeros(len(texts), np.intp)
    form_of[first_texts] = turn_roles
    form_of[first_texts[bounds[:-1]]] += len(ROLES)
    at, found = np.array(other_forms, np.intp).reshape(-1, 2).T
    form_of[at] = found
    return Turns(
        texts=texts,
        roles=turn_roles,
        flags=flags,
        bounds=bounds,
        first_texts=first_texts,
        text_bounds=np.append(first_texts, len(texts))[bounds],
        forms=forms,
        form_of=form_of,
        kept=kept,
        dropped=dropped,
    )


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
        name.partition(".")[0] in INSERTS or (train_ends and name.endswith(".end"))
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
