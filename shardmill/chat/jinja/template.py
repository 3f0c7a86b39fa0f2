"""A Jinja template as a `ChatTemplate`.

Ids are those of `apply_chat_template`, called once for the whole conversation. The mask comes from
the template's `{% generation %}` blocks or, if it has none, from rendering turn by turn. Either way
each conversation carries its own proof: every rendering of its first messages, and every generation
prompt in it, is a prefix of the whole in ids. What cannot be proved is dropped with a reason. Text
that would become a special token is never rendered.

A template that loops for ever cannot be stopped; render templates that you do not trust in a
process of their own. Render one conversation at a time per template: the generation tracker of
transformers is not thread-safe.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardmill.chat.jinja.engine import JinjaEngine, JinjaTokenizer
from shardmill.chat.jinja.facts import ANSWER, QUESTION, TemplateFacts, find_facts
from shardmill.chat.jinja.renderings import Renderings, as_messages, render_all
from shardmill.chat.jinja.turns import (
    Encoded,
    TurnSpans,
    encode_apart,
    encode_whole,
    find_turns,
    mask_of,
)
from shardmill.chat.messages import check_messages, reason_to_drop, trained_messages
from shardmill.chat.policy import Rendered, TrainPolicy, check_policy
from shardmill.errors import OptionError, TemplateError
from shardmill.records import JSON, BoolArray, ChatExamples, Conversation, Drop, IntArray, Ragged

JINJA_REASONS = {
    "template_refuses": "the template raised an error on this conversation, or wrote far too much",
    "prefix_changes": "the template writes earlier turns differently when later ones follow",
    "prompt_changes": "the answer does not follow the template's own generation prompt",
    "tokens_merge": "one token spans the border of two turns, or of a prompt and its answer",
    "content_changed": "the template wrote something other than the message says",
    "mask_disagrees": "the generation blocks do not hold all of the assistant's words",
    "trains_others": "the generation blocks hold more than the assistant's words and their end",
    "no_end": "the turn has no special token at its end, so its end cannot be left untrained",
    "mixed_train": "messages that the template writes as one turn, one trained and one not",
}
"""Reason codes in addition to those of messages.py -> sentence."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_RULES = 1  # increased when the same template would give other ids or another mask
_CHARACTERS_PER_CALL = 2**22  # encoded at once

Example = tuple[TurnSpans, BoolArray]
"""One kept conversation and its mask."""


class JinjaTemplate:
    """One Jinja template, bound to one tokenizer. Made by `open_jinja_template`."""

    def __init__(
        self, engine: JinjaEngine, facts: TemplateFacts, name: str, variables: Mapping[str, JSON]
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._name = name
        self._variables = dict(variables)
        self._has_blocks = _GENERATION.search(engine.source) is not None

    @property
    def name(self) -> str:
        return self._name

    @property
    def marker_ids(self) -> frozenset[int]:
        return self._facts.marker_ids

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The special tokens that end an assistant's turn and are trained with it."""
        return self._facts.closing

    def describe(self) -> dict[str, JSON]:
        deciding: dict[str, JSON] = {
            "kind": "jinja",
            "rules": _RULES,
            "source": self._engine.source,
            "variables": self._variables,
        }
        found: dict[str, JSON] = {
            "kind": "jinja",
            "name": self._name,
            "sha256": _sha256(json.dumps(deciding, sort_keys=True)),
            "source_sha256": _sha256(self._engine.source),
            "generation_blocks": self._has_blocks,
            "variables": dict(self._variables),
            "end_ids": list[JSON](self.end_ids),
            "call_arguments": self._facts.arguments,
        }
        library = type(self._engine.tokenizer).__module__.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", None)
        return {**found, library: version} if isinstance(version, str) else found

    def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
        check_policy(policy)
        results: list[Example | str] = []
        group: list[Renderings | str] = []
        size = 0
        for conversation in conversations:
            found = self._write(conversation, policy)
            group.append(found)
            size += 0 if isinstance(found, str) else sum(map(len, found.texts()))
            if size > _CHARACTERS_PER_CALL:
                results += self._prove_group(group, policy)
                group, size = [], 0
        results += self._prove_group(group, policy)
        return Rendered(
            examples=_joined([result for result in results if not isinstance(result, str)]),
            kept=np.flatnonzero([not isinstance(result, str) for result in results]),
            drops=tuple(
                Drop(id=conversation.id, reason=result)
                for conversation, result in zip(conversations, results, strict=True)
                if isinstance(result, str)
            ),
        )

    def _write(self, conversation: Conversation, policy: TrainPolicy) -> Renderings | str:
        checked = check_messages(conversation.messages)
        if isinstance(checked, str):
            return checked
        trained = trained_messages(checked, policy)
        if not trained.any():
            return str(reason_to_drop(conversation.messages, policy))
        return render_all(self._engine, self._facts, conversation, checked, trained)

    def _prove_group(
        self, group: list[Renderings | str], policy: TrainPolicy
    ) -> list[Example | str]:
        """Encode the texts of a group at once, then prove each conversation."""
        texts = (text for one in group if not isinstance(one, str) for text in one.texts())
        encoded = encode_apart(self._engine, self._facts, texts)
        return [one if isinstance(one, str) else self._prove(one, encoded, policy) for one in group]

    def _prove(
        self, renderings: Renderings, encoded: Encoded, policy: TrainPolicy
    ) -> Example | str:
        ids, generated = self._ids_and_blocks(renderings.messages, renderings.tools)
        if not np.array_equal(ids, encoded[renderings.whole]):
            encoded = encode_whole(self._engine, renderings.texts())
        if not np.array_equal(ids, encoded[renderings.whole]):
            return "prefix_changes"
        turns = find_turns(renderings, encoded, self._facts)
        if isinstance(turns, str):
            return turns
        ends = policy.train_on_eot
        mask = mask_of(turns, self._facts, train_ends=ends, generated=generated)
        return mask if isinstance(mask, str) else (turns, mask)

    def _ids_and_blocks(self, messages: Any, tools: Any) -> tuple[IntArray, BoolArray | None]:
        """All ids, and which of them are inside generation blocks, if the template has any."""
        if self._has_blocks:
            return self._engine.generated(messages, tools)
        return self._engine.whole(messages, tools), None

    def draft(self, conversation: Conversation) -> tuple[IntArray, BoolArray | None]:
        """What the template makes of a conversation, with nothing proved: ids, and which of them
        are inside generation blocks, if it has any. To show why one was dropped, never to train."""
        checked = check_messages(conversation.messages)
        if isinstance(checked, str):
            raise TemplateError(f"not a conversation: {checked}")
        messages = as_messages(conversation.messages, checked, self._facts.arguments)
        return self._ids_and_blocks(messages, conversation.tools)

    def __repr__(self) -> str:
        how = "generation blocks" if self._has_blocks else "turn by turn"
        return f"JinjaTemplate({self._name!r}, {how})"


def _joined(good: Sequence[Example]) -> ChatExamples:
    ids = Ragged.from_sequences([turns.ids for turns, _ in good])
    begins = ids.offsets[:-1].tolist()

    def join(parts: Iterable[Any], dtype: Any) -> Any:
        return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)

    return ChatExamples(
        ids=ids,
        mask=join((mask for _, mask in good), np.bool_),
        turn_starts=join(
            (turns.starts + begin for (turns, _), begin in zip(good, begins, strict=True)), np.int64
        ),
        turn_roles=join((turns.roles for turns, _ in good), np.uint8),
    )


def open_jinja_template(
    tokenizer: JinjaTokenizer,
    *,
    chat_template: str | None = None,
    name: str | None = None,
    variables: Mapping[str, JSON] | None = None,
) -> JinjaTemplate:
    """The tokenizer's own chat template, or the one given, ready to render.

    chat_template: Jinja source, or the name of one of several templates the tokenizer carries.
    variables: what the template may read besides messages and tools, such as a date or
    enable_thinking; stored with the template, since it changes tokens.
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
    engine = JinjaEngine(tokenizer, source, given)
    label = name or f"jinja-{_sha256(source)[:12]}"
    try:
        facts = find_facts(engine)
        if _GENERATION.search(source) and not engine.generated([QUESTION, ANSWER])[1].any():
            raise TemplateError(
                "it has {% generation %} in its text, but no answer is inside such a block; put "
                "the block around the assistant's words and their end, or remove it"
            )
    except TemplateError as problem:
        raise TemplateError(f"chat template {label!r}: {problem}") from problem
    return JinjaTemplate(engine, facts, label, given)


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


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
