"""56 chat templates as published: ids of transformers, every answer trained, tables that are true.

`python -m tests.chat.test_published` rewrites the table in docs/chats.md.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from shardmill.chat.jinja.template import JinjaTemplate
from shardmill.chat.policy import REASONS, Rendered
from shardmill.chat.proof.prove import prove_mask
from shardmill.errors import TemplateError
from shardmill.records import Conversation
from tests.chat.published_kit import (
    ARGUMENTS_AS_TEXT,
    DATE,
    LOOK,
    NAMES,
    NEEDS,
    Options,
    conversations,
    divided,
    opened,
    options_of,
    source_of,
    tokenizer_of,
)

DOCS = Path(__file__).parents[2] / "docs" / "chats.md"
BEGIN, END = "<!-- published templates: begin -->", "<!-- published templates: end -->"
"""Around the table in the docs."""

pytestmark = [
    pytest.mark.skipif(not NAMES, reason="SHARDMILL_REAL_DATA has no templates"),
    pytest.mark.slow,
]


class _Clock(datetime):
    """What transformers asks for the date."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.fromisoformat(DATE)


@pytest.fixture(autouse=True, scope="module")
def _fixed_date() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", _Clock)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@functools.cache
def template_of(name: str, folder: Path) -> JinjaTemplate:
    return opened(name, folder)


# What transformers makes of a conversation.


def asked(name: str, messages: list[dict[str, Any]], tools: Any, **more: Any) -> Any:
    """`apply_chat_template` with the variables of the template; reasoning is also `thinking`."""
    given = deepcopy(messages)
    for message in given:
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
        for call in message.get("tool_calls", ()) if name in ARGUMENTS_AS_TEXT else ():
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return tokenizer_of(name).apply_chat_template(
        given, tools=tools, **options_of(name).variables, **more
    )


def ids_of(name: str, talk: Conversation) -> list[int]:
    return list(asked(name, talk.messages, talk.tools, return_dict=False))


def trained_texts(name: str, talk: Conversation) -> list[str]:
    """What should be trained: from the prompt of each answer to the special tokens at its end."""
    options = options_of(name)
    answers = [n for n, one in enumerate(talk.messages) if one["role"] == "assistant"]
    specials = "|".join(map(re.escape, tokenizer_of(name).all_special_tokens))
    found = []
    for number in answers[-1:] if options.fan_out else answers:
        prompt, whole = (
            asked(name, talk.messages[:stop], talk.tools, tokenize=False, **more)
            for stop, more in ((number, {"add_generation_prompt": True}), (number + 1, {}))
        )
        start = _same(prompt, whole)
        if start < len(prompt):  # <think> and <tool_call> begin alike
            assert options.any_prompt
            start -= len(re.search(r"(?:<\w*)?$", whole[:start])[0])
        message = talk.messages[number]
        calls = message.get("tool_calls")
        last = calls[0]["function"]["arguments"]["city"] if calls else message["content"]
        end = whole.rindex(last) + len(last)
        closed = re.compile(f"(?:{specials})+").search(whole, end)
        if options.train_on_eot and closed:
            end = closed.end()
        found.append(whole[start:end])
    return found


def _same(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def marked_by_blocks(name: str, talk: Conversation) -> list[int]:
    found = asked(
        name, talk.messages, talk.tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(found["assistant_masks"])


# The table in the docs.


@contextmanager
def lessons() -> Iterator[list[str]]:
    """The names of templates that had to write a conversation themselves."""
    found: list[str] = []
    learn = JinjaTemplate._learn

    def noted(self: JinjaTemplate, *given: Any) -> Any:
        found.append(self.name)
        return learn(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JinjaTemplate, "_learn", noted)
        yield found


def other(text: str) -> str:
    """Another text that templates treat alike."""
    return f"{text[::-1]}, \u00e9t\u00e9 \U0001f600"


class Row(NamedTuple):
    """What the docs say of a template."""

    name: str
    how: str
    options: str
    trained: str  # answers of a conversation of several turns
    system: str
    tools: str
    reasoning: str

    def __str__(self) -> str:
        name, how, options, *rest = self
        return f"| {' | '.join([name, how, f'`{options}`' if options else '', *rest])} |"


@functools.cache
def row_of(name: str, folder: Path) -> Row:
    template, options = template_of(name, folder), options_of(name)

    def trained(talk: Conversation) -> int:
        """How many answers of a conversation are trained; 0 if any is dropped."""
        found = template.render(divided([talk], options), options.policy)
        starts = found.examples.turn_starts
        turns = np.flatnonzero(found.examples.mask)
        turns = np.unique(np.searchsorted(starts, turns, side="right"))
        return 0 if found.drops else len(turns)

    def both(one: str, several: str, otherwise: str) -> str:
        return "no" if not kept[one] else otherwise if not kept[several] else "yes"

    kept = {shape: trained(talk) for shape, talk in conversations().items()}
    with lessons() as learnt:
        for talk in conversations(other).values():
            trained(talk)
    answers = {0: "none", 3: "every answer"}
    # What is dropped is kept as a form, too.
    return Row(
        name=name,
        how="by the template" if learnt else "compiled",
        options=str(options),
        trained=answers.get(kept["several turns"], f"{kept['several turns']} of 3"),
        system=both("system", "system, several turns", "one turn"),
        tools=both("tools", "tools, several turns", "at the end"),
        reasoning=both("reasoning", "reasoning in several turns", "one turn"),
    )


HEAD = """| template | run | options | trained | system text | tools | reasoning |
| --- | --- | --- | --- | --- | --- | --- |
"""


def table(folder: Path) -> str:
    return HEAD + "".join(f"{row_of(name, folder)}\n" for name in NAMES)


def rewrite_docs(folder: Path) -> None:
    before, _, rest = DOCS.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n{table(folder)}{END}{after}", "utf-8")


# The tests.


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_accepted_with_its_options_and_with_no_fewer(name: str, folder: Path) -> None:
    tokenizer, options = tokenizer_of(name), options_of(name)
    prove_mask(template_of(name, folder), tokenizer, options.policy)
    for fewer in options.simpler:
        with pytest.raises(TemplateError):
            prove_mask(opened(name, folder, fewer), tokenizer, fewer.policy)


def test_every_template_trains_every_answer_and_most_need_no_option(folder: Path) -> None:
    assert len(NAMES) == 56
    assert set(NEEDS) <= set(NAMES)
    rows = [row_of(name, folder) for name in NAMES]
    assert [row.name for row in rows if row.trained != "every answer"] == []
    assert [row.name for row in rows if row.how != "compiled"] == []
    with_all_turns_in_one = [name for name in NAMES if not options_of(name).fan_out]
    assert len(with_all_turns_in_one) == 47
    trainable = {name: NEEDS[name] for name in NEEDS if name.endswith("_training")}
    assert trainable == {"trl/gptoss_training": Options(date=True)}
    assert len(set(NAMES) - set(NEEDS)) == 38


def test_the_table_in_the_docs_is_up_to_date(folder: Path) -> None:
    _, _, rest = DOCS.read_text("utf-8").partition(BEGIN)
    shown, _, _ = rest.partition(END)
    assert shown.strip() == table(folder).strip(), "python -m tests.chat.test_published rewrites it"


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers_and_what_is_generated_is_trained(
    name: str, folder: Path
) -> None:
    template, options = opened(name, folder), options_of(name)
    for words in (str, other):
        talks = divided(list(conversations(words).values()), options)
        with lessons() as learnt:
            apart = [template.render([talk], options.policy) for talk in talks]
        assert bool(learnt) == (words is str)  # others are written by the compiled form
        whole = template.render(talks, options.policy)
        assert whole.kept.tolist() == [n for n, one in enumerate(apart) if len(one.kept)]
        assert {drop.reason for drop in whole.drops} <= REASONS.keys()
        for number, place in enumerate(whole.kept.tolist()):
            check_example(name, talks[place], apart[place], 0)
            check_example(name, talks[place], whole, number)


def check_example(name: str, talk: Conversation, rendered: Rendered, number: int) -> None:
    examples = rendered.examples
    start, stop = examples.ids.offsets[number : number + 2].tolist()
    ids, mask = examples.ids[number], examples.mask[start:stop]
    assert ids.tolist() == ids_of(name, talk)
    if template_has_blocks(name):
        assert mask.tolist() == marked_by_blocks(name, talk)
        return
    decode = tokenizer_of(name).decode
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    spans = [ids[one:two] for one, two in edges.reshape(-1, 2).tolist()]
    found = [decode(span, clean_up_tokenization_spaces=False) for span in spans]
    assert found == trained_texts(name, talk)


def template_has_blocks(name: str) -> bool:
    return re.search(r"\bendgeneration\b", source_of(name)) is not None


TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.sampled_from(
            ["a word", "\n", "  ", "\t\n", "<|im_", "None", "<think>", "</think>", "{"]
        ),
    ),
    max_size=3,
).map("".join)
EVIL = st.sampled_from(["<|im_end|>", "</s>", "<|eot_id|>", "[INST]", "<tool_call>", "<bos>"])
ANY = st.one_of(TEXTS, TEXTS, TEXTS, st.tuples(TEXTS, EVIL, TEXTS).map("".join))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 99), st.sampled_from([0.5, -1.25]), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)


@st.composite
def talks(draw: st.DrawFn) -> Conversation:
    """Exchanges of any texts, some with calls and results, some with reasoning."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(ANY)})
    for number in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(ANY)})
        if draw(st.integers(0, 2)) == 0:
            named = f"call0000{number}"
            arguments = draw(st.dictionaries(st.sampled_from(["city", "n"]), VALUES, max_size=2))
            function = {"name": "look", "arguments": arguments}
            one = {"type": "function", "id": named, "function": function}
            words = draw(st.one_of(st.just(""), ANY))
            messages.append({"role": "assistant", "content": words, "tool_calls": [one]})
            messages.append(
                {"role": "tool", "content": draw(ANY), "tool_call_id": named, "name": "look"}
            )
        answered = {"role": "assistant", "content": draw(ANY)}
        if draw(st.integers(0, 3)) == 0:
            answered["reasoning_content"] = draw(ANY)
        messages.append(answered)
    return Conversation(messages=messages, tools=draw(st.sampled_from([None, None, [LOOK]])))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(talk=talks())
def test_any_conversation_has_the_ids_of_transformers_or_a_reason(
    name: str, folder: Path, talk: Conversation
) -> None:
    template, options = template_of(name, folder), options_of(name)
    given_talks = divided([talk], options)
    rendered = template.render(given_talks, options.policy)
    assert len(rendered.kept) + len(rendered.drops) == len(given_talks)
    assert {drop.reason for drop in rendered.drops} <= REASONS.keys()
    for number, place in enumerate(rendered.kept.tolist()):
        assert rendered.examples.ids[number].tolist() == ids_of(name, given_talks[place])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        rewrite_docs(Path(made))
