"""A Jinja template as a `ChatTemplate`: ids, turns and loss mask of each conversation, with proof.

The first conversation of a shape is written by the template itself, on values that record what
becomes of them (`values.py`). What was asked and written is compiled to Python: further
conversations for which all answers are the same are written by that, without the template, and
encoded in batches by any engine. A compiled form is used only if

- a blind rendering, which cannot see the texts, writes and asks the same;
- its ids are those of `apply_chat_template` for the conversation it was learnt from, and for one of
  `_WATCHED` later ones, chosen by their text;
- the tokenizer encodes the text between special tokens by itself.

Otherwise every conversation of that shape is written by the template. Either way an answer starts
where its generation prompt ends, token for token, is whole, and ends with the first run of special
tokens after its words that closes turns, trained with it unless `train_on_eot` is off. With
`{% generation %}` blocks the template itself says what is trained. What cannot be shown to be right
is dropped with a reason. TracedText that would become a special token is never rendered.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shardmill.chat.jinja.engine import (
    JinjaEngine,
    JinjaTokenizer,
    Messages,
    TemplateFacts,
    Tools,
    as_messages,
    find_facts,
    is_own_refusal,
)
from shardmill.chat.jinja.forms import (
    Form,
    Learnt,
    Neighbours,
    Texts,
    TokensMerge,
    assemble,
    cut_texts,
    dropped_form,
    encodes_apart,
    make_form,
    make_whole_form,
    neighbours,
)
from shardmill.chat.jinja.layout import Layout, Rules, Talk, Written, lay_out
from shardmill.chat.jinja.openings import Openings
from shardmill.chat.jinja.values import MAX_ASKED, Trace, TracedText, shape_of, source_of
from shardmill.chat.policy import (
    ASSISTANT,
    CheckedMessage,
    Dropped,
    Rendered,
    TrainPolicy,
    check_messages,
    check_tools,
    has_bytes,
    special_in_text,
    trained_messages,
)
from shardmill.errors import OptionError, TemplateError
from shardmill.protocols import Encoder
from shardmill.records import (
    JSON,
    ROLES,
    BoolArray,
    ChatExamples,
    Conversation,
    Drop,
    IntArray,
    Ragged,
)

_RULES = 2  # increased when the same template would give other ids or another mask
_WATCHED = 512  # one of so many conversations is also written by transformers: 1 ms each
_MAX_FORMS, _MAX_FORMS_OF_A_SHAPE = 4096, 32  # kept; where every text has its own, none helps
_PLAIN_KEYS = ["role", "content"]
_MAX_SOURCES = 2**25  # characters of the sources of all kept forms; compiled, about 10 bytes each


class _Written(NamedTuple):
    """How a conversation is written."""

    form: Form
    texts: Texts
    ids: list[IntArray] | None = None  # of the texts, if transformers encoded them already


@dataclass(slots=True)
class _Waiting:
    """Conversations whose texts are to be encoded."""

    at: list[int] = field(default_factory=list)  # positions in the input
    forms: list[Form] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ids: list[IntArray] = field(default_factory=list)  # of the texts, where they are known
    num_texts: list[int] = field(default_factory=list)

    def add(self, at: int, written: _Written) -> None:
        self.at.append(at)
        self.forms.append(written.form)
        self.texts += written.texts
        self.ids += written.ids or ()
        self.num_texts.append(len(written.texts))


class _Reading(NamedTuple):
    """One rendering of a whole conversation; nothing is written if the template refuses it."""

    trace: Trace
    whole: Written | None
    is_recorded: bool = True  # as in `_LaidOut`

    def key(self) -> object:
        """What it asked and wrote, with sources in place of texts."""
        if self.whole is None:
            return tuple(self.trace.guards), None
        pieces, marks, edges = self.whole
        sources = [one._source if type(one) is TracedText else f"'{one}" for one in pieces]
        return tuple(self.trace.guards), tuple(sources), tuple(marks), tuple(edges)


class _LaidOut(NamedTuple):
    """What one reading of a conversation gave: where everything is, or why it is dropped."""

    trace: Trace
    found: Layout | str
    is_recorded: bool = True  # whether all that follow the same answers are alike

    def sources(self) -> object:
        if isinstance(self.found, str):
            return self.found
        layout = self.found
        items = [
            i if isinstance(i, int) else tuple(map(source_of, i.fragments)) for i in layout.items
        ]
        ends = [*layout.turn_starts, *(end for span in layout.trained for end in span)]
        return items, [(one.item, tuple(map(source_of, one.prefix))) for one in ends]


class KeptForms(dict[object, list[Form]]):
    """Forms by the shape of conversations. They are functions, so another process starts anew."""

    def __init__(self) -> None:
        self.count = self.size = 0  # forms, and characters of their sources
        self.apart: dict[Neighbours, bool] = {}  # whether texts between these are encoded apart

    def has_room(self, shape: object) -> bool:
        return self.count < _MAX_FORMS and len(self.get(shape, ())) < _MAX_FORMS_OF_A_SHAPE

    def keep(self, shape: object, form: Form, size: int) -> bool:
        """Whether there was room for it."""
        if not self.has_room(shape) or self.size + size > _MAX_SOURCES:
            return False
        self.setdefault(shape, []).append(form)
        self.count += 1
        self.size += size
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptForms, ()


class _Proofs(dict[object, Form]):
    """Forms by what a rendering wrote and asked, for conversations beyond the kept forms: such a
    conversation is rendered and compared each time, and only its layout is not proved again."""

    def has_room(self) -> bool:
        return len(self) < _MAX_FORMS

    def keep(self, key: object, form: Form) -> None:
        if self.has_room():
            self[key] = form

    def __reduce__(self) -> tuple[Any, ...]:
        return _Proofs, ()


@dataclass(frozen=True, kw_only=True, eq=False)
class JinjaTemplate:
    """One Jinja template, bound to one tokenizer, with which it pickles if that can be pickled, as
    those of transformers can. Made by `open_jinja_template`."""

    name: str
    engine: JinjaEngine
    facts: TemplateFacts
    encoder: Encoder
    forms: KeptForms = field(default_factory=KeptForms)
    proofs: _Proofs = field(default_factory=_Proofs)

    @property
    def marker_ids(self) -> frozenset[int]:
        return frozenset(self.facts.markers.values())

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The special tokens that end an assistant's turn and are trained with it."""
        return self.facts.closing

    @cached_property
    def _is_marker(self) -> BoolArray:
        """(ids,) whether an id is a marker; the last one stands for all larger ids."""
        found = np.zeros(max(self.marker_ids, default=0) + 2, np.bool_)
        found[list(self.marker_ids)] = True
        return found

    @cached_property
    def _openings(self) -> Openings | None:
        """None with a fast engine, for which an opening is nothing."""
        is_fast = getattr(self.encoder, "is_fast", False)
        return None if is_fast else Openings(self.encoder.encode_batch, self.engine.tokenizer)

    def _encode(self, texts: Sequence[str]) -> Ragged:
        """The ids of texts between special tokens."""
        return (self._openings or self.encoder).encode_batch(texts)

    def with_encoder(self, encoder: Encoder) -> JinjaTemplate:
        return replace(self, encoder=encoder, forms=KeptForms(), proofs=_Proofs())

    def describe(self) -> dict[str, JSON]:
        engine = self.engine
        deciding: dict[str, JSON] = {
            "kind": "jinja",
            "rules": _RULES,
            "source": engine.source,
            "variables": engine.variables,
        }
        more: dict[str, JSON] = {}
        if engine.now is not None:
            more["date"] = engine.now.isoformat()
        if engine.any_prompt:
            more["any_prompt"] = True
        deciding |= more
        found: dict[str, JSON] = {
            "kind": "jinja",
            "name": self.name,
            "sha256": _sha256(json.dumps(deciding, sort_keys=True)),
            "source_sha256": _sha256(engine.source),
            "generation_blocks": engine.has_blocks,
            "variables": dict(engine.variables),
            "end_ids": list[JSON](self.end_ids),
            "call_arguments": self.facts.arguments,
            "source": engine.source,
            **more,
        }
        library = type(engine.tokenizer).__module__.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", None)
        return {**found, library: version} if isinstance(version, str) else found

    def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
        reasons: dict[int, str] = {}
        apart, whole, known = _Waiting(), _Waiting(), _Waiting()
        for position, conversation in enumerate(conversations):
            try:
                written = self._written(conversation, policy)
            except Dropped as why:
                reasons[position] = str(why)
                continue
            waiting = whole if written.form.is_whole else apart
            (waiting if written.ids is None else known).add(position, written)
        parts = [
            self._assembled(waiting, encode, reasons)
            for waiting, encode in (
                (apart, self._encode),
                (whole, self.engine.encode_batch),
                (known, lambda _: Ragged.from_sequences(known.ids)),
            )
            if waiting.at
        ]
        kept = np.concatenate([np.empty(0, np.int64), *(at for at, _ in parts)])
        examples = ChatExamples.concatenate([part for _, part in parts])
        if len(parts) > 1:
            order = np.argsort(kept)
            examples, kept = examples.take(order), kept[order]
        return Rendered(
            examples=examples,
            kept=kept,
            drops=tuple(
                Drop(id=conversations[at].id, reason=reason, row=conversations[at].row)
                for at, reason in sorted(reasons.items())
            ),
        )

    def _assembled(
        self,
        waiting: _Waiting,
        encode: Callable[[Sequence[str]], Ragged],
        reasons: dict[int, str],
    ) -> tuple[IntArray, ChatExamples]:
        """The examples, and the positions of their conversations."""
        encoded = encode(waiting.texts)
        made = assemble(waiting.forms, encoded, waiting.num_texts)
        usable = ~made.merges & (made.num_trained > 0)
        if waiting.forms[0].is_whole:
            markers = np.array(sorted(self.marker_ids), np.int64)
            for number, form in enumerate(waiting.forms):
                ids = made.examples.ids[number]
                if not np.array_equal(ids[np.isin(ids, markers)], form.markers):
                    reasons[waiting.at[number]] = "special_in_text"
                    usable[number] = False
        else:
            # The literals of markers were looked for; a tokenizer may know other spellings.
            evil = special_in_text(encoded, self.marker_ids)
            for number in np.repeat(np.arange(len(waiting.at)), waiting.num_texts)[evil].tolist():
                reasons[waiting.at[number]] = "special_in_text"
                usable[number] = False
        for number in np.flatnonzero(~usable).tolist():
            reason = "tokens_merge" if made.merges[number] else "nothing_trained"
            reasons.setdefault(waiting.at[number], reason)
        return np.array(waiting.at, np.int64)[usable], made.examples.keep(usable)

    def _written(self, conversation: Conversation, policy: TrainPolicy) -> _Written:
        """How a conversation is written; Dropped if it cannot be shown."""
        messages, tools = conversation.messages, conversation.tools or None
        if tools is not None:
            sound = check_tools(tools)
            if type(tools) is not list or any(type(tool) is not dict for tool in tools):
                tools = list(map(json.loads, sound))
        roles = _plain_roles(messages)
        if roles is not None:
            shape: object = (policy, tools is None, *roles)
            checked = None
        else:
            messages, checked = self._checked(messages)
            flags = tuple(message.train for message in checked)
            shape = (policy, flags, shape_of(messages, tools))
        for form in self.forms.get(shape, ()):
            texts = _texts_of(form, messages, tools)
            if texts is not None:
                written = _Written(form, texts)
                break
        else:
            written = self._learn(messages, tools, checked, policy, shape)
        form, texts, ids = written
        if form.reason is not None:
            raise Dropped(form.reason)
        if checked is not None and not all(map(has_bytes, texts)):
            raise Dropped("invalid_unicode")
        if self._holds_markers(form, texts):
            raise Dropped("special_in_text")
        if ids is None and texts and zlib.crc32(texts[-1].encode()) % _WATCHED == 0:
            self._watch(messages, tools, form, texts)
        return written

    def _holds_markers(self, form: Form, texts: Texts) -> bool:
        """Whether a text would become a marker."""
        if form.is_whole:
            return len(self.facts.literals.findall(texts[0])) != len(form.markers)
        return self.facts.literals.search("\0".join(texts)) is not None

    def _watch(self, messages: Messages, tools: Tools, form: Form, texts: Texts) -> None:
        """Compare with transformers."""
        try:
            wanted = self.engine.of_transformers(messages, tools)
        except TemplateError as problem:
            raise TemplateError(
                f"chat template {self.name!r}: transformers refuses a conversation that was "
                f"written here: {problem}"
            ) from problem
        if not np.array_equal(self._ids(form, texts), wanted):
            raise TemplateError(
                f"chat template {self.name!r}: the compiled form of a conversation of "
                f"{len(messages)} messages differs from apply_chat_template; nothing that was made "
                "with it can be trusted. Please report this template, and build with a template "
                "made of tokens until it is fixed"
            )

    def _ids(self, form: Form, texts: Texts) -> IntArray:
        encode = self.engine.encode_batch if form.is_whole else self._encode
        return assemble([form], encode(texts), [len(texts)]).examples.ids[0]

    def _checked(self, messages: Messages) -> tuple[Messages, list[CheckedMessage]]:
        """The messages as templates want them, and what was checked of them."""
        checked = check_messages(messages)
        if self.facts.arguments == "none" and any(message.calls for message in checked):
            raise Dropped("no_place_for_tool_calls")
        return as_messages(messages, checked, self.facts.arguments), checked

    def _learn(
        self,
        messages: Messages,
        tools: Tools,
        checked: Sequence[CheckedMessage] | None,
        policy: TrainPolicy,
        shape: object,
    ) -> _Written:
        """Let the template write a conversation, and keep how it did that."""
        reading = self._read(messages, tools)
        key = (shape, reading.key())
        earlier = self.proofs.get(key)
        if earlier is not None:
            proved = self._proved(earlier, messages, tools)
            if proved is not None:
                return proved
        checked = checked or check_messages(messages)
        trained = trained_messages(checked, policy)
        if not trained.any():
            said = any(message.role == ASSISTANT for message in checked)
            raise Dropped("nothing_trained" if said else "no_assistant")
        needs_blind = self.forms.has_room(shape) or self.proofs.has_room()
        is_known = reading.trace.size < MAX_ASKED and key not in self.proofs and needs_blind
        seen = self._lay_out(reading, messages, tools, checked, trained, policy)
        if is_known:
            reading = self._read(messages, tools, blind=True)
            blind = self._lay_out(reading, messages, tools, checked, trained, policy)
            is_known = seen.trace.size < MAX_ASKED
            is_known = is_known and seen.trace.guards == blind.trace.guards
            is_known = is_known and seen.sources() == blind.sources() and seen.is_recorded
        learnt = self._form(seen, messages, tools, is_known=is_known)
        if is_known:
            self._keep(learnt, seen.trace, messages, tools, shape, key)
        return _Written(learnt.form, learnt.said())

    def _proved(self, form: Form, messages: Messages, tools: Tools) -> _Written | None:
        """A conversation that the template wrote like the one of this form: its ids are those of
        transformers. None if it asks or encodes something else after all."""
        texts = _texts_of(form, messages, tools)
        if texts is None or form.reason is not None:
            return None if texts is None else _Written(form, texts)
        try:
            wanted = self.engine.of_transformers(messages, tools)
        except TemplateError:
            return None
        if form.is_whole or not self.engine.encodes_apart:
            return _Written(form, texts) if np.array_equal(self._ids(form, texts), wanted) else None
        ids = cut_texts(form, wanted, self._is_marker[np.minimum(wanted, len(self._is_marker) - 1)])
        if ids is None:
            return None
        return _Written(form, texts, [*ids, *self.encoder.encode_batch(texts[form.num_texts :])])

    def _read(self, messages: Messages, tools: Tools, *, blind: bool = False) -> _Reading:
        trace = Trace(blind=blind)
        try:
            return _Reading(trace, self.engine.written(trace, messages, tools))
        except TemplateError as problem:
            return _Reading(trace, None, is_own_refusal(problem))

    def _keep(
        self,
        learnt: Learnt,
        trace: Trace,
        messages: Messages,
        tools: Tools,
        shape: object,
        key: object,
    ) -> None:
        """Use the form for later conversations, if there is room."""
        found = learnt.compiled(trace.guards)
        if found is None:
            return
        form, size = found
        assert form.write(messages, tools) == learnt.said(), "a form writes what it was learnt from"
        if not self.forms.keep(shape, form, size):
            self.proofs.keep(key, form)

    def _form(self, laid: _LaidOut, messages: Messages, tools: Tools, *, is_known: bool) -> Learnt:
        """How the conversation is written; Dropped if transformers writes it in another way."""
        if isinstance(laid.found, str):
            return dropped_form(laid.found)
        try:
            apart = make_form(laid.found, self.encoder.encode_batch)
        except TokensMerge:
            return dropped_form("tokens_merge")
        texts = apart.said()
        if not all(map(has_bytes, texts)):
            raise Dropped("invalid_unicode")
        if self._holds_markers(apart.form, texts):
            raise Dropped("special_in_text")
        try:
            wanted = self.engine.of_transformers(messages, tools)
        except TemplateError:
            raise Dropped("not_reproduced") from None
        is_apart = np.array_equal(self._ids(apart.form, texts), wanted)
        if is_apart and (not is_known or self._encodes_apart(laid.found)):
            return apart
        whole = make_whole_form(laid.found)
        texts = whole.said()
        if self._holds_markers(whole.form, texts):
            raise Dropped("special_in_text")
        if not np.array_equal(self._ids(whole.form, texts), wanted):
            raise Dropped("not_reproduced")
        return whole

    def _encodes_apart(self, layout: Layout) -> bool:
        """Whether the tokenizer encodes every text of such conversations by itself."""
        if self.facts.overlaps:
            return False
        proved = self.forms.apart
        for around in neighbours(layout):
            if around not in proved:
                proved[around] = encodes_apart(
                    around,
                    self.facts.markers,
                    self.engine.encode_batch,
                    self.encoder.encode_batch,
                )
            if not proved[around]:
                return False
        if self._openings is not None:
            for around in neighbours(layout):
                self._openings.add(around.start)
        return True

    def _lay_out(
        self,
        reading: _Reading,
        messages: Messages,
        tools: Tools,
        checked: Sequence[CheckedMessage],
        trained: BoolArray,
        policy: TrainPolicy,
    ) -> _LaidOut:
        facts, (trace, whole, is_recorded) = self.facts, reading
        if whole is None:
            return _LaidOut(trace, "template_refuses", is_recorded)

        def write(count: int, prompt: bool) -> Written:
            return self.engine.written(trace, messages[:count], tools, prompt=prompt)

        rules = Rules(
            bos=facts.bos,
            opening=facts.opening,
            literals=facts.literals,
            markers=facts.markers,
            end_ids=facts.end_ids,
            closing=frozenset(facts.closing),
            has_blocks=self.engine.has_blocks,
            any_prompt=self.engine.any_prompt,
            train_ends=policy.train_on_eot,
        )
        talk = Talk(
            trace=trace,
            whole=whole,
            write=write,
            messages=messages,
            checked=checked,
            num_tools=len(tools or ()),
            trained=trained,
        )
        try:
            return _LaidOut(trace, lay_out(talk, rules))
        except Dropped as why:
            return _LaidOut(trace, str(why))
        except TemplateError as problem:
            # What the template itself refuses, it refused for what it asked; a text that is too
            # long, or a value that JSON cannot hold, was not asked about.
            return _LaidOut(trace, "template_refuses", is_own_refusal(problem))

    def draft(self, conversation: Conversation) -> tuple[IntArray, BoolArray | None]:
        """What the template makes of a conversation, with nothing proved. To show why one was
        dropped, never to train."""
        checked = check_messages(conversation.messages)
        messages = as_messages(conversation.messages, checked, self.facts.arguments)
        self.engine.text(messages, conversation.tools)  # that of transformers has no budget
        return self.engine.of_transformers(messages, conversation.tools), None

    def __repr__(self) -> str:
        how = "generation blocks" if self.engine.has_blocks else "turn by turn"
        return f"JinjaTemplate({self.name!r}, {how})"


def _plain_roles(messages: object) -> list[str] | None:
    """The roles of messages that are all a role and then a sound text, as nearly all are; else
    None. A template can see the order of keys."""
    if type(messages) is not list:
        return None
    roles: list[str] = []
    for message in messages:
        if type(message) is not dict or [*message] != _PLAIN_KEYS:
            return None
        role, text = message.values()
        if type(role) is not str or role not in ROLES or type(text) is not str:
            return None
        if not (text.isascii() or has_bytes(text)):
            return None
        roles.append(role)
    return roles or None


def _texts_of(form: Form, messages: Messages, tools: Tools) -> Texts | None:
    """None if an answer differs, or a question cannot be asked here."""
    try:
        return form.write(messages, tools)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def open_jinja_template(
    tokenizer: JinjaTokenizer,
    *,
    chat_template: str | None = None,
    name: str | None = None,
    variables: Mapping[str, JSON] | None = None,
    now: datetime | None = None,
    encoder: Encoder | None = None,
    any_prompt: bool = False,
) -> JinjaTemplate:
    """The tokenizer's own chat template, or the one given, ready to render.

    chat_template: Jinja source, or the name of one of several templates the tokenizer carries.
    variables: what the template may read besides messages and tools, such as a date or
    enable_thinking; stored with the template, since it changes tokens.
    now: the date for templates that ask for it with `strftime_now`; stored, too.
    encoder: gives the ids of text between special tokens; without one, the tokenizer does.
    any_prompt: an answer need not follow the generation prompt; it is trained from where the
    template writes something else. For templates that prompt for reasoning and never write it.
    """
    given = dict(variables or {})
    try:
        json.dumps(given)
    except (TypeError, ValueError) as problem:
        raise OptionError(
            f"{{variables}}: wanted plain JSON values: {problem}", variables=given
        ) from problem
    if not hasattr(tokenizer, "apply_chat_template"):
        raise TemplateError(
            f"{type(tokenizer).__name__} cannot render Jinja templates; pass a tokenizer of "
            "transformers, such as AutoTokenizer.from_pretrained(...), or a template made of tokens"
        )
    source = _source(tokenizer, chat_template)
    engine = JinjaEngine(tokenizer, source, given, now=now, any_prompt=any_prompt)
    label = name or f"jinja-{_sha256(source)[:12]}"
    try:
        facts = find_facts(engine)
    except TemplateError as problem:
        raise TemplateError(f"chat template {label!r}: {{problem}}", problem=problem) from problem
    return JinjaTemplate(name=label, engine=engine, facts=facts, encoder=encoder or engine)


def _source(tokenizer: Any, chat_template: str | None) -> str:
    own = getattr(tokenizer, "chat_template", None)
    named = own if isinstance(own, Mapping) else {}
    found = chat_template if chat_template is not None else named.get("default", own)
    found = named.get(found, found) if isinstance(found, str) else found
    if isinstance(found, str) and found.strip():
        return found
    has = f"templates called {sorted(named)}" if named else "no chat template"
    raise TemplateError(
        f"{type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')!r} has {has}: pass "
        "{chat_template}, a Jinja text, or use a template made of tokens",
        chat_template=...,
    )
