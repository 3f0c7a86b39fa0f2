"""The known templates of model families, token by token against the families' own templates.

For each family, each of its stock templates and each conversation of `CASES` there is an outcome:

same         transformers gives the same ids for the whole conversation
edited       it does once the text of the stock template is edited as `FAMILIES` says
last turns   every answer is the same where it is the last turn: in the conversation up to it
text         the text is the same, and tokens differ only at the beginning of a content
differs      each other difference
declined     ours drops it, with the reason
refused      the stock template raises an error
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

pytest.importorskip("transformers")

from jinja2 import TemplateError

from shardmill.chat import Rendered, TokenTemplate, TrainPolicy, bind_template, known_template
from shardmill.protocols import Tokenizer
from shardmill.records import Conversation
from shardmill.tokenizers import adapt_tokenizer
from tests.chat.family_kit import CASES, FAMILIES, STOCK, tokenizer_of

PLAIN = TrainPolicy()


@functools.cache
def opened(name: str) -> tuple[TokenTemplate, Tokenizer]:
    """Our template of a family, on our reading of its tokenizer."""
    tokenizer: Tokenizer = adapt_tokenizer(tokenizer_of(name))
    return bind_template(known_template(name), tokenizer), tokenizer


def ours(name: str, messages: list[dict[str, Any]], tools: Any) -> Rendered:
    return opened(name)[0].render([Conversation(messages=messages, tools=tools)], PLAIN)


def stock_text(
    name: str, stock: str, messages: Any, tools: Any, *, edited: bool = False, **options: Any
) -> str:
    family = FAMILIES[name]
    text = str(
        tokenizer_of(name).apply_chat_template(
            [with_thinking(message, family.thinking) for message in messages],
            tools,
            chat_template=(STOCK / stock).read_text(),
            tokenize=False,
            **options,
        )
    )
    for pattern, replacement in family.edits if edited else ():
        text = re.sub(pattern, replacement, text)
    return text


def with_thinking(message: dict[str, Any], way: str) -> dict[str, Any]:
    """The message with its reasoning where the family reads it."""
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    thought = message.get("reasoning_content")
    if thought is None:
        return rest
    if "{}" in way:
        return {**rest, "content": way.format(thought) + (message["content"] or "")}
    return {**rest, way: thought}


def ids_of(name: str, text: str) -> list[int]:
    return list(tokenizer_of(name)(text, add_special_tokens=False)["input_ids"])


def outcome_of(name: str, stock: str, case: str) -> str:
    messages, tools = CASES[case]
    rendered = ours(name, messages, tools)
    if rendered.drops:
        return f"declined: {rendered.drops[0].reason}"
    try:
        wanted = stock_ids(name, stock, messages, tools)
    except (TemplateError, TypeError):
        return "refused"
    ids = rendered.examples.ids.values.tolist()
    if ids == wanted:
        return "same"
    if ids == stock_ids(name, stock, messages, tools, edited=True):
        return "edited"
    tokenizer = tokenizer_of(name)
    if tokenizer.decode(ids) == tokenizer.decode(wanted):
        return "text"
    answers = [at + 1 for at, m in enumerate(messages) if m["role"] == "assistant"]
    if all(last_turn_is_same(name, stock, messages[:stop], tools) for stop in answers):
        return "last turns"
    return "differs"


def last_turn_is_same(name: str, stock: str, messages: Any, tools: Any) -> bool:
    examples = ours(name, messages, tools).examples
    turn = examples.ids.values[examples.turn_starts[-1] :].tolist()
    return stock_ids(name, stock, messages, tools)[-len(turn) :] == turn


def stock_ids(
    name: str, stock: str, messages: Any, tools: Any, *, edited: bool = False
) -> list[int]:
    """The ids of the stock template; some take no content, others an empty one, beside calls."""
    for empty in (None, ""):
        given = [
            {**m, "content": empty if m["content"] is None else m["content"]} for m in messages
        ]
        try:
            return ids_of(name, stock_text(name, stock, given, tools, edited=edited))
        except (TemplateError, TypeError):
            if empty == "":
                raise
    raise AssertionError
