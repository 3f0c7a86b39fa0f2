"""What a Jinja template does, found once by trying it on harmless messages.

In: an engine.  Out: `TemplateFacts`.
Promise: a template that cannot write a question and its answer, or whose answer does not follow
its generation prompt, is refused here with what it wrote.
Not here: proof. Every conversation is checked again when it is rendered.

What a text template is given, and whether it wrote all of it.

In: checked messages.  Out: messages as a Jinja template wants them; harmless copies of them; what
the template wrote other than the words.
Promise: nothing a caller sends is lost between the conversation and the template; a copy is
harmless: its texts are plain letters, so whatever structure its rendering has is the template's.
Not here: rendering (engine.py), ids (turns.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.chat.jinja.engine import JinjaEngine, Messages, Tools
from shardmill.chat.messages import CheckedMessage
from shardmill.chat.policy import ASSISTANT
from shardmill.errors import TemplateError
from shardmill.records import ROLES, IntArray

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]*|\s*")
"""Texts a template may compare with ("function", "string"): they stay as they are."""

PLACES = {
    "tools": "no_place_for_tools",
    "calls": "no_place_for_tool_calls",
    "reasoning": "no_place_for_reasoning",
}
_LOST = "content_changed"


def as_messages(
    messages: Sequence[Mapping[str, Any]], checked: Sequence[CheckedMessage], arguments: str
) -> list[dict[str, Any]]:
    """Every key but "train", with the one name of the role and the content as one text.

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


def leaves(value: object) -> Iterator[str]:
    """Every text inside a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from leaves(part)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for part in value:
            yield from leaves(part)


def harmless(value: Any) -> Any:
    """The same shape with plain letters for texts. Blank texts and plain names stay."""
    if isinstance(value, str):
        return value if _PLAIN_NAME.fullmatch(value) else "a"
    if isinstance(value, Mapping):
        return {key: harmless(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [harmless(part) for part in value]
    return value


def lost_words(message: CheckedMessage, turn: str, answer: str | None) -> str | None:
    """Why this turn is not what was said: a reason code, or None.

    turn: what the template wrote for it.  answer: what follows the generation prompt, for an
    assistant's turn.  A template may trim a text, and nothing else.
    """
    text = message.text or ""
    if any(_name(call) not in turn for call in message.calls):
        return PLACES["calls"]
    if message.reasoning.strip() not in turn:
        return PLACES["reasoning"]
    if message.role != ASSISTANT or answer is None:
        # A tool's result may be written as a JSON string.
        quoted = json.dumps(text.strip(), ensure_ascii=False)[1:-1]
        return None if text.strip() in turn or quoted in turn else _LOST
    if message.calls or message.reasoning:
        made_up = message.text is None and answer.lstrip().startswith("None")
        return _LOST if made_up or text.strip() not in answer else None
    return None if starts_with_words(answer, text) else _LOST


def starts_with_words(written: str, text: str) -> bool:
    """Whether a text comes first, as it is or trimmed; the template may put blanks before it."""
    return written.startswith(text) or written.lstrip().startswith(text.strip())


def names_of_tools(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the tools are called, those that have a name."""
    named = (
        tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in tools
    )
    return [tool["name"] for tool in named if isinstance(tool.get("name"), str)]


def _name(call: str) -> str:
    return str(json.loads(call)["name"])


def arguments_form(write: Callable[[dict[str, Any]], str | None]) -> str:
    """How a template can write a call's arguments, by trying: "as-given", "object", "text", "none".

    write: a tool call to what the template writes for it, None when it refuses. Many templates turn
    arguments that are JSON text into a quoted string, others write an object the way Python does;
    both are silent.
    """
    given = '{"quarry": "marble"}'
    as_object = write(_call(json.loads(given))) or ""
    as_text = write(_call(given)) or ""
    object_ok = all(word in as_object for word in ("lookup", "quarry", "marble"))
    object_ok = object_ok and "'quarry'" not in as_object
    text_ok = "lookup" in as_text and given in as_text
    if object_ok and text_ok:
        return "as-given"
    return "object" if object_ok else "text" if text_ok else "none"


def _call(arguments: object) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}


ASKED = {"role": "user", "content": "asked"}
ANSWERED = {"role": "assistant", "content": "answered"}
_TOLD = {"role": "system", "content": "instructed"}
_AGAIN = {"role": "user", "content": "again"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What harmless renderings show."""

    preamble: str  # what opens a conversation that starts with a user: BOS, a default system text
    bos: str  # what opens every other one
    opening: str  # the generation prompt
    folds_system: bool  # a system message alone is not written: it waits for the turn behind it
    arguments: str  # how a call's arguments can be written: as-given, object, text or none
    marker_ids: frozenset[int]  # ids that only structure may have
    end_ids: frozenset[int]  # those of them that are special tokens: one of them ends a turn
    closing: tuple[int, ...]  # the special tokens that end an assistant's turn
    literals: tuple[str, ...]  # texts that become such an id, longest first


def find_facts(engine: JinjaEngine) -> TemplateFacts:
    """Try the template; TemplateError when it cannot be trained with."""
    asked = engine.text([ASKED])
    prompt = engine.text([ASKED], prompt=True)
    answered = engine.text([ASKED, ANSWERED])
    if not (prompt.startswith(asked) and answered.startswith(prompt)):
        raise TemplateError(
            f"what the template writes for a question, {asked!r}, for the question with the "
            f"generation prompt, {prompt!r}, and with an answer, {answered!r}, do not begin alike: "
            "each must begin with the one before it. A template that rewrites earlier turns, or "
            "writes something behind whichever turn is the last, has no turns to train on"
        )
    if not starts_with_words(answered[len(prompt) :], ANSWERED["content"]):
        raise TemplateError(
            f"behind the generation prompt {prompt!r} the template writes "
            f"{answered[len(prompt) :]!r}, which does not start with the answer "
            f"{ANSWERED['content']!r}: it must write the assistant's opening when "
            "add_generation_prompt is true, and nothing else before the words"
        )
    specials = special_tokens(engine)
    markers = structure_tokens(engine, specials, [asked, prompt, answered])
    literals = {*specials, *markers}
    ends = frozenset(number for text, number in markers.items() if text in specials)
    opening = prompt[len(asked) :]
    preamble, bos = _preamble(engine, opening)
    return TemplateFacts(
        preamble=preamble,
        bos=bos,
        opening=opening,
        folds_system=_TOLD["content"] not in (text_or_none(engine, [_TOLD], None) or ""),
        arguments=arguments_form(lambda call: _write_call(engine, call)),
        marker_ids=frozenset(markers.values()),
        end_ids=ends,
        closing=_closing(engine.ids([answered])[0], ends),
        literals=tuple(sorted(literals, key=lambda text: (-len(text), text))),
    )


def special_tokens(engine: JinjaEngine) -> dict[str, int]:
    """Literal to id of every special token."""
    tokenizer = engine.tokenizer
    found = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=False))
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            found[str(token.content)] = int(number)
    return {text: number for text, number in found.items() if text}


def structure_tokens(
    engine: JinjaEngine, specials: dict[str, int], written: list[str]
) -> dict[str, int]:
    """The special tokens, and other added tokens that the template itself writes.

    Added tokens that no template writes (runs of blanks, HTML tags) are ordinary text. The unknown
    token is text too, unless it does another job as well.
    """
    found = dict(specials)
    unknown = getattr(engine.tokenizer, "unk_token", None)
    jobs = ("bos_token", "eos_token", "pad_token", "sep_token", "cls_token")
    busy = {getattr(engine.tokenizer, job, None) for job in jobs}
    if unknown in found and unknown not in engine.source and unknown not in busy:
        del found[unknown]
    seen = engine.source + "\0" + "\0".join(written)
    for number, token in engine.tokenizer.added_tokens_decoder.items():
        text = str(token.content)
        if text.strip() and text in seen and (text != unknown or text in found):
            found[text] = int(number)
    return found


def text_or_none(
    engine: JinjaEngine, messages: Messages, tools: Tools, *, prompt: bool = False
) -> str | None:
    """What the template writes; None when it refuses these messages."""
    try:
        return engine.text(messages, tools, prompt=prompt)
    except TemplateError:
        return None


def find_preamble(engine: JinjaEngine, messages: Messages, tools: Tools, whole: str) -> str | None:
    """What stands before the first turn, by writing its message once more, behind an exchange.

    whole: what the template writes for `messages`, here the first one. None when the two writings
    differ, so that nobody can say.
    """
    before = text_or_none(engine, [ASKED, ANSWERED], tools)
    behind = text_or_none(engine, [ASKED, ANSWERED, *messages], tools)
    if before is None or behind is None or not behind.startswith(before):
        return None
    turn = behind[len(before) :]
    return whole[: -len(turn)] if turn and whole.endswith(turn) else None


def _preamble(engine: JinjaEngine, opening: str) -> tuple[str, str]:
    """What opens a conversation that a user starts, and the BOS in it."""
    whole = engine.text([_AGAIN])
    found = find_preamble(engine, [_AGAIN], None, whole)
    bos = getattr(engine.tokenizer, "bos_token", None) or ""
    if found is None:
        # A BOS that also opens the assistant's turn is no BOS.
        bos = bos if whole.startswith(bos) and bos not in opening else ""
        return bos, bos
    return found, bos if found.startswith(bos) else ""


def _write_call(engine: JinjaEngine, call: dict[str, Any]) -> str | None:
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    return text_or_none(engine, [ASKED, calling], None)


def _closing(ids: IntArray, ends: frozenset[int]) -> tuple[int, ...]:
    """The last run of end ids."""
    found: list[int] = []
    for number in reversed(ids.tolist()):
        if number in ends:
            found.append(number)
        elif found:
            break
    return tuple(reversed(found))
