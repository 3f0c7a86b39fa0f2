"""Published chat templates with small tokenizers, what each needs, and conversations for them.

`NEEDS` says what to write for the templates that do not train every answer by themselves;
test_published.py checks that it is right, and that nothing simpler works.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from shardmill.building.api import open_template
from shardmill.chat.jinja.template import JinjaTemplate
from shardmill.chat.policy import TrainPolicy
from shardmill.records import Conversation, ConversationBatch
from shardmill.sources.fan_out import fanned_out
from tests.chat.jinja_kit import byte_level

TEMPLATES = Path(os.environ.get("SHARDMILL_REAL_DATA", "")) / "templates"
NAMES = sorted(
    str(file.relative_to(TEMPLATES).with_suffix("")) for file in TEMPLATES.glob("*/*.jinja")
)
DATE = "2024-07-26"

_SPECIAL = re.compile(
    r"<\|[\w .:/-]+\|>|<｜[^｜<>]+｜>|</?(?:s|bos|eos|pad|start_of_turn|end_of_turn)>"
    r"|<\|turn>|<turn\|>|<\|channel>|<channel\|>|<\|tool_?\w*>|<tool_?\w*\|>|\[gMASK\]|<sop>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK|ARGS"
    r"|CALL_ID)\]"
)
_IN_TEXT = re.compile(r"</?(?:think|tool_call|tool_response)>")  # added tokens, not special
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<｜end▁of▁sentence｜>"),
    *("<|END_OF_TURN_TOKEN|>", "<|return|>", "<|endoftext|>", "</s>", "<turn|>", "<|end_of_text|>"),
)
_STARTS = (
    *("<|begin_of_text|>", "<bos>", "<s>", "<｜begin▁of▁sentence｜>", "<BOS_TOKEN>"),
    "<|startoftext|>",
)


@functools.cache
def source_of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with the template, the special tokens it writes, and the family's ends."""
    source = source_of(name)
    specials = set(_SPECIAL.findall(source))
    model = Tokenizer.from_str(byte_level().to_str())
    model.add_tokens([AddedToken(t, normalized=False) for t in sorted(_IN_TEXT.findall(source))])
    found = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=next((text for text in _STARTS if text in specials), "<s>"),
        eos_token=next((text for text in _ENDS if text in specials), "<|endoftext|>"),
        pad_token="<pad>",
        additional_special_tokens=sorted({*specials, "<s>", "</s>"}),
    )
    found.chat_template = source
    return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a build is told besides the template."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    date: bool = False
    fan_out: bool = False
    any_prompt: bool = False
    train_on_eot: bool = True

    @property
    def policy(self) -> TrainPolicy:
        train_on = "last-assistant" if self.fan_out else "assistant"
        return TrainPolicy(train_on=train_on, train_on_eot=self.train_on_eot)

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of `open_template`."""
        given = {
            "template_vars": dict(self.variables),
            "template_date": DATE if self.date else None,
            "any_prompt": self.any_prompt,
        }
        return {key: value for key, value in given.items() if value}

    @property
    def simpler(self) -> list[Options]:
        """The same with one thing less."""
        less = [replace(self, variables={})] if self.variables else []
        for name in ("date", "fan_out", "any_prompt"):
            less += [replace(self, **{name: False})] if getattr(self, name) else []
        return less if self.train_on_eot else [*less, replace(self, train_on_eot=True)]

    def __str__(self) -> str:
        flags = [
            f"--template-var {key}={json.dumps(self.variables[key])}" for key in self.variables
        ]
        flags += [f"--template-date {DATE}"] if self.date else []
        flags += ["--any-prompt"] if self.any_prompt else []
        flags += ["--fan-out"] if self.fan_out else []
        flags += [] if self.train_on_eot else ["--no-train-on-eot"]
        return " ".join(flags)


NO_THINKING = {"enable_thinking": False}
NEEDS: dict[str, Options] = {
    "llama.cpp/GLM-4.6": Options(train_on_eot=False),
    "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506": Options(date=True),
    "llama.cpp/Qwen-QwQ-32B": Options(any_prompt=True, fan_out=True),
    "llama.cpp/Qwen-Qwen3-0.6B": Options(fan_out=True),
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Options(any_prompt=True),
    "llama.cpp/google-gemma-4-31B-it": Options(any_prompt=True),
    "llama.cpp/meta-llama-Llama-3.2-3B-Instruct": Options(date=True),
    "llama.cpp/openai-gpt-oss-120b": Options(date=True, fan_out=True),
    "trl/deepseekv3": Options(any_prompt=True),
    "trl/glm4moe": Options(train_on_eot=False),
    "trl/gptoss": Options(date=True, fan_out=True),
    "trl/gptoss_training": Options(date=True),
    "trl/llama3_2": Options(date=True),
    "trl/nemotron_3_nano": Options(variables=NO_THINKING, fan_out=True),
    "trl/qwen3": Options(fan_out=True),
    "trl/qwen3_5_nothink": Options(fan_out=True),
    "trl/qwen3_5_think": Options(variables=NO_THINKING, fan_out=True),
    "trl/qwen3_6": Options(variables=NO_THINKING, fan_out=True),
}

ARGUMENTS_AS_TEXT = ("trl/deepseekv3", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B")
"""Their templates add the arguments of a call to a text; others write them as JSON."""


def options_of(name: str) -> Options:
    return NEEDS.get(name, Options())


def opened(name: str, folder: Path, options: Options | None = None) -> JinjaTemplate:
    """The template as a build opens it."""
    chosen = options_of(name) if options is None else options
    _, template, _ = open_template("jinja", saved(name, folder), **chosen.keywords)
    assert isinstance(template, JinjaTemplate)
    return template


def saved(name: str, folder: Path) -> Path:
    """The tokenizer and its template as files."""
    place = folder / name.replace("/", "-")
    if not place.exists():
        tokenizer_of(name).save_pretrained(place)
    return place


# Conversations.


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, thought: str | None = None) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": text,
        **({} if thought is None else {"reasoning_content": thought}),
    }


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def call(city: str, number: str, text: str = "") -> dict[str, Any]:
    function = {"name": "look", "arguments": {"city": city, "n": 3}}
    one = {"type": "function", "id": number, "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [one]}


def result(text: str, number: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": number, "name": "look"}


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "n": {"type": "integer", "description": "how often"},
            },
            "required": ["city"],
        },
    },
}


def conversations(words: Callable[[str], str] = str) -> dict[str, Conversation]:
    """One of each shape; `words` gives other texts in place of these."""
    w = words
    first = [user(w("what is a mill")), answer(w("a house that grinds"))]
    second = [user(w("in a land")), answer(w("of a king"))]
    looked = [
        user(w("weather")),
        call(w("Rome"), "call00001"),
        result(w("sunny"), "call00001"),
        answer(w("fine")),
    ]
    thought = [user(w("what is a mill")), answer(w("a house"), w("let me see"))]
    found = {
        "plain": first,
        "several turns": [*first, *second, user(w("so")), answer(w("bye"))],
        "system": [system(w("be nice")), *first],
        "system, several turns": [system(w("be nice")), *first, *second],
        "tools": looked,
        "tools, several turns": [*looked, *second],
        "reasoning": thought,
        "reasoning in several turns": [*thought, user(w("so")), answer(w("bye"), w("hm"))],
    }
    return {
        shape: Conversation(messages=messages, tools=[LOOK] if "tools" in shape else None, id=shape)
        for shape, messages in found.items()
    }


def divided(talks: list[Conversation], options: Options) -> list[Conversation]:
    """What the template is given for these conversations."""
    if not options.fan_out:
        return talks
    batch = ConversationBatch(conversations=tuple(talks), num_read=len(talks), drops=(), cursor={})
    return list(fanned_out(batch).conversations)
