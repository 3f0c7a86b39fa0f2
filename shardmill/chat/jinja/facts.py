"""What a Jinja template does, found once by trying it on harmless messages.

A template that cannot write a question and its answer, or whose answer does not follow its
generation prompt, is refused here with what it wrote. This is no proof: every conversation is
checked again when it is rendered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shardmill.chat.jinja.engine import JinjaEngine, Messages, Tools
from shardmill.errors import TemplateError

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
    literals: tuple[str, ...]  # texts that become a marker, longest first


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
        literals=tuple(sorted({*specials, *markers}, key=lambda text: (-len(text), text))),
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
