"""A small real tokenizer of transformers, and chat templates in Jinja, right and wrong."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardmill.chat.policy import Rendered
from shardmill.records import Conversation

SPECIALS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<s>",
    "</s>",
]

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_BLOCKS = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim"
    " + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA3_BLOCKS = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] | trim + '\\n\\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n'"
    " + (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
GEMMA_BLOCKS = GEMMA.replace(
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n'"
    " + (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}",
    "{% if m['role'] == 'assistant' %}{{ '<start_of_turn>model\\n' }}"
    "{% generation %}{{ m['content'] | trim + '<end_of_turn>\\n' }}{% endgeneration %}"
    "{% else %}{{ '<start_of_turn>' + m['role'] + '\\n'"
    " + (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}{% endif %}",
)
INST = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + '</s>' }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['reasoning_content'] %}"
    "{{ '<think>\\n' + m['reasoning_content'] + '\\n</think>\\n\\n' }}{% endif %}"
    "{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}"
    "{% if m['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + c['function']['name'] + '\", \"arguments\": ' }}"
    "{{ c['function']['arguments'] | tojson + '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}" + CHATML
)
RIGHT = {
    "chatml": CHATML,
    "chatml blocks": CHATML_BLOCKS,
    "llama-3": LLAMA3,
    "llama-3 blocks": LLAMA3_BLOCKS,
    "gemma": GEMMA,
    "gemma blocks": GEMMA_BLOCKS,
    "inst": INST,
    "tools": TOOLS,
    "default system": DEFAULT_SYSTEM,
}

_USERS_TOO = CHATML_BLOCKS.replace("m['role'] == 'assistant'", "m['role'] != 'system'")
_NO_END = CHATML_BLOCKS.replace(
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
    "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
)
OPENING_MARKED = CHATML_BLOCKS.replace(
    "{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content']",
    "{% if m['role'] != 'assistant' %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\\n' + m['content']",
)
_LAST_ONLY = CHATML_BLOCKS.replace(
    "m['role'] == 'assistant'", "m['role'] == 'assistant' and loop.last"
)
_NO_END_AT_ALL = CHATML.replace("+ '<|im_end|>' + '\\n'", "+ '\\n'")
SHORTENS = CHATML.replace("m['content'] +", "(m['content'] if loop.last else m['content'][:3]) +")
_SHORTENS_ANSWERS = CHATML.replace(
    "m['content'] +",
    "(m['content'] if loop.last or m['role'] != 'assistant' else m['content'][:3]) +",
)
_NO_ANSWER_END = CHATML.replace(
    "'<|im_end|>' + '\\n'", "('' if m['role'] == 'assistant' else '<|im_end|>') + '\\n'"
)
_FIRST_LETTER = CHATML_BLOCKS.replace(
    "{% generation %}{{ m['content'] +",
    "{{ m['content'][:1] }}{% generation %}{{ m['content'][1:] +",
)
_HALF_END = CHATML_BLOCKS.replace(
    "{% endgeneration %}{{ '\\n' }}", "{% endgeneration %}{{ '<|eot_id|>\\n' }}"
)
_ALL_ALIKE = CHATML.replace("m['role']", "'assistant'")
_SYSTEM_TOO = CHATML_BLOCKS.replace("m['role'] == 'assistant'", "m['role'] != 'user'")
_AFTER_THE_END = CHATML_BLOCKS.replace(
    "{% endgeneration %}", "{{ 'Was this helpful?' }}{% endgeneration %}"
)
_QUOTES = CHATML.replace(
    "m['content'] +",
    "((messages[loop.index0 - 1]['content'][:4] if m['role'] == 'assistant' else '')"
    " + m['content']) +",
)
_TWICE = CHATML.replace("m['content'] +", "m['content'] + m['content'] +")
WRONG = {
    "trains words after the end": _AFTER_THE_END,
    "answers with the question": _QUOTES,
    "writes everything twice": _TWICE,
    "trains users too": _USERS_TOO,
    "forgets the end": _NO_END,
    "trains half of the end": _HALF_END,
    "trains the last answer only": _LAST_ONLY,
    "starts one letter late": _FIRST_LETTER,
    "writes no end": _NO_END_AT_ALL,
    "writes no end after answers": _NO_ANSWER_END,
    "shortens earlier answers": _SHORTENS_ANSWERS,
    "opens all turns alike": _ALL_ALIKE,
    "trains system turns too": _SYSTEM_TOO,
}


@functools.cache
def byte_level(*, newlines_apart: bool = True) -> Tokenizer:
    """A byte-level BPE trained on a few lines; every text comes back.

    newlines_apart: a run of newlines is never split by what follows it, as in models since GPT-4;
    GPT-2 gives the last newline of a run to the text after it.
    """
    tokenizer = Tokenizer(models.BPE())
    split = (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    parts = [pre_tokenizers.Split(Regex(split), "isolated")] if newlines_apart else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not newlines_apart)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    lines = ["user\n\nassistant\n\nsystem\n\n the quick brown fox", "yes\n\n\nno  and   so"] * 40
    lines += ["[INST] what is a mill [/INST] a house that grinds, in a land of a king"] * 40
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def make_tokenizer(
    chat_template: str | None = None, *, newlines_apart: bool = True, **options: Any
) -> PreTrainedTokenizerFast:
    model = byte_level(newlines_apart=newlines_apart)
    found = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(model.to_str()),
        bos_token="<|begin_of_text|>",
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIALS,
        **options,
    )
    found.chat_template = chat_template
    return found


def chat(*turns: str, **options: Any) -> Conversation:
    """chat("user: hi", "assistant: yo")."""
    messages = []
    for turn in turns:
        role, _, content = turn.partition(": ")
        messages.append({"role": role, "content": content})
    return Conversation(messages=messages, **options)


def marked(tokenizer: Any, rendered: Rendered, number: int = 0) -> str:
    """An example as text, with [ ] around what is trained and | at the start of each turn."""
    ids = rendered.examples.ids
    begin, stop = int(ids.offsets[number]), int(ids.offsets[number + 1])
    mask = rendered.examples.mask[begin:stop]
    turns = set((rendered.examples.turn_starts - begin).tolist())
    parts = []
    for place, (token, trained) in enumerate(zip(ids[number].tolist(), mask.tolist(), strict=True)):
        before = bool(place and mask[place - 1])
        parts.append("]" if before and not trained else "")
        parts.append("|" if place in turns else "")
        parts.append("[" if trained and not before else "")
        parts.append(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    return "".join(parts) + ("]" if mask.size and mask[-1] else "")


def trained_text(tokenizer: Any, rendered: Rendered, number: int = 0) -> str:
    ids = rendered.examples.ids
    begin, stop = int(ids.offsets[number]), int(ids.offsets[number + 1])
    mask = np.asarray(rendered.examples.mask[begin:stop])
    return str(tokenizer.decode(ids[number][mask], clean_up_tokenization_spaces=False))
