"""The known templates once more, one message at a time, in the plainest words there are."""

from __future__ import annotations

import json
from typing import Any

from shardmill.chat import TrainPolicy
from shardmill.protocols import Tokenizer
from shardmill.records import Conversation

TURN, WORDS, END, AFTER = "turn", "words", "end", "after"
Part = tuple[str, str, bool]
"""(kind, text or marker, is it a marker)"""

TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def mark(kind: str, marker: str) -> Part:
    return (kind, marker, True)


def text(kind: str, words: str) -> Part:
    return (kind, words, False)


def chatml(message: dict[str, Any], tools: list[Any] | None) -> list[Part]:
    role, content = message["role"], message["content"]
    if role == "tool":
        return [
            mark(TURN, "<|im_start|>"),
            text(TURN, "tool\n<tool_response>\n"),
            text(WORDS, content),
            text(END, "\n</tool_response>"),
            mark(END, "<|im_end|>"),
            text(AFTER, "\n"),
        ]
    parts = [mark(TURN, "<|im_start|>"), text(TURN, f"{role}\n")]
    if message.get("reasoning_content"):
        parts += [text(WORDS, "<think>\n"), text(WORDS, message["reasoning_content"])]
        parts += [text(WORDS, "\n</think>\n\n")]
    if content is not None:
        parts += [text(WORDS, content)]
    preceded = bool(content)
    for call in message.get("tool_calls") or []:
        if preceded:
            parts += [text(WORDS, "\n")]
        parts += [text(WORDS, "<tool_call>\n")]
        written = {"name": call["name"], "arguments": call["arguments"]}
        parts += [text(WORDS, json.dumps(written, ensure_ascii=False))]
        parts += [text(WORDS, "\n</tool_call>")]
        preceded = True
    if tools:
        if content:
            parts += [text(WORDS, "\n\n")]
        parts += [text(WORDS, TOOLS_HEAD)]
        parts += [text(WORDS, "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))]
        parts += [text(WORDS, TOOLS_TAIL)]
    return [*parts, mark(END, "<|im_end|>"), text(AFTER, "\n")]


def llama(message: dict[str, Any]) -> list[Part]:
    return [
        mark(TURN, "<|start_header_id|>"),
        text(TURN, message["role"]),
        mark(TURN, "<|end_header_id|>"),
        text(TURN, "\n\n"),
        text(WORDS, message["content"].strip()),
        mark(END, "<|eot_id|>"),
    ]


def gemma(message: dict[str, Any], system: str) -> list[Part]:
    name = "model" if message["role"] == "assistant" else "user"
    return [
        mark(TURN, "<start_of_turn>"),
        text(TURN, f"{name}\n"),
        text(WORDS, system + message["content"].strip()),
        mark(END, "<end_of_turn>"),
        text(AFTER, "\n"),
    ]


def four_marker(message: dict[str, Any]) -> list[Part]:
    opening = {"system": "<|sys|>", "user": "<|usr|>", "assistant": "<|asst|>"}[message["role"]]
    return [mark(TURN, opening), text(WORDS, message["content"]), mark(END, "<|eot|>")]


def turns_of(name: str, conversation: Conversation) -> list[tuple[dict[str, Any], list[Part]]]:
    """(message, its parts) of each turn. The messages are sound and have a place."""
    messages: list[Any] = list(conversation.messages)
    if name == "four-marker":
        return [(message, four_marker(message)) for message in messages]
    if name == "llama-3":
        return [(message, llama(message)) for message in messages]
    if name == "chatml":
        tools: Any = conversation.tools
        if tools and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": ""}, *messages]
        return [
            (message, chatml(message, tools if number == 0 else None))
            for number, message in enumerate(messages)
        ]
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n\n", messages[1:]
    return [
        (message, gemma(message, system if number == 0 else ""))
        for number, message in enumerate(messages)
    ]


BEGIN = {"llama-3": ["<|begin_of_text|>"], "gemma": ["<bos>"]}


def expected(
    name: str, conversation: Conversation, policy: TrainPolicy, tokenizer: Tokenizer
) -> tuple[list[int], list[bool], list[int], list[str]]:
    """ids, mask, where turns start, who speaks."""
    ids = [id_of(tokenizer, marker) for marker in BEGIN.get(name, [])]
    mask = [False] * len(ids)
    starts, roles = [], []
    turns = turns_of(name, conversation)
    assistants = [n for n, (message, _) in enumerate(turns) if message["role"] == "assistant"]
    for number, (message, parts) in enumerate(turns):
        if policy.train_on == "all":
            trained = True
        elif policy.train_on == "assistant":
            trained = number in assistants
        else:
            trained = number in assistants[-1:]
        trained = message.get("train", trained)
        starts.append(len(ids))
        roles.append(message["role"])
        for kind, words, is_marker in parts:
            found = [id_of(tokenizer, words)] if is_marker else tokenizer.encode(words)
            is_trained = trained and (kind == WORDS or (kind == END and policy.train_on_eot))
            ids += found
            mask += [is_trained] * len(found)
    return ids, mask, starts, roles


def id_of(tokenizer: Tokenizer, literal: str) -> int:
    specials = tokenizer.special_token_ids()
    (number,) = [number for number in specials.values() if tokenizer.decode([number]) == literal]
    return number


def said(name: str, conversation: Conversation) -> str:
    """What the assistant says in all its turns, each with its end, as text."""
    return "".join(
        words
        for message, parts in turns_of(name, conversation)
        if message["role"] == "assistant"
        for kind, words, _ in parts
        if kind in (WORDS, END)
    )
