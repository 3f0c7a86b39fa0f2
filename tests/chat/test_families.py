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
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from shardmill.chat import (
    KNOWN_TEMPLATES,
    Rendered,
    TokenTemplate,
    TrainPolicy,
    bind_template,
    known_template,
    prove_mask,
)
from shardmill.protocols import Tokenizer
from shardmill.records import Conversation
from shardmill.tokenizers.huggingface import HuggingFaceTokenizer
from tests.chat.family_kit import (
    CASES,
    FAMILIES,
    FOUND,
    MARBLE,
    SAID,
    SLATE,
    STOCK,
    TOLD,
    TOOL,
    USER,
    call,
    calls,
    result,
    tokenizer_of,
)
from tests.chat.jinja_kit import marked

PLAIN = TrainPolicy()
STOCKS = [(name, stock) for name, family in FAMILIES.items() for stock in family.stock]
needs_stock = pytest.mark.skipif(not STOCK.is_dir(), reason="SHARDMILL_REAL_DATA is not set")

ALL_PLAIN = (
    *("plain", "turns", "system", "system, turns", "emoji", "newlines inside", "blanks around"),
    *("newlines after", "newlines before", "empty answer"),
)
THOUGHT = tuple(case for case in CASES if "reasoning" in case)
QWEN3 = {
    # The block of an earlier answer without reasoning is written, as where it was the last one.
    "edited": (
        *("turns", "system, turns", "result", "result, tools", "results in a run", "odd result"),
        "two rounds",
    ),
    # Reasoning of earlier turns stays. Two newlines before the tools are not written for nothing.
    "last turns": ("reasoning, turns", "tools, empty system"),
    # Newlines around reasoning, and before the words after it, stay.
    "differs": ("newlines before", "odd reasoning"),
}
LLAMA = {
    "edited": ALL_PLAIN,
    "last turns": ("empty system",),  # a system turn, though empty, is written
}
PHI_35 = {
    "edited": tuple(case for case in ALL_PLAIN if case[-4:] not in ("ound", "fore")),
    "differs": ("blanks around", "newlines before"),  # stay at the start of a content
    "last turns": ("empty system",),  # a system turn, though empty, is written
}
NO_SYSTEM = {"refused": ("system", "system, turns", "empty system")}
GLM = {
    # White space around answers and reasoning stays.
    "differs": (
        *("blanks around", "newlines after", "newlines before", "empty answer"),
        "odd reasoning",
    ),
    # Reasoning of earlier turns stays. An empty system turn is not written after tools.
    "last turns": ("reasoning, turns", "tools, empty system"),
}
GLM["edited"] = tuple(
    case for case in CASES if case not in (*GLM["differs"], *GLM["last turns"])
)  # the end of the last answer
OUTCOMES: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("qwen2.5", "trl/qwen2_5.jinja"): {
        "text": ("newlines before",),
        "last turns": ("tools, empty system",),
    },
    ("qwen3", "trl/qwen3.jinja"): QWEN3,
    ("qwen3", "llama.cpp/Qwen-Qwen3-0.6B.jinja"): QWEN3,
    ("qwen3-instruct", "trl/qwen3_instruct_2507.jinja"): {
        "text": ("newlines before",),
        "last turns": ("tools, empty system",),
    },
    ("llama-3", "trl/llama3.jinja"): {},
    ("llama-3", "trl/llama3_1.jinja"): LLAMA,
    ("llama-3", "trl/llama3_2.jinja"): LLAMA,
    ("gemma", "trl/gemma3.jinja"): {"text": ("empty system",)},
    ("gemma", "trl/gemma.jinja"): NO_SYSTEM,
    ("gemma", "llama.cpp/google-gemma-2-2b-it.jinja"): NO_SYSTEM,
    ("mistral", "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506.jinja"): {
        "edited": (
            *(case for case in ALL_PLAIN if "system" not in case),
            *("tools", "call", "parallel calls", "result", "results in a run", "odd result"),
            "two rounds",
        ),
        "last turns": ("result, tools",),  # tools stay before the first question
        "differs": ("call with words", "parallel calls with words"),  # the words are kept
    },
    ("mistral-v3", "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407.jinja"): {
        "last turns": ("system", "system, turns", "empty system"),  # in the first question
    },
    ("phi-3", "trl/phi3.jinja"): {
        "edited": (*PHI_35["edited"], "empty system"),
        "differs": PHI_35["differs"],
    },
    ("phi-3", "trl/phi3_5.jinja"): PHI_35,
    ("phi-3", "llama.cpp/microsoft-Phi-3.5-mini-instruct.jinja"): PHI_35,
    ("smollm3", "llama.cpp/HuggingFaceTB-SmolLM3-3B.jinja"): {
        "last turns": ("empty system",),  # is empty, not replaced by the default
        "differs": ("newlines before",),  # stay
    },
    ("glm-4.5", "trl/glm4moe.jinja"): GLM,
    ("glm-4.5", "llama.cpp/GLM-4.6.jinja"): GLM,
    ("deepseek-r1", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja"): {
        "differs": ("reasoning", "reasoning, turns", "odd reasoning"),  # stays
        "declined: no_place_for_system": ("empty system",),
    },
    ("deepseek-r1", "trl/deepseekv3.jinja"): {
        "differs": ("reasoning", "reasoning, turns", "odd reasoning"),
        "declined: no_place_for_system": ("empty system",),
    },
    ("gpt-oss", "trl/gptoss.jinja"): {
        "edited": (
            *(*ALL_PLAIN, "call", "call with words", "result", "odd result", "two rounds"),
            *("reasoning", "odd reasoning"),
        ),
        # Reasoning of earlier turns stays. An empty system turn is written.
        "last turns": ("reasoning, turns", "reasoning, call", "empty system"),
        "differs": ("parallel calls", "parallel calls with words", "results in a run"),  # all calls
        "refused": ("reasoning, words, call",),
    },
}
"""What is not the same, for each stock template. What ours declines for want of tools, calls or
reasoning is not listed."""


@functools.cache
def opened(name: str) -> tuple[TokenTemplate, Tokenizer]:
    """Our template of a family, on our reading of its tokenizer."""
    names = {text: text for text in FAMILIES[name].named}
    model = str(tokenizer_of(name).backend_tokenizer.to_str())
    tokenizer: Tokenizer = HuggingFaceTokenizer(model, names=names)
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
    return stock_ids(name, stock, messages, tools, edited=True)[-len(turn) :] == turn


def stock_ids(
    name: str, stock: str, messages: Any, tools: Any, *, edited: bool = False
) -> list[int]:
    """The ids of the stock template; some take no content, others an empty one, beside calls."""
    for empty in ("",) if FAMILIES[name].writes_none else (None, ""):
        given = [
            {**m, "content": empty if m["content"] is None else m["content"]} for m in messages
        ]
        try:
            return ids_of(name, stock_text(name, stock, given, tools, edited=edited))
        except (TemplateError, TypeError):
            if empty == "":
                raise
    raise AssertionError


def no_place(name: str, case: str) -> str | None:
    """The outcome of a conversation that holds what the template has no place for."""
    spec, (messages, tools) = known_template(name), CASES[case]
    if tools and spec.tools is None:
        return "declined: no_place_for_tools"
    if spec.tool_call is None and any("tool_calls" in message for message in messages):
        return "declined: no_place_for_tool_calls"
    if spec.reasoning is None and any("reasoning_content" in message for message in messages):
        return "declined: no_place_for_reasoning"
    return None


@needs_stock
def test_every_stock_template_has_its_outcomes() -> None:
    assert set(OUTCOMES) == set(STOCKS)


@needs_stock
@pytest.mark.parametrize(("name", "stock"), STOCKS)
def test_tokens_are_those_of_the_familys_own_template(name: str, stock: str) -> None:
    listed = {case: how for how, cases in OUTCOMES[name, stock].items() for case in cases}
    assert {case: outcome_of(name, stock, case) for case in CASES} == {
        case: no_place(name, case) or listed.get(case, "same") for case in CASES
    }


@needs_stock
@pytest.mark.parametrize(("name", "stock"), STOCKS)
@pytest.mark.parametrize("case", ["turns", "reasoning"])
def test_an_answer_is_trained_from_the_end_of_the_familys_generation_prompt(
    name: str, stock: str, case: str
) -> None:
    family, (messages, tools) = FAMILIES[name], CASES[case]
    examples = ours(name, messages, tools).examples
    thinks = case == "reasoning"
    if not len(examples.ids) or (family.always_thinks and not thinks):
        return
    start = int(examples.turn_starts[-1])
    first = start + int(examples.mask[start:].argmax())
    opening, said = (
        opened(name)[1].decode(ids)
        for ids in (examples.ids.values[start:first], examples.ids.values[first:])
    )
    options = {"enable_thinking": thinks} if family.switch else {}
    text = stock_text(name, stock, messages[:-1], tools, add_generation_prompt=True, **options)
    prompt = opened(name)[1].decode(ids_of(name, text))
    if family.always_thinks:
        assert prompt.endswith(opening + "<think>\n")
        assert said.startswith("<think>\n")
    elif thinks:
        assert prompt.endswith(opening)
    else:
        assert opening.endswith(family.left_to_say)
        assert prompt.endswith(opening.removesuffix(family.left_to_say))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mask_of_every_family_is_proved(name: str) -> None:
    template, tokenizer = opened(name)
    proved = prove_mask(template, tokenizer)
    assert proved.trim == ("both" if name in ("llama-3", "gemma") else "none")
    assert proved.end == tokenizer.decode(template.end_ids)
    assert set(proved.declined[str(PLAIN)]) <= {
        "no_place_for_tools",
        "no_place_for_tool_calls",
        "no_place_for_reasoning",
        "no_place_for_system",
    }


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("train_on", ["assistant", "last-assistant", "all"])
def test_a_message_with_a_key_more_is_written_as_without(name: str, train_on: Any) -> None:
    """Plain conversations take a shorter way than others; both give the same."""
    policy = TrainPolicy(train_on=train_on)
    chats = [messages for messages, tools in CASES.values() if tools is None]
    more = [[{**message, "weight": 1} for message in messages] for messages in chats]
    here, there = (
        opened(name)[0].render([Conversation(messages=one) for one in given], policy)
        for given in (chats, more)
    )
    assert here.kept.tolist() == there.kept.tolist()
    assert here.drops == there.drops
    assert here.examples.ids == there.examples.ids
    for part in ("mask", "turn_starts", "turn_roles"):
        assert getattr(here.examples, part).tolist() == getattr(there.examples, part).tolist()


TALK = [
    *(TOLD, USER, calls(MARBLE, SLATE, content="Wait.", reasoning_content="Look.")),
    *(FOUND, result("Wales", 2), {**SAID, "content": "Italy."}),
]
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, "
    "final. Channel must be included for every message.<|end|>"
)
LAST_CALL = '{"name": "find_quarry", "arguments": {"stone": "slate"}}'


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "qwen3",
            "|<|im_start|>system\nBe brief.<|im_end|>\n"
            "|<|im_start|>user\nWhere is marble from?<|im_end|>\n"
            "|<|im_start|>assistant\n[<think>\nLook.\n</think>\n\nWait.\n<tool_call>\n"
            '{"name": "find_quarry", "arguments": {"stone": "marble"}}\n</tool_call>\n'
            f"<tool_call>\n{LAST_CALL}\n</tool_call><|im_end|>]\n"
            '|<|im_start|>user\n<tool_response>\n{"found": ["Carrara", "Paros"]}\n'
            "</tool_response>\n<tool_response>\nWales\n</tool_response><|im_end|>\n"
            "|<|im_start|>assistant\n<think>\n\n</think>\n\n[Italy.<|im_end|>]\n",
        ),
        (
            "gpt-oss",
            "|<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
            "|<|start|>user<|message|>Where is marble from?<|end|>"
            "|<|start|>assistant[<|channel|>analysis<|message|>Look.<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>Wait.<|end|>"
            "<|start|>assistant to=functions.find_quarry<|channel|>commentary json<|message|>"
            '{"stone": "marble"}<|call|><|start|>assistant to=functions.find_quarry'
            '<|channel|>commentary json<|message|>{"stone": "slate"}<|call|>]'
            "|<|start|>functions.find_quarry to=assistant<|channel|>commentary<|message|>"
            '"{\\"found\\": [\\"Carrara\\", \\"Paros\\"]}"<|end|>'
            "|<|start|>functions.find_quarry to=assistant<|channel|>commentary<|message|>"
            '"Wales"<|end|>'
            "|<|start|>assistant<|channel|>final<|message|>[Italy.<|return|>]",
        ),
    ],
)
def test_what_is_trained_of_a_conversation_with_tools(name: str, wanted: str) -> None:
    assert marked(tokenizer_of(name), ours(name, TALK, None)).removeprefix(HARMONY) == wanted


def test_mistral_writes_ids_and_trains_calls() -> None:
    talk = [message for message in TALK if "reasoning_content" not in message]
    talk.insert(2, calls(MARBLE, SLATE, content="Wait."))
    assert marked(tokenizer_of("mistral"), ours("mistral", talk, [TOOL])) == (
        "<s>|[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][AVAILABLE_TOOLS]["
        f"{json.dumps(TOOL)}][/AVAILABLE_TOOLS]|[INST]Where is marble from?[/INST]"
        '|[Wait.[TOOL_CALLS]find_quarry[CALL_ID]call00001[ARGS]{"stone": "marble"}'
        '[TOOL_CALLS]find_quarry[CALL_ID]call00002[ARGS]{"stone": "slate"}</s>]'
        '|[TOOL_RESULTS]call00001[TOOL_CONTENT]{"found": ["Carrara", "Paros"]}[/TOOL_RESULTS]'
        "|[TOOL_RESULTS]call00002[TOOL_CONTENT]Wales[/TOOL_RESULTS]|[Italy.</s>]"
    )


def test_a_default_system_text_is_no_turn() -> None:
    examples = ours("qwen2.5", [USER, SAID], None).examples
    assert examples.turn_roles.tolist() == [1, 2]
    before = examples.ids.values[: examples.turn_starts[0]]
    assert opened("qwen2.5")[1].decode(before) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n"
    )


ESCAPED = '{"a": "\\ud800"}'


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("mistral", [USER, calls({"name": "f", "arguments": {}})], "bad_tool_call"),
        ("mistral", [USER, SAID, {"role": "tool", "content": "3"}], "bad_tool_call"),
        ("gpt-oss", [USER, SAID, {"role": "tool", "content": "3"}], "bad_tool_call"),
        ("gpt-oss", [USER, calls(MARBLE), {"role": "tool", "content": "3"}], None),
        ("qwen3", [USER, calls(MARBLE), {**FOUND, "train": True}, FOUND, SAID], "mixed_train"),
        ("qwen3", [USER, calls(MARBLE), FOUND, {**FOUND, "train": False}, SAID], None),
        ("glm-4.5", [USER, calls({"name": "f", "arguments": ESCAPED})], "invalid_unicode"),
        ("glm-4.5", [USER, calls({"name": "f", "arguments": "{}"})], None),
        ("qwen3", [USER, calls({"name": "f", "arguments": ESCAPED})], None),
        ("deepseek-r1", [USER, TOLD, SAID], "system_not_first"),
        ("mistral-v3", [USER, TOLD, SAID], "system_not_first"),
    ],
)
def test_what_a_family_cannot_write_is_dropped_with_a_reason(
    name: str, messages: list[dict[str, Any]], reason: str | None
) -> None:
    assert [drop.reason for drop in ours(name, messages, None).drops] == [reason] * bool(reason)


def test_a_result_is_written_with_the_function_it_answers() -> None:
    weigh = call("weigh", 2)
    for order, named in (
        ([result("a", 2), result("b", 1)], ["weigh", "find_quarry"]),  # by id
        ([{"role": "tool", "content": "a"}] * 3, ["find_quarry", "weigh", "weigh"]),  # in order
    ):
        talk = [USER, calls(MARBLE, weigh), *order]
        text = marked(tokenizer_of("gpt-oss"), ours("gpt-oss", talk, None))
        assert re.findall(r"<\|start\|>functions\.(\w+)", text) == named


def test_the_documents_list_every_known_template() -> None:
    text = (Path(__file__).parents[2] / "docs" / "chats.md").read_text()
    listed = re.findall(r"^\| `([a-z0-9.-]+)` \|", text, re.MULTILINE)
    assert [name for name in listed if name in KNOWN_TEMPLATES] == [*KNOWN_TEMPLATES]


# White space at the start of a content, and what looks like a token, are not drawn.
WORDS = st.text("ab Z9.,:{}\"'\\\n\t\u00e9\u4e2d\U0001f600_-?/", max_size=12).filter(
    lambda text: text[:1].strip() == text[:1]
)
CALLS = st.lists(st.dictionaries(WORDS, WORDS | st.integers(), max_size=2), min_size=1, max_size=3)
EXACT = ["qwen2.5", "qwen3", "qwen3-instruct", "llama-3", "gemma", "mistral", "glm-4.5"]


@st.composite
def conversations(draw: st.DrawFn, name: str) -> tuple[list[dict[str, Any]], Any]:
    """A conversation that the family's own template and ours can write."""
    spec = known_template(name)
    # GLM's own strips what the assistant says.
    words = WORDS if name != "glm-4.5" else WORDS.filter(lambda text: text and text.strip() == text)
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(WORDS.filter(bool))})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        while spec.tool_call and draw(st.integers(0, 2)) == 2:
            made = [call("f_x", n, a=one) for n, one in enumerate(draw(CALLS))]
            said = None if name == "mistral" else draw(st.none() | words)
            messages.append(calls(*made, content=said))
            messages += [result(draw(WORDS), n) for n in range(len(made))]
        messages.append({"role": "assistant", "content": draw(words)})
    tools = [TOOL] if spec.tools and name != "mistral" and draw(st.booleans()) else None
    return messages, tools


def stock_of(name: str) -> str:
    return FAMILIES[name].stock[0]


@needs_stock
@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_conversation_has_the_tokens_of_the_familys_own_template(
    name: str, data: st.DataObject
) -> None:
    messages, tools = data.draw(conversations(name))
    rendered = ours(name, messages, tools)
    assert rendered.drops == ()
    assert rendered.examples.ids.values.tolist() == stock_ids(
        name, stock_of(name), messages, tools, edited=True
    )
