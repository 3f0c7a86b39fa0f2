"""What a template writes: harmless messages once, then each conversation in all that proves it.

`JinjaEngine` runs one template of one tokenizer exactly as transformers runs it: text, ids and
assistant mask are those of `apply_chat_template`. Any error inside a template becomes a
`TemplateError` with its line, if Jinja knows it. The clock is never read. Transformers renders in
Jinja's immutable sandbox, so a template cannot reach files, processes or Python's internals, and a
single range has at most 100,000 items. Time and memory are not limited: nested loops or a long
string are noticed only when the template returns.

`find_facts` refuses a template that cannot write a question and its answer, or whose answer does
not follow its generation prompt. This is no proof: every conversation is checked again.

`render_all` writes everything about one conversation that is needed before its tokens can be
trusted. Only `apply_chat_template` writes; nothing is cut out of a text or joined to one. The cost
is one rendering per message, one per assistant turn, two for the whole conversation, and two more
for each other turn that is trained.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardmill.chat.policy import (
    ASSISTANT,
    CheckedMessage,
    Dropped,
    TrainPolicy,
    check_messages,
    check_tools,
    trained_messages,
)
from shardmill.errors import ShardmillError, TemplateError, TokenizerError, missing_extra
from shardmill.records import JSON, ROLES, BoolArray, Conversation, IntArray

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

_NOT_THE_TEMPLATE = (ShardmillError, ImportError, OSError)
"""Code inside the sandbox cannot raise these; everything else is the template's fault."""
_CLOCK = "strftime_now"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class JinjaTokenizer(Protocol):
    """What a tokenizer needs; those of transformers have it."""

    chat_template: Any
    all_special_tokens: list[str]
    all_special_ids: list[int]

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def __call__(self, text: list[str], **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class JinjaEngine:
    """The template `source` with its variables, run by `tokenizer`."""

    def __init__(
        self, tokenizer: JinjaTokenizer, source: str, variables: Mapping[str, JSON]
    ) -> None:
        try:
            from jinja2 import TemplateSyntaxError
        except ImportError as missing:
            raise missing_extra("jinja2", "hub") from missing
        self._syntax_error = TemplateSyntaxError
        self.tokenizer = tokenizer
        self.source = source
        self.has_blocks = _GENERATION.search(source) is not None
        self._variables = dict(variables)
        if _CLOCK in source:
            # Defined but not callable: a template that asks for the date fails visibly.
            self._variables.setdefault(_CLOCK, None)

    def text(self, messages: Messages, tools: Tools = None, *, prompt: bool = False) -> str:
        """What the template writes, followed by the generation prompt if `prompt`."""
        found = self._apply(messages, tools, add_generation_prompt=prompt, tokenize=False)
        if not isinstance(found, str):
            raise TokenizerError(
                f"apply_chat_template(tokenize=False) gave a {type(found).__name__}: wanted a str"
            )
        return found

    def text_or_none(
        self, messages: Messages, tools: Tools = None, *, prompt: bool = False
    ) -> str | None:
        """What the template writes; None if it refuses these messages."""
        try:
            return self.text(messages, tools, prompt=prompt)
        except TemplateError:
            return None

    def ids(self, texts: Sequence[str]) -> list[IntArray]:
        """The ids of each text with nothing added, as `apply_chat_template` encodes its output."""
        if not texts:
            return []
        found = self.tokenizer(
            list(texts), add_special_tokens=False, padding=False, truncation=False, verbose=False
        )
        return [np.asarray(ids, np.int64) for ids in found["input_ids"]]

    def encode(self, messages: Messages, tools: Tools = None) -> tuple[IntArray, BoolArray | None]:
        """The ids of a conversation in one call, and which of them are inside the template's
        generation blocks, if it has any."""
        if not self.has_blocks:
            found = self._apply(messages, tools, tokenize=True, return_dict=False)
            return np.asarray(found, np.int64), None
        found = self._apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = found.get("assistant_masks")
        ids = np.asarray(found["input_ids"], np.int64)
        if mask is None or np.shape(mask) != ids.shape:
            raise TokenizerError(
                f"{type(self.tokenizer).__name__} gives no assistant mask: generation blocks need "
                "a fast tokenizer of transformers; remove the blocks, or use such a tokenizer"
            )
        return ids, np.asarray(mask, np.bool_)

    def _apply(self, messages: Messages, tools: Tools, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self.source,
                **options,
                **self._variables,
            )
        except _NOT_THE_TEMPLATE:
            raise
        except Exception as problem:  # a template can raise anything that Python can
            line = self._line_of(problem)
            where = "" if line is None else f", line {line}"
            message = " ".join(str(problem).split())[:300] or "no message"
            message = f"the template raised {type(problem).__name__}{where}: {message}"
            if _CLOCK in self.source and "not callable" in str(problem):
                message += (
                    f"; it asks for today's date ({_CLOCK}), and equal input must give equal "
                    "tokens: fix the date with variables={'date_string': '26 Jul 2024'}, or "
                    "whichever variable the template looks at first"
                )
            raise TemplateError(message) from problem

    def _line_of(self, problem: Exception) -> int | None:
        """The line of the template, from 1: of the syntax error, or the innermost that ran."""
        if isinstance(problem, self._syntax_error):
            return problem.lineno
        found, trace = None, problem.__traceback__
        while trace is not None:
            # Jinja rewrites its frames so that their lines are those of the template.
            if trace.tb_frame.f_code.co_filename == "<template>":
                found = trace.tb_lineno
            trace = trace.tb_next
        return found


# What harmless messages show.

QUESTION = {"role": "user", "content": "asked"}
ANSWER = {"role": "assistant", "content": "answered"}
_SYSTEM = {"role": "system", "content": "instructed"}
_NEXT_QUESTION = {"role": "user", "content": "again"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What renderings of harmless messages show."""

    preamble: str  # what opens a conversation that starts with a user: BOS, a default system text
    bos: str  # what opens every other one
    opening: str  # the generation prompt
    folds_system: bool  # a system message is written only together with the turn after it
    arguments: str  # how a call's arguments can be written: as-given, object, text or none
    marker_ids: frozenset[int]  # ids that only structure may have
    end_ids: frozenset[int]  # the special tokens among them: one of these ends a turn
    closing: tuple[int, ...]  # the special tokens that end an assistant's turn
    literals: re.Pattern[str]  # finds texts that become a marker, as its one group


def find_facts(engine: JinjaEngine) -> TemplateFacts:
    """Try the template; TemplateError if it cannot be trained with."""
    asked = engine.text([QUESTION])
    prompt = engine.text([QUESTION], prompt=True)
    answered = engine.text([QUESTION, ANSWER])
    if not (prompt.startswith(asked) and answered.startswith(prompt)):
        raise TemplateError(
            f"what the template writes for a question, {asked!r}, for the question with the "
            f"generation prompt, {prompt!r}, and with an answer, {answered!r}, do not begin alike: "
            "each must begin with the one before it. A template that rewrites earlier turns, or "
            "writes something after the last turn only, has no turns to train on"
        )
    if not starts_with_words(answered[len(prompt) :], ANSWER["content"]):
        raise TemplateError(
            f"after the generation prompt {prompt!r} the template writes "
            f"{answered[len(prompt) :]!r}, which does not start with the answer "
            f"{ANSWER['content']!r}: it must write the assistant's opening when "
            "add_generation_prompt is true, and nothing else before the words"
        )
    specials = _special_tokens(engine)
    markers = _structure_tokens(engine, specials, [asked, prompt, answered])
    ends = frozenset(number for text, number in markers.items() if text in specials)
    closing: list[int] = []  # the last run of end ids
    for number in reversed(engine.ids([answered])[0].tolist()):
        if number in ends:
            closing.insert(0, number)
        elif closing:
            break
    literals = sorted({*specials, *markers}, key=lambda text: (-len(text), text))  # longest first
    opening = prompt[len(asked) :]
    preamble, bos = _preamble_and_bos(engine, opening)
    return TemplateFacts(
        preamble=preamble,
        bos=bos,
        opening=opening,
        folds_system=_SYSTEM["content"] not in (engine.text_or_none([_SYSTEM]) or ""),
        arguments=_arguments_form(engine),
        marker_ids=frozenset(markers.values()),
        end_ids=ends,
        closing=tuple(closing),
        literals=re.compile("(" + ("|".join(map(re.escape, literals)) or "(?!)") + ")"),
    )


def starts_with_words(written: str, text: str) -> bool:
    """Whether a text comes first, as it is or trimmed; the template may put blanks before it."""
    return written.startswith(text) or written.lstrip().startswith(text.strip())


def find_preamble(engine: JinjaEngine, messages: Messages, tools: Tools, whole: str) -> str | None:
    """What precedes the first turn, found by writing its message again after an exchange.

    whole: what the template writes for `messages`, the first one. None if the two renderings of the
    message differ, so that nothing can be said.
    """
    before = engine.text_or_none([QUESTION, ANSWER], tools)
    after = engine.text_or_none([QUESTION, ANSWER, *messages], tools)
    if before is None or after is None or not after.startswith(before):
        return None
    turn = after[len(before) :]
    return whole[: -len(turn)] if turn and whole.endswith(turn) else None


def _preamble_and_bos(engine: JinjaEngine, opening: str) -> tuple[str, str]:
    """What opens a conversation that a user starts, and the BOS in it."""
    whole = engine.text([_NEXT_QUESTION])
    found = find_preamble(engine, [_NEXT_QUESTION], None, whole)
    bos = getattr(engine.tokenizer, "bos_token", None) or ""
    if found is None:
        # A token that also opens the assistant's turn is not a BOS.
        bos = bos if whole.startswith(bos) and bos not in opening else ""
        return bos, bos
    return found, bos if found.startswith(bos) else ""


def _special_tokens(engine: JinjaEngine) -> dict[str, int]:
    """Literal -> id of every special token."""
    tokenizer = engine.tokenizer
    found = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=False))
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            found[str(token.content)] = int(number)
    return {text: number for text, number in found.items() if text}


def _structure_tokens(
    engine: JinjaEngine, specials: dict[str, int], written: list[str]
) -> dict[str, int]:
    """The special tokens, and other added tokens that the template itself writes.

    Added tokens that no template writes (runs of blanks, HTML tags) are ordinary text. The unknown
    token is text too, unless it is also used as BOS, EOS or the like.
    """
    found = dict(specials)
    unknown = getattr(engine.tokenizer, "unk_token", None)
    jobs = ("bos_token", "eos_token", "pad_token", "sep_token", "cls_token")
    used = {getattr(engine.tokenizer, job, None) for job in jobs}
    if unknown in found and unknown not in engine.source and unknown not in used:
        del found[unknown]
    seen = engine.source + "\0" + "\0".join(written)
    for number, token in engine.tokenizer.added_tokens_decoder.items():
        text = str(token.content)
        if text.strip() and text in seen and (text != unknown or text in found):
            found[text] = int(number)
    return found


def _arguments_form(engine: JinjaEngine) -> str:
    """How the template can write a call's arguments, by trying: as-given, object, text or none.

    Many templates turn arguments that are JSON text into a quoted string, others write an object
    the way Python does; both without an error.
    """
    given = '{"quarry": "marble"}'

    def write(arguments: object) -> str:
        function = {"name": "lookup", "arguments": arguments}
        call: dict[str, Any] = {"id": "call00001", "type": "function", "function": function}
        calling = {"role": "assistant", "content": None, "tool_calls": [call]}
        return engine.text_or_none([QUESTION, calling]) or ""

    as_object, as_text = write(json.loads(given)), write(given)
    object_ok = all(word in as_object for word in ("lookup", "quarry", "marble"))
    object_ok = object_ok and "'quarry'" not in as_object
    text_ok = "lookup" in as_text and given in as_text
    if object_ok and text_ok:
        return "as-given"
    return "object" if object_ok else "text" if text_ok else "none"


# One conversation.

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]*|\s*")
"""Texts a template may compare with ("function", "string"): they stay as they are."""

_MAX_CHARACTERS = 2**20
_MAX_PER_CHARACTER = 64
"""A template that writes more than both of these is broken or hostile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderings:
    """The texts that the template wrote about one conversation, each complete."""

    messages: list[dict[str, Any]]
    checked: list[CheckedMessage]
    trained: BoolArray  # (messages,)
    tools: Tools
    whole: str
    prefixes: list[str | None]  # for the first 1, 2, ... messages; None where it refuses
    before_words: dict[int, str]  # message -> everything before its first word; see `_before_words`
    openings: tuple[str, ...]  # what may precede the first turn and belong to no turn
    harmless: str  # the whole with harmless texts: its structure is the template's own

    def texts(self) -> Iterator[str]:
        """Everything that must be encoded."""
        yield self.whole
        yield from (prefix for prefix in self.prefixes if prefix is not None)
        yield from self.before_words.values()
        yield from self.openings
        yield self.harmless


def render_all(
    engine: JinjaEngine, facts: TemplateFacts, conversation: Conversation, policy: TrainPolicy
) -> Renderings:
    """Write a conversation in all the ways its proof needs.

    Dropped, or TemplateError from the template itself, if that is not possible.
    """
    checked = check_messages(conversation.messages)
    trained = trained_messages(checked, policy)
    if not trained.any():
        said = any(message.role == ASSISTANT for message in checked)
        raise Dropped("nothing_trained" if said else "no_assistant")
    messages = as_messages(conversation.messages, checked, facts.arguments)
    tools = conversation.tools or None
    check_tools(tools)
    if facts.arguments == "none" and any(message.calls for message in checked):
        raise Dropped("no_place_for_tool_calls")
    # Roles are ours; everything else came from outside.
    outside = [{key: part for key, part in one.items() if key != "role"} for one in messages]
    texts = list(_texts_in([outside, tools]))
    if any(map(facts.literals.search, texts)):
        raise Dropped("special_in_text")
    whole = engine.text(messages, tools)
    harmless = engine.text(_harmless(messages), _harmless(tools))
    size = sum(map(len, texts)) + sum(len(one["role"]) + len("role") for one in messages)
    if len(whole) > _MAX_CHARACTERS + _MAX_PER_CHARACTER * size:
        raise Dropped("template_refuses")
    if any(name not in whole for name in _tool_names(tools or ())):
        raise Dropped("no_place_for_tools")
    before_words = {
        at: _before_words(engine, facts, messages, at, tools)
        for at, message in enumerate(messages)
        if message["role"] == "assistant" or trained[at]
    }
    first = [engine.text_or_none(messages[:stop], tools) for stop in range(1, len(messages))]
    prefixes = [*first, whole]
    openings: tuple[str, ...] = (facts.preamble, facts.bos)
    if tools is not None and prefixes[0] is not None and messages[0]["role"] == "user":
        # Tools are often written before the first turn.
        found = find_preamble(engine, messages[:1], tools, prefixes[0])
        openings = openings if found is None else (found, *openings)
    return Renderings(
        messages=messages,
        checked=checked,
        trained=trained,
        tools=tools,
        whole=whole,
        prefixes=prefixes,
        before_words=before_words,
        openings=openings,
        harmless=harmless,
    )


def as_messages(
    messages: Messages, checked: Sequence[CheckedMessage], arguments: str
) -> list[dict[str, Any]]:
    """The messages as a template wants them: every key but "train", with the standard name of the
    role and the content as one text.

    arguments: "as-given", or the form of a call's arguments that the template can write: "object"
    or "text".
    """
    found = []
    for message, sound in zip(messages, checked, strict=True):
        plain = {key: value for key, value in message.items() if key != "train"}
        plain["role"], plain["content"] = ROLES[sound.role], sound.text
        if sound.calls:
            plain["tool_calls"] = [_with_arguments(call, arguments) for call in plain["tool_calls"]]
        found.append(plain)
    return found


def _with_arguments(call: Mapping[str, Any], form: str) -> dict[str, Any]:
    """The call in the shape transformers documents, {"type", "function": {"name", "arguments"}}."""
    function = dict(call.get("function", call))
    around = dict(call) if "function" in call else {"id": function.pop("id", None)}
    given = function["arguments"]
    if form == "object" and isinstance(given, str):
        function["arguments"] = json.loads(given)
    if form == "text" and not isinstance(given, str):
        function["arguments"] = json.dumps(given, ensure_ascii=False)
    outer = {key: value for key, value in around.items() if value is not None}
    return {"type": "function", **outer, "function": function}


def _texts_in(value: object) -> Iterator[str]:
    """Every text inside a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from _texts_in(part)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for part in value:
            yield from _texts_in(part)


def _harmless(value: Any) -> Any:
    """The same shape with plain letters for texts. Blank texts and plain names stay."""
    if isinstance(value, str):
        return value if _PLAIN_NAME.fullmatch(value) else "a"
    if isinstance(value, Mapping):
        return {key: _harmless(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_harmless(part) for part in value]
    return value


def _tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the tools that have one."""
    functions = (
        tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in tools
    )
    return [tool["name"] for tool in functions if isinstance(tool.get("name"), str)]


def _before_words(
    engine: JinjaEngine, facts: TemplateFacts, messages: list[dict[str, Any]], at: int, tools: Tools
) -> str:
    """Everything before the first word of a message.

    For an assistant's that is the generation prompt it answers; for others whatever is the same
    for any content.
    """
    before = messages[:at]
    if messages[at]["role"] != "assistant":
        others = [{**messages[at], "content": text} for text in ("alpha", "omega")]
        after = messages[at + 1 :]
        written = [engine.text([*before, other, *after], tools) for other in others]
        return os.path.commonprefix(written)  # noqa: RUF071 - texts, not paths
    if before:
        return engine.text(before, tools, prompt=True)
    # There is no prompt for no messages: it is the opening after what opens a conversation.
    first = engine.text_or_none(messages[:1], tools) or ""
    for start in (facts.preamble, facts.bos, ""):
        if first.startswith(start + facts.opening):
            return start + facts.opening
    raise Dropped("template_refuses")
