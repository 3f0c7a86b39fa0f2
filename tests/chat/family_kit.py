"""Small tokenizers of model families, and conversations of every shape that templates write."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

STOCK = Path(os.environ.get("SHARDMILL_REAL_DATA", "")) / "templates"

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen": rf"{_ENDINGS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}",
    "llama": rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}",
    "tekken": rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
    "o200k": rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
}
"""How the tokenizers of a family divide a text before they merge bytes."""

LINES = [
    "user\nassistant\nsystem\nmodel\ntool\n\n the quick brown fox. It sleeps.\n\nWhy?\nYes!\n",
    '{"name": "find_quarry", "arguments": {"stone": "marble"}}\n{"found": ["Carrara"]}\n',
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n```json\n",
    "  so  many   blanks \t and\ttabs\n \n\n  \n",
]


@functools.cache
def _trained(kind: str) -> str:
    """A small tokenizer.json without special tokens. The merges cross punctuation and newlines, so
    a text encoded in two parts shows."""
    if kind in SPLITS:
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(SPLITS[kind]), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(LINES * 30, trainer)
        return str(tokenizer.to_str())
    # SentencePiece: blanks are a letter, and what is not in the vocabulary is bytes.
    tokenizer = Tokenizer(models.BPE())
    blank = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = blank
    # Their merges never cross a newline.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|\u2581?[^\u2581\n]+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    tokenizer.train_from_iterator(LINES * 30, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {letter: number for number, letter in enumerate(letters)}
    merges = [tuple(pair) for pair in model["merges"]]
    bpe = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "phi":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), blank])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = blank
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(steps)
    return str(tokenizer.to_str())


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is needed to compare one of our templates with a stock one."""

    stock: tuple[str, ...]  # files below templates/
    split: str  # a kind of tokenizer
    specials: tuple[str, ...]
    in_text: tuple[str, ...] = ()  # added tokens that are not special
    named: tuple[str, ...] = ()  # of in_text: markers that the tokenizer's file does not mark
    bos: str | None = None
    eos: str | None = None
    takes_blanks: bool = False  # a special token swallows the white space after it
    edits: tuple[tuple[str, str], ...] = ()  # of the text it writes, before it is compared
    writes_none: bool = False  # its template writes "None" where there is no content
    switch: bool = False  # enable_thinking decides on its generation prompt
    always_thinks: bool = False  # its generation prompt opens a block of reasoning
    left_to_say: str = ""  # the end of our opening, which its generation prompt does not have
    thinking: str = "reasoning_content"  # the key it reads reasoning from, or how a content has it


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>")
_THINK = ("<think>", "</think>")
_SPEAKERS = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]"),
)
FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(stock=("trl/qwen2_5.jinja",), split="qwen", specials=_CHATML, in_text=_TAGS),
    "qwen3": Family(
        stock=("trl/qwen3.jinja", "llama.cpp/Qwen-Qwen3-0.6B.jinja"),
        split="qwen",
        specials=_CHATML,
        in_text=(*_TAGS, *_THINK, "<tool_response>", "</tool_response>"),
        # An answer without reasoning has an empty block in every turn.
        edits=(
            (
                r"(<\|im_start\|>assistant\n)(?!<think>)",
                r"\1<think>\n\n</think>\n\n",
            ),
        ),
        switch=True,
    ),
    "qwen3-instruct": Family(
        stock=("trl/qwen3_instruct_2507.jinja",),
        split="qwen",
        specials=_CHATML,
        in_text=(*_TAGS, *_THINK, "<tool_response>", "</tool_response>"),
    ),
    "llama-3": Family(
        stock=("trl/llama3.jinja", "trl/llama3_1.jinja", "trl/llama3_2.jinja"),
        split="llama",
        specials=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        # No dates, and no system turn only for them.
        edits=(
            (r"Cutting Knowledge Date: December 2023\nToday Date: [^\n]*\n\n", ""),
            (r"<\|start_header_id\|>system<\|end_header_id\|>\n\n<\|eot_id\|>", ""),
        ),
    ),
    "gemma": Family(
        stock=("trl/gemma3.jinja", "trl/gemma.jinja", "llama.cpp/google-gemma-2-2b-it.jinja"),
        split="gemma",
        specials=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
    ),
    "mistral": Family(
        stock=("llama.cpp/Mistral-Small-3.2-24B-Instruct-2506.jinja",),
        split="tekken",
        specials=_TEKKEN,
        bos="<s>",
        eos="</s>",
        # No system prompt of its own, which has today's date.
        edits=(
            (r"(?s)(?<=\[SYSTEM_PROMPT\])You are Mistral Small 3.*?(?=\[/SYSTEM_PROMPT\])", ""),
            (r"\[SYSTEM_PROMPT\]\[/SYSTEM_PROMPT\](?!\[AVAILABLE_TOOLS\])", ""),
        ),
    ),
    "mistral-v3": Family(
        stock=("llama.cpp/mistralai-Mistral-Nemo-Instruct-2407.jinja",),
        split="tekken",
        specials=_TEKKEN,
        bos="<s>",
        eos="</s>",
    ),
    "phi-3": Family(
        stock=(
            "trl/phi3.jinja",
            "trl/phi3_5.jinja",
            "llama.cpp/microsoft-Phi-3.5-mini-instruct.jinja",
        ),
        split="phi",
        specials=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        eos="<|endoftext|>",
        takes_blanks=True,
        edits=((r"<\|endoftext\|>$", ""),),  # nothing at the end of the conversation
    ),
    "phi-4": Family(
        stock=(),  # its format is published without a file that could be compared
        split="llama",
        specials=("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    ),
    "smollm3": Family(
        stock=("llama.cpp/HuggingFaceTB-SmolLM3-3B.jinja",),
        split="llama",
        specials=_CHATML,
        in_text=(*_THINK, *_TAGS),
        thinking="<think>\n{}\n</think>\n",
    ),
    "glm-4.5": Family(
        stock=("trl/glm4moe.jinja", "llama.cpp/GLM-4.6.jinja"),
        split="llama",
        specials=(
            *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            "<|endoftext|>",
        ),
        in_text=(
            *(*_THINK, *_TAGS, "<tool_response>", "</tool_response>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        writes_none=True,
        switch=True,
        # The last answer has an end too.
        edits=(
            (r"(</tool_call>)\Z", r"\1<|observation|>"),
            (r"(?<!<\|observation\|>)\Z", "<|user|>"),
        ),
        left_to_say="\n",
    ),
    "deepseek-r1": Family(
        stock=(
            "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
            "trl/deepseekv3.jinja",
        ),
        split="qwen",
        specials=(
            "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
        ),
        in_text=(*_SPEAKERS, *_THINK),
        named=_SPEAKERS,
        switch=True,
        always_thinks=True,
        bos="<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    ),
    "gpt-oss": Family(
        stock=("trl/gptoss.jinja",),
        split="o200k",
        specials=(
            *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
            "<|constrain|>",
        ),
        thinking="thinking",
        # No date, and every answer ends as one that is not followed by others.
        edits=(
            (r"Current date: \d{4}-\d\d-\d\d\n", ""),
            (r"(<\|channel\|>final<\|message\|>[^<]*)<\|end\|>", r"\1<|return|>"),
        ),
        left_to_say="<|channel|>final<|message|>",
    ),
}


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, as transformers opens it."""
    family = FAMILIES[name]
    tokenizer = Tokenizer.from_str(_trained(family.split))
    rstrip = family.takes_blanks
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False, rstrip=rstrip)
            for text in family.specials
        ]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.in_text])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.eos
    )


# Conversations by their shapes.

USER = {"role": "user", "content": "Where is marble from?"}
TOLD = {"role": "system", "content": "Be brief."}
SAID = {"role": "assistant", "content": "Out of Italy."}
AGAIN = {"role": "user", "content": "And slate?"}
WALES = {"role": "assistant", "content": "Wales!"}
TOOL = {
    "type": "function",
    "function": {
        "name": "find_quarry",
        "description": "Where a stone is quarried.",
        "parameters": {"type": "object", "properties": {"stone": {"type": "string"}}},
    },
}
OTHER_TOOL = {
    "type": "function",
    "function": {"name": "weigh", "description": "In kg.", "parameters": {"type": "object"}},
}


def call(name: str, number: int = 1, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def calls(*made: dict[str, Any], content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(made), **more}


def result(content: str, number: int = 1) -> dict[str, Any]:
    name = {"name": "find_quarry", "tool_call_id": f"call{number:05}"}
    return {"role": "tool", "content": content, **name}


MARBLE, SLATE = call("find_quarry", 1, stone="marble"), call("find_quarry", 2, stone="slate")
FOUND = result('{"found": ["Carrara", "Paros"]}')

CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": ([USER, SAID], None),
    "turns": ([USER, SAID, AGAIN, WALES, USER, SAID], None),
    "system": ([TOLD, USER, SAID], None),
    "system, turns": ([TOLD, USER, SAID, AGAIN, WALES], None),
    "empty system": ([{**TOLD, "content": ""}, USER, SAID], None),
    "emoji": (
        [
            {"role": "user", "content": "\U0001f468\u200d\U0001f469 1\ufe0f\u20e3 \u65e5\u672c"},
            {"role": "assistant", "content": "e\u0301 \u0645\u0631 \U0001f44b\U0001f3fd"},
        ],
        None,
    ),
    "newlines inside": (
        [
            {"role": "user", "content": "a\n\n\nb\r\n\tc"},
            {"role": "assistant", "content": "def f(x):\n    return x\n\n\nf(1)"},
        ],
        None,
    ),
    "blanks around": (
        [{"role": "user", "content": "  so "}, {"role": "assistant", "content": "  well  "}],
        None,
    ),
    "newlines after": (
        [{"role": "user", "content": "so\n\n"}, {"role": "assistant", "content": "well.\n"}],
        None,
    ),
    "newlines before": (
        [{"role": "user", "content": "\n\nso"}, {"role": "assistant", "content": "\nwell"}],
        None,
    ),
    "empty answer": ([USER, {**SAID, "content": ""}], None),
    "tools": ([USER, SAID], [TOOL, OTHER_TOOL]),
    "tools, system": ([TOLD, USER, SAID], [TOOL]),
    "tools, empty system": ([{**TOLD, "content": ""}, USER, SAID], [TOOL]),
    "call": ([USER, calls(MARBLE)], None),
    "call, tools": ([TOLD, USER, calls(MARBLE)], [TOOL]),
    "call with words": ([USER, calls(MARBLE, content="Let me look.")], None),
    "parallel calls": ([USER, calls(MARBLE, SLATE)], None),
    "parallel calls with words": ([USER, calls(MARBLE, SLATE, content="Wait:")], None),
    "result": ([USER, calls(MARBLE), FOUND, SAID], None),
    "result, tools": ([TOLD, USER, calls(MARBLE), FOUND, SAID, AGAIN, WALES], [TOOL]),
    "results in a run": ([USER, calls(MARBLE, SLATE), FOUND, result("Wales", 2), SAID], None),
    "odd result": ([USER, calls(MARBLE), result('\n "a\\b" \n'), SAID], None),
    "two rounds": ([USER, calls(MARBLE), FOUND, calls(SLATE), result("Wales", 2), SAID], None),
    "reasoning": ([USER, {**SAID, "reasoning_content": "Think.\n\nCarrara."}], None),
    "reasoning, turns": (
        [
            TOLD,
            USER,
            {**SAID, "reasoning_content": "Carrara?"},
            AGAIN,
            {**WALES, "reasoning_content": "Hm: Wales"},
        ],
        None,
    ),
    "reasoning, call": (
        [
            USER,
            calls(MARBLE, reasoning_content="Look."),
            FOUND,
            {**SAID, "reasoning_content": "So"},
        ],
        None,
    ),
    "reasoning, words, call": (
        [USER, calls(MARBLE, content="Wait.", reasoning_content="Look.")],
        None,
    ),
    "odd reasoning": ([USER, {**SAID, "reasoning_content": "\n Think \n"}], None),
}
