"""Chat templates written in Jinja, as Hugging Face tokenizers carry them.

In: conversations and a policy.  Out: `Rendered`, as every `ChatTemplate` gives it.
Promise: ids are those of `apply_chat_template`, called once for the whole; the mask comes from the
template's `{% generation %}` blocks, or, when it has none, from rendering turn by turn. Either way
each conversation carries its own proof: every rendering of its first messages, and every
generation prompt in it, is a prefix of the whole in ids. What cannot be proved is dropped with a
reason. Text that would become a special token is never rendered.
Not here: the proof of the template itself (proof/). Nobody can stop a template that loops for
ever, only see that it wrote too much; render templates you do not trust in a process of their own.
Threads: one rendering at a time per template, since transformers' generation tracker is shared.

Many conversations at a time: what waits to be encoded, and what came out.

In: single conversations.  Out: groups of a few megabytes; `ChatExamples`.
Promise: order is kept, and a group's size depends on its texts alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardmill.chat.messages import CheckedMessage, check_messages
from shardmill.chat.policy import ASSISTANT, Rendered, TrainPolicy, check_policy, trained_turns
from shardmill.errors import OptionError, TemplateError
from shardmill.records import JSON, BoolArray, ChatExamples, Conversation, Drop, IntArray, Ragged

if TYPE_CHECKING:
    from shardmill.chat.jinja.engine import JinjaEngine, JinjaTokenizer
    from shardmill.chat.jinja.facts import TemplateFacts
    from shardmill.chat.jinja.turns import Encoded, TurnSpans
    from shardmill.chat.jinja.writing import Writing


Written: TypeAlias = "tuple[Writing, BoolArray]"
"""What a template wrote, and which of the messages are trained."""

_CHARACTERS_PER_CALL = 2**22


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JinjaExample:
    """One kept conversation."""

    turns: TurnSpans
    mask: BoolArray


def grouped(written: Iterator[Written | str]) -> Iterator[list[Written | str]]:
    """So many conversations at a time that their texts stay within a few megabytes."""
    group: list[Written | str] = []
    size = 0
    for one in written:
        group.append(one)
        size += 0 if isinstance(one, str) else sum(map(len, one[0].texts()))
        if size > _CHARACTERS_PER_CALL:
            yield group
            group, size = [], 0
    yield group


def join_examples(good: Sequence[JinjaExample]) -> ChatExamples:
    """The examples behind one another."""
    ids = Ragged.from_sequences([one.turns.ids for one in good])
    begins = ids.offsets[:-1].tolist()
    starts = [one.turns.starts + begin for one, begin in zip(good, begins, strict=True)]
    return ChatExamples(
        ids=ids,
        mask=_joined([one.mask for one in good], np.bool_),
        turn_starts=_joined(starts, np.int64),
        turn_roles=_joined([one.turns.roles for one in good], np.uint8),
    )


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


JINJA_REASONS = {
    "template_refuses": "the template raised an error on this conversation, or wrote far too much",
    "prefix_changes": "the template writes earlier turns otherwise when later ones follow",
    "prompt_changes": "the answer does not follow the template's own generation prompt",
    "tokens_merge": "one token spans the border of two turns, or of a prompt and its answer",
    "content_changed": "the template wrote something else than the message says",
    "mask_disagrees": "the generation blocks do not hold all of the assistant's words",
    "trains_others": "the generation blocks hold more than the assistant's words and their end",
    "no_end": "the turn has no special token at its end, so its end cannot be left untrained",
    "mixed_train": "messages that the template writes as one turn, one trained and one not",
}
"""Reason codes beside those of check.py."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_RULES = 1  # of this file and its neighbours: raised when the same template gives another mask


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
        """The special tokens that end an assistant's turn; trained with it."""
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
        results: list[JinjaExample | str] = []
        for group in grouped(self._written(conversations, policy)):
            results += self._rendered(group, policy)
        drops = tuple(
            Drop(id=conversation.id, reason=result)
            for conversation, result in zip(conversations, results, strict=True)
            if isinstance(result, str)
        )
        kept = [place for place, result in enumerate(results) if not isinstance(result, str)]
        good = [result for result in results if not isinstance(result, str)]
        return Rendered(examples=join_examples(good), kept=np.array(kept, np.int64), drops=drops)

    def draft(self, conversation: Conversation) -> tuple[IntArray, BoolArray | None]:
        """What the template makes of a conversation by itself, nothing proved: ids, and which of
        them its generation blocks hold, if it has any. To show why one was dropped; never to
        train on."""
        from shardmill.chat.jinja.facts import as_messages

        checked = check_messages(conversation.messages)
        if isinstance(checked, str):
            raise TemplateError(f"not a conversation: {checked}")
        messages = as_messages(conversation.messages, checked, self._facts.arguments)
        if self._has_blocks:
            return self._engine.generated(messages, conversation.tools)
        return self._engine.whole(messages, conversation.tools), None

    def __repr__(self) -> str:
        how = "generation blocks" if self._has_blocks else "turn by turn"
        return f"JinjaTemplate({self._name!r}, {how})"

    def _written(
        self, conversations: Sequence[Conversation], policy: TrainPolicy
    ) -> Iterator[Written | str]:
        from shardmill.chat.jinja.writing import write

        for conversation in conversations:
            checked = check_messages(conversation.messages)
            if isinstance(checked, str):
                yield checked
                continue
            trained = _trained(checked, policy)
            if isinstance(trained, str):
                yield trained
                continue
            found = write(self._engine, self._facts, conversation, checked, trained)
            yield found if isinstance(found, str) else (found, trained)

    def _rendered(
        self, group: list[Written | str], policy: TrainPolicy
    ) -> list[JinjaExample | str]:
        """Encode the texts of a group at once, then judge each conversation."""
        from shardmill.chat.jinja.turns import encode_apart

        texts = (text for one in group if not isinstance(one, str) for text in one[0].texts())
        encoded = encode_apart(self._engine, self._facts, texts)
        return [
            one if isinstance(one, str) else self._judged(*one, encoded, policy) for one in group
        ]

    def _judged(
        self, writing: Writing, trained: BoolArray, encoded: Encoded, policy: TrainPolicy
    ) -> JinjaExample | str:
        from shardmill.chat.jinja.turns import encode_whole, find_turns, mask_of

        ids, generated = self._whole(writing)
        if not np.array_equal(ids, encoded[writing.whole]):
            encoded = encode_whole(self._engine, writing.texts())
        if not np.array_equal(ids, encoded[writing.whole]):
            return "prefix_changes"
        turns = find_turns(writing, encoded, self._facts)
        if isinstance(turns, str):
            return turns
        bounds = [*turns.first, len(trained)]
        told = [trained[start:stop] for start, stop in itertools.pairwise(bounds)]
        if any(part.any() != part.all() for part in told):
            return "mixed_train"
        mask = mask_of(
            turns,
            np.array([part.all() for part in told]),
            self._facts,
            train_ends=policy.train_on_eot,
            generated=generated,
        )
        return mask if isinstance(mask, str) else JinjaExample(turns=turns, mask=mask)

    def _whole(self, writing: Writing) -> tuple[IntArray, BoolArray | None]:
        if self._has_blocks:
            return self._engine.generated(writing.messages, writing.tools)
        return self._engine.whole(writing.messages, writing.tools), None


def open_jinja_template(
    tokenizer: JinjaTokenizer,
    *,
    chat_template: str | None = None,
    name: str | None = None,
    variables: Mapping[str, JSON] | None = None,
) -> JinjaTemplate:
    """The tokenizer's own chat template, or the one given, ready to render.

    chat_template: Jinja source, or the name of one of several templates the tokenizer carries.
    variables: what the template may look at beside messages and tools, such as a date or
    enable_thinking; stored with the template, since it changes tokens.
    """
    from shardmill.chat.jinja.engine import JinjaEngine
    from shardmill.chat.jinja.facts import find_facts

    given = dict(variables or {})
    try:
        json.dumps(given)
    except (TypeError, ValueError) as problem:
        raise OptionError(f"variables={given!r}: wanted plain JSON values: {problem}") from problem
    if not hasattr(tokenizer, "apply_chat_template"):
        raise TemplateError(
            f"{type(tokenizer).__name__} cannot render Jinja templates; give a tokenizer of "
            "transformers, such as AutoTokenizer.from_pretrained(...), or a template made of tokens"
        )
    source = _source(tokenizer, chat_template)
    engine = JinjaEngine(tokenizer, source, given)
    label = name or f"jinja-{_sha256(source)[:12]}"
    try:
        facts = find_facts(engine)
        if _GENERATION.search(source):
            _check_blocks(engine)
    except TemplateError as problem:
        raise TemplateError(f"chat template {label!r}: {problem}") from problem
    return JinjaTemplate(engine, facts, label, given)


def _check_blocks(engine: JinjaEngine) -> None:
    """That generation blocks can be asked for at all."""
    from shardmill.chat.jinja.facts import ANSWERED, ASKED

    _, generated = engine.generated([ASKED, ANSWERED])
    if not generated.any():
        raise TemplateError(
            "it has {% generation %} in its text, but no answer is inside such a block; put the "
            "block around the assistant's words and their end, or take it out"
        )


def _source(tokenizer: Any, chat_template: str | None) -> str:
    own = getattr(tokenizer, "chat_template", None)
    named = own if isinstance(own, Mapping) else {}
    found = chat_template if chat_template is not None else named.get("default", own)
    found = named.get(found, found) if isinstance(found, str) else found
    if isinstance(found, str) and found.strip():
        return found
    has = f"templates called {sorted(named)}" if named else "no chat template"
    raise TemplateError(
        f"{type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')!r} has {has}: give "
        "chat_template=..., a Jinja text, or use a template made of tokens"
    )


def _trained(checked: Sequence[CheckedMessage], policy: TrainPolicy) -> BoolArray | str:
    roles = np.array([message.role for message in checked], np.uint8)
    flags = [(place, m.train) for place, m in enumerate(checked) if m.train is not None]
    trained = trained_turns(roles, np.array([0, len(roles)]), flags, policy)
    if trained.any():
        return trained
    return "nothing_trained" if (roles == ASSISTANT).any() else "no_assistant"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
