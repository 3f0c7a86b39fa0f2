"""Prompts and answers of every template: together they are the tokens of the whole conversation."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat import bind_template, known_template
from shardmill.chat.branches import RenderedRecords, render_records
from shardmill.chat.jinja.template import open_jinja_template
from shardmill.chat.policy import ASSISTANT, ChatTemplate, TrainPolicy
from shardmill.protocols import Tokenizer
from shardmill.records import Branch, Conversation
from tests.chat.conftest import BINDABLE
from tests.chat.jinja_kit import CHATML, GEMMA, RIGHT, make_tokenizer

LAST = TrainPolicy(train_on="last-assistant")
TEXTS = st.text("ab \n.é", min_size=1, max_size=8).map(lambda text: f"x{text}y")


@st.composite
def records(draw: st.DrawFn) -> list[Conversation]:
    """Prompts of one to three turns with one to four answers; some are equal to the one before."""
    found: list[Conversation] = []
    for _ in range(draw(st.integers(1, 5))):
        said = draw(st.lists(TEXTS, min_size=1, max_size=3).filter(lambda said: len(said) != 2))
        roles = ("user", "assistant")
        prompt = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
        if found and draw(st.booleans()):
            prompt = [*found[-1].messages]  # type: ignore[list-item]
        answers = draw(st.lists(TEXTS, min_size=1, max_size=4, unique=True))
        branches = tuple(
            Branch(messages=[*prompt, {"role": "assistant", "content": text}], value=rank)
            for rank, text in enumerate(answers)
        )
        found.append(Conversation(messages=prompt, branches=branches, id=str(len(found))))
    return found


def assert_whole(template: ChatTemplate, given: list[Conversation], splits: list[int]) -> None:
    """Against the template itself, one conversation at a time."""
    found = render_records(template, given, LAST, np.array(splits, np.uint8))
    rows = iter(found.links.tolist())
    seen: list[tuple[int, int]] = []
    for number, at in enumerate(found.kept.tolist()):
        for branch in given[at].branches:
            example, prefix, record, value = next(rows)
            assert (record, value) == (number, branch.value)
            whole = replace(given[at], messages=branch.messages, branches=())
            (ids,) = template.render([whole], LAST).examples.ids
            parts = found.examples.ids[prefix], found.examples.ids[example]
            assert np.concatenate(parts).tolist() == ids.tolist()
            masks = [mask_of(found, one) for one in (prefix, example)]
            assert not masks[0].any()
            assert masks[1][0]
            wanted = template.render([whole], LAST).examples.mask
            assert np.concatenate(masks).tolist() == wanted.tolist()
            seen.append((prefix, at))
    assert next(rows, None) is None
    for (one, first), (two, second) in pairwise(seen):
        if one != two:
            same = np.array_equal(found.examples.ids[one], found.examples.ids[two])
            assert not same or splits[first] != splits[second], "neighbours share a prompt"
    turns = found.examples.turn_starts
    owner = np.searchsorted(found.examples.ids.offsets, turns, side="right") - 1
    assert set(owner.tolist()) == set(range(len(found.examples.ids))), "each has a turn"
    opened = found.examples.ids.offsets[found.links[:, 0]]
    roles = dict(zip(turns.tolist(), found.examples.turn_roles.tolist(), strict=True))
    assert all(roles[start] == ASSISTANT for start in opened.tolist())


def mask_of(found: RenderedRecords, example: int) -> np.ndarray:
    start, stop = found.examples.ids.offsets[example : example + 2].tolist()
    return found.examples.mask[start:stop]


@functools.cache
def jinja(name: str) -> ChatTemplate:
    return open_jinja_template(make_tokenizer(RIGHT[name]), name=name)


@pytest.mark.parametrize("name", sorted(RIGHT))
@settings(max_examples=8)
@given(given_records=records(), data=st.data())
def test_jinja_templates_give_whole_answers(
    name: str, given_records: list[Conversation], data: st.DataObject
) -> None:
    splits = [data.draw(st.integers(0, 1)) for _ in given_records]
    assert_whole(jinja(name), given_records, splits)


@pytest.mark.parametrize("name", BINDABLE)
@settings(max_examples=8)
@given(given_records=records(), data=st.data())
def test_known_templates_give_whole_answers(
    name: str,
    chat_tokenizers: dict[str, Tokenizer],
    given_records: list[Conversation],
    data: st.DataObject,
) -> None:
    template = bind_template(known_template(name), chat_tokenizers["byte-bpe"])
    splits = [data.draw(st.integers(0, 1)) for _ in given_records]
    assert_whole(template, given_records, splits)


def record(*answers: str) -> Conversation:
    asked = {"role": "user", "content": "why"}
    said = [[asked, {"role": "assistant", "content": text}] for text in answers]
    branches = tuple(Branch(messages=one, value=rank) for rank, one in enumerate(said))
    return Conversation(messages=[asked], branches=branches, id="-".join(answers))


def test_answers_that_a_template_makes_equal_are_dropped() -> None:
    template = open_jinja_template(make_tokenizer(GEMMA), name="gemma")  # it trims
    found = render_records(
        template, [record("a", "b"), record("b ", "b")], LAST, np.zeros(2, np.uint8)
    )
    assert found.kept.tolist() == [0]
    assert [(drop.id, drop.reason) for drop in found.drops] == [("b -b", "same_answers")]


def test_a_template_that_writes_the_prompt_by_its_answer_drops_the_record() -> None:
    mark = "('!' if m['role'] == 'user' and messages[-1]['content'] == 'b' else '')"
    by_answer = CHATML.replace("m['content'] +", f"(m['content'] + {mark}) +")
    template = open_jinja_template(make_tokenizer(by_answer), name="by answer")
    given = [record("a", "b"), record("a", "c")]
    found = render_records(template, given, LAST, np.zeros(2, np.uint8))
    assert found.kept.tolist() == [1]
    assert [drop.id for drop in found.drops] == ["a-b"]
