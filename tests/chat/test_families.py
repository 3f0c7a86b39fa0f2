"""The known templates of model families, token by token against the families' own templates.

For each family, each of its stock templates and each conversation of `CASES` there is an outcome:

same         transformers gives the same ids for the whole conversation
last turns   the turns before the last differ, but every turn of the assistant is the same as where
             it is the last one: in the conversation up to it
text         the text is the same, and tokens differ at the beginning of a content only
differs      the two write different texts; `DIFFERENCES` holds all of these
declined     ours drops it, with the reason
refused      the stock template raises an error
"""

from __future__ import annotations

import functools
from pathlib import Path
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


def stock_text(name: str, stock: str, messages: Any, tools: Any, *, prompt: bool = False) -> str:
    family = FAMILIES[name]
    if family.thinking != "reasoning_content":
        messages = [
            {family.thinking if key == "reasoning_content" else key: v for key, v in m.items()}
            for m in messages
        ]
    return str(
        tokenizer_of(name).apply_chat_template(
            messages,
            tools,
            chat_template=(STOCK / stock).read_text(),
            add_generation_prompt=prompt,
            tokenize=False,
            **family.variables,
        )
    )


def ids_of(name: str, text: str) -> list[int]:
    return list(tokenizer_of(name)(text, add_special_tokens=False)["input_ids"])


def compare(name: str, stock: str, case: str) -> tuple[str, str]:
    messages, tools = CASES[case]
    found = ours(name, messages, tools)
    text = opened(name)[1].decode(found.examples.ids.values)
    return text, stock_text(name, stock, messages, tools)


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


def stock_ids(name: str, stock: str, messages: Any, tools: Any) -> list[int]:
    """The ids of the stock template; some take no content, others an empty one, beside calls."""
    for empty in (None, ""):
        given = [{**m, "content": empty if m["content"] is None else m["content"]} for m in messages]
        try:
            return ids_of(name, stock_text(name, stock, given, tools))
        except (TemplateError, TypeError):
            if empty == "":
                raise
    raise AssertionError
