"""A Jinja template as a `ChatTemplate`: ids, turns and loss mask of each conversation, with proof.

Ids are those of `apply_chat_template`, called once for the whole conversation. Every turn starts
where the rendering of the messages before it ends, token for token; an assistant's words start
where its generation prompt ends, token for token; the words are there; and all structure is the
template's own. Otherwise the conversation is dropped with a reason. Text that would become a
special token is never rendered.

The end of a turn is its last run of special tokens. A trained turn is trained from its first word
up to and including that run; what the template writes after it (ChatML: a newline) is not trained.
Without `train_on_eot` the run is not trained either. With `{% generation %}` blocks the template
itself says how much of the run and of what follows is trained. Everything before the run must be
inside the block (transformers leaves out the last bytes of a block whose last character is several
tokens; such a conversation is dropped), and without `train_on_eot` the rest is taken away.

Two kinds of neighbours may share a turn if a template writes them as one: a run of tool results,
and a system message folded into the turn after it. The turn then has the role of its last message.

A template that loops for ever cannot be stopped; render templates that you do not trust in a
separate process. Render one conversation at a time per template: the generation tracker of
transformers is not thread-safe.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.chat.jinja.renderings import (
    ANSWER,
    QUESTION,
    JinjaEngine,
    JinjaTokenizer,
    Renderings,
    TemplateFacts,
    as_messages,
    find_facts,
    render_all,
    starts_with_words,
)
from shardmill.chat.policy import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    CheckedMessage,
    Dropped,
    Rendered,
    TrainPolicy,
    check_messages,
)
from shardmill.errors import OptionError, TemplateError
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

_RULES = 1  # increased when the same template would give other ids or another mask
_CHARACTERS_PER_CALL = 2**22  # encoded at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnSpans:
    """Where the turns of one conversation are in its ids."""

    ids: IntArray
    starts: OffsetArray  # (turns,) the first token of each turn
    words: IntArray  # (turns,) the first token of its words; -1 where it is not needed
    roles: npt.NDArray[np.uint8]  # (turns,) positions in ROLES
    trained: BoolArray  # (turns,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JinjaTemplate:
    """One Jinja template, bound to one tokenizer, with which it pickles if that can be pickled, as
    those of transformers can. Made by `open_jinja_template`."""

    name: str
    engine: JinjaEngine
    facts: TemplateFacts
    variables: dict[str, JSON]

    @property
    def marker_ids(self) -> frozenset[int]:
        return self.facts.marker_ids

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The special tokens that end an assistant's turn and are trained with it."""
        return self.facts.closing

    def describe(self) -> dict[str, JSON]:
        deciding: dict[str, JSON] = {
            "kind": "jinja",
            "rules": _RULES,
            "source": self.engine.source,
            "variables": self.variables,
        }
        found: dict[str, JSON] = {
            "kind": "jinja",
            "name": self.name,
            "sha256": _sha256(json.dumps(deciding, sort_keys=True)),
            "source_sha256": _sha256(self.engine.source),
            "generation_blocks": self.engine.has_blocks,
            "variables": dict(self.variables),
            "end_ids": list[JSON](self.end_ids),
            "call_arguments": self.facts.arguments,
        }
        library = type(self.engine.tokenizer).__module__.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", None)
        return {**found, library: version} if isinstance(version, str) else found

    def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
        examples: dict[int, ChatExamples] = {}  # by position
        reasons: dict[int, str] = {}
        group: dict[int, Renderings] = {}
        size = 0
        for at, conversation in enumerate(conversations):
            try:
                group[at] = render_all(self.engine, self.facts, conversation, policy)
                size += sum(map(len, group[at].texts()))
            except Dropped as why:
                reasons[at] = str(why)
            except TemplateError:
                reasons[at] = "template_refuses"
            if group and (size > _CHARACTERS_PER_CALL or at + 1 == len(conversations)):
                # The texts of a group are encoded at once.
                texts = (text for one in group.values() for text in one.texts())
                encoded = encode_apart(self.engine, self.facts, texts)
                for number, one in group.items():
                    try:
                        examples[number] = self._prove(one, encoded, policy)
                    except Dropped as why:
                        reasons[number] = str(why)
                group, size = {}, 0
        return Rendered(
            examples=ChatExamples.concatenate(list(examples.values())),
            kept=np.array(list(examples), np.int64),
            drops=tuple(
                Drop(id=conversations[at].id, reason=reason, row=conversations[at].row)
                for at, reason in sorted(reasons.items())
            ),
        )

    def _prove(self, renderings: Renderings, encoded: Encoded, policy: TrainPolicy) -> ChatExamples:
        ids, generated = self.engine.encode(renderings.messages, renderings.tools)
        if not np.array_equal(ids, encoded[renderings.whole]):
            encoded = encode_whole(self.engine, renderings.texts())
        if not np.array_equal(ids, encoded[renderings.whole]):
            raise Dropped("prefix_changes")
        turns = find_turns(renderings, encoded, self.facts)
        return ChatExamples(
            ids=Ragged.from_sequences([turns.ids]),
            mask=mask_of(turns, self.facts, train_ends=policy.train_on_eot, generated=generated),
            turn_starts=turns.starts,
            turn_roles=turns.roles,
        )

    def draft(self, conversation: Conversation) -> tuple[IntArray, BoolArray | None]:
        """What the template makes of a conversation, with nothing proved: ids, and which of them
        are inside generation blocks, if it has any. To show why one was dropped, never to train."""
        checked = check_messages(conversation.messages)
        messages = as_messages(conversation.messages, checked, self.facts.arguments)
        return self.engine.encode(messages, conversation.tools)

    def __repr__(self) -> str:
        how = "generation blocks" if self.engine.has_blocks else "turn by turn"
        return f"JinjaTemplate({self.name!r}, {how})"


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
        blocks = engine.encode([QUESTION, ANSWER])[1]
        if blocks is not None and not blocks.any():
            raise TemplateError(
                "it has {% generation %} in its text, but no answer is inside such a block; put "
                "the block around the assistant's words and their end, or remove it"
            )
    except TemplateError as problem:
        raise TemplateError(f"chat template {label!r}: {problem}") from problem
    return JinjaTemplate(name=label, engine=engine, facts=facts, variables=given)


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


# From renderings to turns and a mask.

Encoded = dict[str, IntArray]


def encode_whole(engine: JinjaEngine, texts: Iterable[str]) -> Encoded:
    """Each text as the tokenizer encodes it, in one call."""
    unique = list(dict.fromkeys(texts))
    return dict(zip(unique, engine.ids(unique), strict=True))


def encode_apart(engine: JinjaEngine, facts: TemplateFacts, texts: Iterable[str]) -> Encoded:
    """Each text as its special tokens and the parts between them, each part encoded only once."""
    parts = {
        text: [part for part in facts.literals.split(text) if part] for text in dict.fromkeys(texts)
    }
    ids = encode_whole(engine, (part for split in parts.values() for part in split))
    nothing = np.empty(0, np.int64)
    return {
        text: np.concatenate([nothing, *(ids[part] for part in split)])
        for text, split in parts.items()
    }


def find_turns(renderings: Renderings, encoded: Encoded, facts: TemplateFacts) -> TurnSpans:
    """The turns; Dropped if they are not where and what they should be."""
    whole = renderings.whole
    ids = encoded[whole]

    def count(part: str) -> int | None:
        """How many tokens a part has, if they are the first tokens of the whole."""
        mine = encoded[part]
        return len(mine) if np.array_equal(mine, ids[: len(mine)]) else None

    markers = np.array(sorted(facts.marker_ids), np.int64)
    plain = encoded[renderings.harmless]
    if not np.array_equal(ids[np.isin(ids, markers)], plain[np.isin(plain, markers)]):
        raise Dropped("special_in_text")

    # Where each message ends in the tokens; None where it shares a turn with the next.
    roles = [message.role for message in renderings.checked]
    stops: list[int | None] = []
    for at, prefix in enumerate(renderings.prefixes):
        folded = facts.folds_system and set(roles[: at + 1]) == {SYSTEM}
        is_prefix = prefix is not None and whole.startswith(prefix)
        stop = count(prefix) if prefix is not None and is_prefix and not folded else None
        if stop is None and not _may_share(roles, at):
            raise Dropped("tokens_merge" if is_prefix else "prefix_changes")
        stops.append(stop)

    # The first turn starts after the longest opening that leaves something for it.
    first_stop = min(stop for stop in stops if stop is not None)
    opened = [count(opening) or 0 for opening in renderings.openings]
    first, starts = [0], [max(n if n < first_stop else 0 for n in opened)]
    for at, stop in enumerate(stops):
        empty = stop is not None and stop <= starts[-1]
        if empty and not _may_share(roles, at):
            raise Dropped("content_changed")
        if stop is not None and not empty and at + 1 < len(stops):
            first.append(at + 1)
            starts.append(stop)

    words = np.full(len(first), -1, np.int64)
    for turn, at in enumerate(first):
        before = renderings.before_words.get(at)
        if before is None:
            continue
        if not whole.startswith(before):
            raise Dropped("prompt_changes")
        start = count(before)
        if start is None:
            raise Dropped("tokens_merge")
        words[turn] = start

    bounds = [*first, len(roles)]
    _check_messages_written(renderings, bounds)
    trained = [renderings.trained[start:stop] for start, stop in pairwise(bounds)]
    if any(part.any() != part.all() for part in trained):
        raise Dropped("mixed_train")
    return TurnSpans(
        ids=ids,
        starts=np.array(starts, np.int64),
        words=words,
        roles=np.array([roles[stop - 1] for stop in bounds[1:]], np.uint8),
        trained=np.array([part.all() for part in trained]),
    )


def _may_share(roles: list[int], at: int) -> bool:
    """Whether a message and the next may be one turn."""
    if at + 1 == len(roles):
        return False
    return set(roles[: at + 1]) == {SYSTEM} or roles[at] == roles[at + 1] == TOOL


def _check_messages_written(renderings: Renderings, bounds: list[int]) -> None:
    """Every message was written as it was said."""
    start = 0
    for at, after in pairwise(bounds):
        prefix = renderings.prefixes[after - 1]
        assert prefix is not None  # a turn ends only where a rendering does
        before = renderings.before_words.get(at)
        answer = None if before is None else prefix[len(before) :]
        for message in renderings.checked[at:after]:
            _check_words(message, prefix[start:], answer)
        start = len(prefix)


def _check_words(message: CheckedMessage, turn: str, answer: str | None) -> None:
    """This turn is what was said.

    turn: what the template wrote for it.  answer: what follows the generation prompt, for an
    assistant's turn.  A template may trim a text, and nothing else.
    """
    text = message.text or ""
    if any(json.loads(call)["name"] not in turn for call in message.calls):
        raise Dropped("no_place_for_tool_calls")
    if message.reasoning.strip() not in turn:
        raise Dropped("no_place_for_reasoning")
    if message.role != ASSISTANT or answer is None:
        # A tool's result may be written as a JSON string.
        quoted = json.dumps(text.strip(), ensure_ascii=False)[1:-1]
        written = text.strip() in turn or quoted in turn
    elif message.calls or message.reasoning:
        made_up = message.text is None and answer.lstrip().startswith("None")
        written = not made_up and text.strip() in answer
    else:
        written = starts_with_words(answer, text)
    if not written:
        raise Dropped("content_changed")


def mask_of(
    turns: TurnSpans, facts: TemplateFacts, *, train_ends: bool, generated: BoolArray | None
) -> BoolArray:
    """The loss mask; Dropped if it cannot be the right one.

    generated: which tokens are inside the template's generation blocks, if it has any.
    """
    mask = np.zeros(len(turns.ids), np.bool_)
    is_end = np.isin(turns.ids, np.array(sorted(facts.end_ids), np.int64))
    stops = [*turns.starts[1:].tolist(), len(turns.ids)]
    num_generated = 0
    for turn, (words, stop) in enumerate(zip(turns.words.tolist(), stops, strict=True)):
        if words < 0:
            continue
        # The last run of end ids is run..after; both are `stop` if there is none.
        ends = np.flatnonzero(is_end[words:stop]) + words
        run = after = stop
        if len(ends):
            after = int(ends[-1]) + 1
            words_before = np.flatnonzero(~is_end[words:after]) + words
            run = int(words_before[-1]) + 1 if len(words_before) else words
        blocks = generated if turns.roles[turn] == ASSISTANT else None
        if blocks is not None:
            inside = np.flatnonzero(blocks[words:stop])
            if not (len(inside) and blocks[words:run].all()):
                raise Dropped("mask_disagrees")
            after = words + int(inside[-1]) + 1
            num_generated += len(inside)
        if not turns.trained[turn]:
            continue
        if not len(ends) and not train_ends:
            raise Dropped("no_end")
        stop_at = after if train_ends else run
        mask[words:stop_at] = True if blocks is None else blocks[words:stop_at]
    if generated is not None and num_generated != generated.sum():
        raise Dropped("trains_others")
    if not mask.any():
        raise Dropped("nothing_trained")
    return mask
